"""Options that more than one command has."""

import argparse
import math
from collections.abc import Callable

from tracedstore.attach.address import ACCEPTED

_LONGEST_WAIT = 86400.0


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """Let a command take a store."""
    parser.add_argument(
        "--store", required=True, metavar="URL", help=f"the job's store: {ACCEPTED}"
    )


def add_watch_arguments(
    parser: argparse.ArgumentParser, what: str, interval: float
) -> None:
    """Let a command look again and again."""
    parser.add_argument("--watch", action="store_true", help=what)
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=interval,
        metavar="SECONDS",
        help=f"how often to look, with --watch ({interval:g})",
    )


def seconds(least: float) -> Callable[[str], float]:
    """Read a time of so many seconds at least from a command line."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= _LONGEST_WAIT:
            raise argparse.ArgumentTypeError(
                f"is {text!r}; accepted are seconds from {least:g} to {_LONGEST_WAIT:g}"
            )
        return found

    return read
