"""``tracedstore-run``: runs a command and traces the Python processes below it.

It prepends one directory to PYTHONPATH and executes the command. It does not import
torch.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from tracedstore._version import __version__

# The directory with sitecustomize.py, which Python imports at start-up if it is on
# PYTHONPATH.
STARTUP: Final = str(Path(__file__).resolve().parent / "startup")

_HELP: Final = """\
usage: tracedstore-run [--help] [--version] command [argument ...]

Run a command and trace the torch.distributed stores of all Python processes
below it. The program needs no change. TRACEDSTORE_* variables configure the
telemetry; see docs/zero-code.md.

Examples:
  tracedstore-run torchrun --nproc-per-node 4 train.py
  tracedstore-run python train.py

Exit codes: those of the command; 125 no command or an unknown option, 126 the
command cannot be run, 127 the command is not found
"""
# The exit codes of env and nohup.
_USAGE, _CANNOT_RUN, _NOT_FOUND = 125, 126, 127


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python processes are traced."""
    before = environ.get("PYTHONPATH", "")
    others = [folder for folder in before.split(os.pathsep) if folder != STARTUP]
    # An empty entry is the working directory, but an empty variable has no entry.
    path = [STARTUP, *others] if before else [STARTUP]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Replace this process with the command."""
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
        _fail(_USAGE, f"unknown option {command[0]!r}; known are --help, --version")
    if not command:
        _fail(_USAGE, "no command given; try tracedstore-run --help")
    try:
        os.execvpe(command[0], command, environment(os.environ))  # noqa: S606 - the purpose of this program
    except FileNotFoundError:
        hint = f"python {command[0]}" if command[0].endswith(".py") else "its path"
        _fail(_NOT_FOUND, f"command {command[0]!r} is not on PATH; try {hint}")
    except OSError as error:
        _fail(_CANNOT_RUN, f"{command[0]!r} cannot be run: {error.strerror}")


def _fail(status: int, reason: str) -> NoReturn:
    sys.stderr.write(f"tracedstore-run: {reason}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
