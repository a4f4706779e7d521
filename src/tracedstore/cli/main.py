"""``tracedstore``: what can be asked of a job from a terminal.

Each command is a module of this package: its docstring is its help, `add_arguments`
says what it takes and `run` gives its exit code.
"""

import argparse
import os
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from tracedstore._version import __version__
from tracedstore.core.errors import CommandError

# Loaded when they are asked for: torch takes a second.
COMMANDS: Final = {
    "completion": "write what makes a shell complete these commands",
    "dashboards": "write Grafana dashboards and alert rules",
    "demo": "see it at work, in half a minute, on this machine",
    "report": "make a page of the logs of many ranks",
    "sd": "list the ranks of a job for Prometheus",
    "status": "show who is there, who is missing and what is blocked",
}
_ABOUT = """\
Examples:
  tracedstore demo
  tracedstore status --store tcp://node1:29400
  tracedstore COMMAND --help

Exit codes: 0 done, 1 could not be done, 64 the command line makes no sense,
130 Ctrl-C, 141 nobody reads what it writes; status also has 2, something is
missing
"""
# As sysexits.h has it. Not argparse's 2, which is what status says of a job.
USAGE: Final = 64
# As a shell says it of whoever was ended by SIGINT or SIGPIPE.
_INTERRUPTED, _NOBODY_READS = 130, 141


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, not under ten lines of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; try {self.prog} --help\n")


def parser(loaded: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Make what reads the command line, with the arguments of some commands."""
    whole = _Parser(
        prog="tracedstore",
        description="See what a distributed PyTorch job's coordination is doing.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in loaded:
            module = import_module(f"tracedstore.cli.{name}")
            said = str(module.__doc__)
            command.description, _, command.epilog = said.partition("\n\n")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    for one in (whole, *commands.choices.values()):
        one.add_argument(
            "--version", action="version", version=f"tracedstore {__version__}"
        )
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # who closed it does not want to read
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - to the end
    try:
        try:
            return _run(given)
        finally:
            # Not left to the end of Python, which complains in words of its own.
            sys.stdout.flush()
    except BrokenPipeError:
        code = _NOBODY_READS
    except OSError as error:
        sys.stderr.write(f"tracedstore: cannot go on: {error}\n")
        code = 1
    # What could not be written is not tried again.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(given: Sequence[str]) -> int:
    # What torch's C++ says of a connection it tries again is not for here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    chosen = parser(loaded=given[:1]).parse_args(given)
    try:
        code: int = chosen.run(chosen)
    except CommandError as error:
        sys.stderr.write(f"tracedstore: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
