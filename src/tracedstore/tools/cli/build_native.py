"""Build the native recording base for the installed torch.

It needs a C++ compiler (g++, or the one in $CXX) and half a minute. Jobs use it
from then on, unless TRACEDSTORE_CORE=python. Without it, or with another torch,
calls are recorded by Python.

Examples:
  tracedstore build-native
  tracedstore build-native --dir /shared/native    (TRACEDSTORE_NATIVE_DIR)
  tracedstore build-native --check

Exit codes: 0 built, or with --check, found; 1 not; 64 invalid command line
"""

import argparse
import sys
from pathlib import Path

from tracedstore.common.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where to put it (~/.cache/tracedstore/native)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build nothing; say whether there is a build for this torch",
    )


def run(arguments: argparse.Namespace) -> int:
    """Build it, or check that it is built."""
    # These import torch, which takes a second.
    from tracedstore.native.build import build  # noqa: PLC0415
    from tracedstore.native.load import (  # noqa: PLC0415
        NativeUnavailable,
        find,
        load_file,
    )

    if not arguments.check:
        file = build(arguments.dir, lambda line: _say(f"{line} ..."))
        sys.stdout.write(f"{file}\n")
        return 0
    try:
        file = find(arguments.dir)
        load_file(file)
    except NativeUnavailable as error:
        raise CommandError(str(error)) from error
    sys.stdout.write(f"{file}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"tracedstore: {line}\n")
    sys.stderr.flush()
