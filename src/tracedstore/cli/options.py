"""Options that more than one command has."""

import argparse
import math
import os
from collections.abc import Callable

from tracedstore.attach.address import ACCEPTED
from tracedstore.attach.token_policy import TokenPolicy
from tracedstore.export.settings import PREFIX, parse_token

_MAX_SECONDS = 86400.0
_TOKEN_VARIABLE = f"{PREFIX}HTTP_TOKEN"


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


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--token``, ``--token-host`` and ``--insecure-token``."""
    parser.add_argument(
        "--token",
        type=_token,
        # An empty variable is no token.
        default=os.environ.get(_TOKEN_VARIABLE) or None,
        help=f"the token of the ranks' endpoints (${_TOKEN_VARIABLE}); sent over"
        " verified TLS, else only to named hosts: that of --store, and --token-host",
    )
    parser.add_argument(
        "--token-host",
        action="append",
        default=[],
        metavar="HOST",
        help="a host that may get the token over plain HTTP; can be repeated",
    )
    parser.add_argument(
        "--insecure-token",
        action="store_true",
        help="send the token over plain HTTP to named hosts, not only to loopback"
        " addresses; everyone on the network can read it",
    )


def token_policy(arguments: argparse.Namespace, store_host: str) -> TokenPolicy:
    """Return the policy of the arguments that `add_token_arguments` adds."""
    return TokenPolicy(
        token=arguments.token,
        hosts=tuple(filter(None, [store_host, *arguments.token_host])),
        insecure=arguments.insecure_token,
    )


def _token(text: str) -> str:
    try:
        return parse_token(text)
    except ValueError as accepted:
        raise argparse.ArgumentTypeError(
            f"the token here or in {_TOKEN_VARIABLE} is not shown; accepted is"
            f" {accepted}"
        ) from None


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
