"""``tracedstore``: what can be asked of a job from a terminal.

Exit codes: 0 for yes, 1 where it could not be done, 2 for a command line that makes no
sense; a command may say more.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from tracedstore._version import __version__
from tracedstore.cli.errors import CommandError

# Each is a module of this package, loaded when it is asked for: torch takes a second.
COMMANDS = {
    "dashboards": "write Grafana dashboards and alert rules",
    "demo": "see it at work, in half a minute, on this machine",
    "report": "make a page of the logs of many ranks",
    "sd": "list the ranks of a job for Prometheus",
    "status": "show who is there, who is missing and what is blocked",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; give its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="tracedstore",
        description="See what a distributed PyTorch job's coordination is doing.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if given[:1] == [name]:
            # What torch's C++ says of a connection it tries again is not for here.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            module = import_module(f"tracedstore.cli.{name}")
            said = str(module.__doc__)
            command.description, _, command.epilog = said.partition("\n\n")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    chosen = parser.parse_args(given)
    try:
        code: int = chosen.run(chosen)
    except CommandError as error:
        sys.stderr.write(f"tracedstore: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read this has enough; nothing is to be flushed into it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def entry() -> NoReturn:
    """Be the command, and end at once.

    A store that hangs may have left a thread in torch's C++, which aborts the process
    when it comes back into an interpreter that is being torn down.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
