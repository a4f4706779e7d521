"""``tracedstore``: the command line.

Each command is a module of this package. Its docstring is the help text,
`add_arguments` declares its arguments, and `run` returns its exit code.
"""

import argparse
import io
import os
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from tracedstore._version import __version__
from tracedstore.common.errors import CommandError, UsageError

# A command's module is imported when the command is run, because torch takes a second.
COMMANDS: Final = {
    "build-native": "build the native recording base for the installed torch",
    "completion": "write a completion script for your shell",
    "dashboards": "write Grafana dashboards and alert rules",
    "demo": "see it at work, in half a minute, on this machine",
    "report": "make a page from the logs of many ranks",
    "sd": "list the endpoints of a job for Prometheus",
    "stacks": "show what every rank of a job executes",
    "status": "show a job's ranks, missing ranks and blocked calls",
    "top": "watch a job on one screen: ranks, barriers, rendezvous, store calls",
}
_EPILOG = """\
Examples:
  tracedstore demo
  tracedstore status
  tracedstore status --store node1:29400
  tracedstore COMMAND --help

Exit codes: 0 success, 1 failure, 64 invalid command line, 130 Ctrl-C, 141 the
reader of the output has closed it; status also has 2, something is missing,
and 3, nothing is known; stacks has 2, ranks did not answer
"""
# 128 + SIGINT and 128 + SIGPIPE, as shells report them.
_INTERRUPTED, _BROKEN_PIPE = 130, 141
# The libraries of the extra `tools`, by the names of their modules.
_TOOLS: Final = ("aiohttp", "jinja2", "rich", "shtab", "textual", "textual_serve")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence, without ten lines of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            UsageError.exit_code, f"{self.prog}: {message}; try {self.prog} --help\n"
        )


class _Version(argparse.Action):
    """Shows the version, and which base records calls here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from tracedstore.native.load import describe  # noqa: PLC0415

        sys.stdout.write(f"tracedstore {__version__}\n{describe()}\n")
        parser.exit()


def make_parser(loaded: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the arguments of some commands."""
    parser = _Parser(
        prog="tracedstore",
        description="See what a distributed PyTorch job's coordination is doing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in loaded:
            module = import_module(f"tracedstore.tools.cli.{name.replace('-', '_')}")
            help_text = str(module.__doc__)
            command.description, _, command.epilog = help_text.partition("\n\n")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    for one in (parser, *commands.choices.values()):
        one.add_argument("--version", action=_Version, nargs=0, help="show versions")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # it was closed by the caller
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Keys and host names may have characters that its encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(given)
        finally:
            # Flushed here, because Python reports a failure at exit in its own way.
            sys.stdout.flush()
    except BrokenPipeError:
        code = _BROKEN_PIPE
    except OSError as error:
        sys.stderr.write(f"tracedstore: {_describe(error)}\n")
        code = 1
    # Discards what could not be written, which Python would try again at exit.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename} cannot be read or written: {reason}"
    # Output that could not be written is still in the buffer, if there is one.
    try:
        sys.stdout.flush()
    except OSError:
        return f"standard output cannot be written: {reason}"
    return f"the operating system refused a request: {reason}"


def _run(given: Sequence[str]) -> int:
    # torch's C++ logs every connection that it retries.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        arguments = make_parser(loaded=given[:1]).parse_args(given)
        code: int = arguments.run(arguments)
    except CommandError as error:
        sys.stderr.write(f"tracedstore: {error}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in (*_TOOLS, "torch"):
            raise
        remedy = "torch" if missing == "torch" else "'tracedstore[tools]'"
        sys.stderr.write(
            f"tracedstore: {given[0]} needs {missing}, which is not installed:"
            f" pip install {remedy}\n"
        )
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
