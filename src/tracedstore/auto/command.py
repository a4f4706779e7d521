"""``tracedstore-run``: run any command, and trace the Python processes below it.

It changes one thing, PYTHONPATH, and becomes the command. It imports no torch.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from tracedstore._version import __version__

# What every Python process imports first that is started with this on PYTHONPATH.
STARTUP: Final = str(Path(__file__).resolve().parent / "startup")

_HELP: Final = """\
usage: tracedstore-run [--help] [--version] command [argument ...]

Run a command, and trace the torch.distributed stores of all Python processes
that it starts, its children's children too. The program needs no change.
TRACEDSTORE_* variables configure what is told; see docs/zero-code.md.

Examples:
  tracedstore-run torchrun --nproc-per-node 4 train.py
  tracedstore-run python train.py

Exit codes: those of the command; 125 there is none to run, 126 it cannot be
run, 127 it cannot be found
"""
# As env and nohup have them.
_USAGE, _CANNOT_RUN, _NOT_FOUND = 125, 126, 127


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the environment in which Python processes trace themselves."""
    before = environ.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != STARTUP]
    # An empty entry is the working directory, but an empty variable is no entry.
    path = [STARTUP, *others] if before else [STARTUP]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Become the command."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_HELP)
        sys.exit(0)
    if command[:1] == ["--version"]:
        sys.stdout.write(f"tracedstore-run {__version__}\n")
        sys.exit(0)
    if command[:1] == ["--"]:
        del command[0]
    elif command and command[0].startswith("-"):
        _refuse(_USAGE, f"{command[0]!r} is no option of it; it has --help, --version")
    if not command:
        _refuse(_USAGE, "no command to run was given; try tracedstore-run --help")
    try:
        os.execvpe(command[0], command, environment(os.environ))  # noqa: S606 - that is what it is for
    except FileNotFoundError:
        hint = f"python {command[0]}" if command[0].endswith(".py") else "its path"
        _refuse(_NOT_FOUND, f"there is no command {command[0]!r} on PATH; give {hint}")
    except OSError as error:
        _refuse(_CANNOT_RUN, f"{command[0]!r} cannot be run: {error.strerror}")


def _refuse(status: int, reason: str) -> NoReturn:
    sys.stderr.write(f"tracedstore-run: {reason}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
