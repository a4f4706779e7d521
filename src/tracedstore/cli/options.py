"""Options that more than one command has."""

import argparse
import math
from collections.abc import Callable

from tracedstore.attach.address import ACCEPTED

_MAX_SECONDS = 86400.0


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--store``."""
    parser.add_argument(
        "--store", required=True, metavar="URL", help=f"the job's store: {ACCEPTED}"
    )


def add_watch_arguments(
    parser: argparse.ArgumentParser, help_text: str, interval: float
) -> None:
    """Add ``--watch`` and ``--interval``."""
    parser.add_argument("--watch", action="store_true", help=help_text)
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=interval,
        metavar="SECONDS",
        help=f"seconds between two readings, with --watch ({interval:g})",
    )


def seconds(minimum: float) -> Callable[[str], float]:
    """Return an argparse type for a number of seconds, up to a day."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not minimum <= number <= _MAX_SECONDS:
            raise argparse.ArgumentTypeError(
                f"is {text!r}; accepted are seconds from {minimum:g} to"
                f" {_MAX_SECONDS:g}"
            )
        return number

    return parse
