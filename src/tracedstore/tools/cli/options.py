"""Options that more than one command has."""

import argparse
import math
import os
import sys
from collections.abc import Callable

from tracedstore.common.errors import ConfigurationError, UsageError
from tracedstore.export.settings import PREFIX, parse_token, read_password
from tracedstore.tools.attach.address import ACCEPTED, Address, EtcdAccess
from tracedstore.tools.attach.local_jobs import find_job
from tracedstore.tools.attach.token_policy import TokenPolicy

_MAX_SECONDS = 86400.0
TOKEN_VARIABLE = f"{PREFIX}HTTP_TOKEN"
# Named as in --rdzv-conf. The value of an option, else of a variable of this name.
_TLS_FILES = {
    "ca_cert": "the certificate of the authority of etcd's certificate",
    "ssl_cert": "the client's certificate",
    "ssl_cert_key": "the key of the client's certificate",
}
_LOG_IN = {
    "user": "the user, where etcd has authentication enabled",
    "password_file": "a file with the user's password",
}


def add_store_argument(parser: argparse.ArgumentParser, *, found: bool = True) -> None:
    """Add ``--store``, and the options for a store in etcd.

    Args:
        parser: The parser.
        found: Without ``--store``, the store of a job of this host is used.
    """
    without = "; without it, that of the job of this host" if found else ""
    parser.add_argument(
        "--store",
        required=not found,
        metavar="URL",
        help=f"the job's store: {ACCEPTED}{without}",
    )
    if found:
        parser.add_argument(
            "--pid",
            type=int,
            metavar="PID",
            help="without --store: the job of this process",
        )
    group = parser.add_argument_group("TLS (etcds://) and users of etcd")
    for name, help_text in (_TLS_FILES | _LOG_IN).items():
        group.add_argument(
            _option(name),
            metavar="NAME" if name == "user" else "FILE",
            help=f"{help_text} (${_variable(name)})",
        )


def store_address(arguments: argparse.Namespace) -> Address:
    """Return the address of the arguments that `add_store_argument` adds.

    Raises:
        UsageError: The address is invalid, or an option cannot be used.
        CommandError: No address is given, and this host has not just one job.
    """
    if arguments.store is None:
        job = find_job(arguments.pid, arguments.run_id)
        sys.stderr.write(f"tracedstore: reading {job.describe()}\n")
        arguments.store = job.url
    elif getattr(arguments, "pid", None) is not None:
        raise UsageError("--pid finds a store, and --store names one: give one of them")
    given = {name: getattr(arguments, f"etcd_{name}") for name in _TLS_FILES | _LOG_IN}
    address = Address(arguments.store)
    for names, accepted, fits in (
        (_TLS_FILES, "etcds://", address.secure),
        (_LOG_IN, "etcd:// and etcds://", address.scheme == "etcd"),
    ):
        for name in names:
            if given[name] and not fits:
                raise UsageError(
                    f"{_option(name)} is for {accepted}, and --store is {address.url!r}"
                )
            # A variable may be set for other stores.
            given[name] = given[name] or (fits and os.environ.get(_variable(name)))
    for name in _TLS_FILES:
        if given[name] and not os.access(given[name], os.R_OK):
            raise UsageError(
                f"{_option(name)} is {given[name]!r}, which cannot be read"
            )
    user, file = given["user"], given["password_file"]
    if bool(user) != bool(file):
        raise UsageError(
            f"{_option('user')} and {_option('password_file')} are needed both, and"
            f" only one is set"
        )
    try:
        password = read_password(file) if file else ""
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    files = {name: given[name] or None for name in _TLS_FILES}
    return Address(
        arguments.store, EtcdAccess(**files, user=user or "", password=password)
    )


def _option(name: str) -> str:
    return f"--etcd-{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{PREFIX}ETCD_{name.upper()}"


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
        default=os.environ.get(TOKEN_VARIABLE) or None,
        help=f"the token of the ranks' endpoints (${TOKEN_VARIABLE}); sent over"
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
            f"the token here or in {TOKEN_VARIABLE} is not shown; accepted is"
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
