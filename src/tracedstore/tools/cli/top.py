"""Watch a job on one screen: ranks, barriers, rendezvous and store calls.

Reads what `tracedstore status` reads, every two seconds, and shows it in a
terminal of at least 80x24: how the job is in one sentence, a grid of all ranks
by host with the worst first, arrivals at barriers over time, stragglers,
rendezvous and Store calls. Press ? for the keys. It writes nothing to the store
unless you ask for stacks, or with --ask. With --replay it plays the logs of a
finished job back. With --web it serves the screen to browsers instead: beyond
loopback only with a token. It needs the extra tracedstore[tools].

Examples:
  tracedstore top
  tracedstore top --store tcp://node1:29400 --run-id job-7 --ask
  tracedstore top --store tcp://node1:29400 --web 8080
  tracedstore top --replay logs/

Exit codes: 0 q was pressed; 1 there is no terminal, Textual is not installed,
no event could be read, or --web cannot listen or has no token; 64 invalid
command line; 130, 143, 129 Ctrl-C, SIGTERM, SIGHUP
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tracedstore.common.errors import CommandError, ConfigurationError
from tracedstore.common.validation import MAX_PORT
from tracedstore.export.settings import Settings
from tracedstore.tools.attach.child_process import die_with_parent
from tracedstore.tools.attach.token_policy import is_loopback
from tracedstore.tools.cli.options import (
    TOKEN_VARIABLE,
    add_store_argument,
    add_token_arguments,
    seconds,
    store_address,
    token_policy,
)

# What a colleague needs.
_FOR_OTHERS = (
    "for others: --web 0.0.0.0:{port} with "
    f"{TOKEN_VARIABLE}, and send them the link that it prints\n"
)
# The process id of the server, for a process that draws for a browser.
_SERVER = "_TRACEDSTORE_TOP_SERVER"
# What the server of --web needs itself, and what is no option.
_NOT_FOR_TABS = ("web", "token", "run", "refuse", "pid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.set_defaults(refuse=parser.error)
    add_store_argument(parser)
    parser.add_argument(
        "--replay",
        nargs="+",
        action="extend",
        metavar="LOG",
        help="play the logs of a finished job back: files or directories",
    )
    parser.add_argument(
        "--run-id", metavar="ID", help="leave out ranks and barriers of other jobs"
    )
    parser.add_argument(
        "--after",
        type=seconds(0),
        default=5.0,
        metavar="SECONDS",
        help="seconds a barrier may take before its absent ranks count as awaited (5)",
    )
    parser.add_argument(
        "--ask",
        action="store_true",
        help="ask all ranks through the store what they do, at each reading",
    )
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=2.0,
        metavar="SECONDS",
        help="seconds between two readings (2)",
    )
    parser.add_argument(
        "--web",
        type=_listening_address,
        metavar="[HOST:]PORT",
        help="serve the screen to browsers, on 127.0.0.1 unless a host is given; with"
        f" a token (${TOKEN_VARIABLE}, --token) browsers must send it, and beyond"
        " loopback there must be one",
    )
    add_token_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the screen until a key ends it."""
    if arguments.store is not None and arguments.replay is not None:
        arguments.refuse("give either --store or --replay")
    show = _live if arguments.replay is None else _replay
    if arguments.web is not None:
        return _serve(arguments)
    if server := os.environ.get(_SERVER):
        die_with_parent(int(server))
    else:
        check_terminal("tracedstore status --watch prints lines")
    return show(arguments)


def _live(arguments: argparse.Namespace) -> int:
    from tracedstore.tools.top.reader_process import JobReader  # noqa: PLC0415

    address = store_address(arguments)
    # Forked before anything starts a thread.
    reader = JobReader(
        address,
        token_policy(arguments, address.host),
        run_id=arguments.run_id,
        after=arguments.after,
        ask=arguments.ask,
    )
    try:
        from tracedstore.tools.top.live import LiveApp  # noqa: PLC0415

        return _code(LiveApp(reader, arguments.interval, Path.cwd()).run())
    finally:
        reader.close()


def _replay(arguments: argparse.Namespace) -> int:
    from tracedstore.tools.cli.report import read_logs  # noqa: PLC0415
    from tracedstore.tools.top.replay import Replay, ReplayApp  # noqa: PLC0415

    analysis, stats = read_logs(arguments.replay, Path(os.devnull))
    replay = Replay(" ".join(arguments.replay), analysis)
    return _code(ReplayApp(replay, stats, Path.cwd()).run())


def _serve(arguments: argparse.Namespace) -> int:
    from tracedstore.export.http_endpoint import access_of  # noqa: PLC0415

    host, port = arguments.web
    try:
        access = access_of(Settings.load({"http_token": arguments.token}))
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    if access.credentials is None and not is_loopback(host):
        raise CommandError(
            f"top --web {host}:{port} would let everyone in the network watch the job:"
            f" set {TOKEN_VARIABLE}, or serve on 127.0.0.1 and use a tunnel"
        )
    # Errors of the command line are found here, not in the first browser.
    if arguments.replay is None:
        store_address(arguments)
    from tracedstore.tools.top.web import TopServer, child_command  # noqa: PLC0415

    if arguments.token is not None:
        # The processes of the tabs read it there. Other users can read command lines.
        os.environ[TOKEN_VARIABLE] = arguments.token
    os.environ[_SERVER] = str(os.getpid())
    shown = arguments.store or " ".join(arguments.replay)
    server = TopServer(
        child_command(_options(arguments)), f"tracedstore top {shown}", access
    )

    def say(url: str) -> None:
        sys.stdout.write(f"serving on {url} until Ctrl-C\n")
        if access.credentials is not None:
            sys.stdout.write("log in as any user, with the token as the password\n")
        if is_loopback(host):
            sys.stdout.write(_FOR_OTHERS.format(port=urlsplit(url).port))
        sys.stdout.flush()

    return asyncio.run(server.run(host, port, say))


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return the options for the process of a tab."""
    given = []
    for name, value in vars(arguments).items():
        option = f"--{name.replace('_', '-')}"
        if name in _NOT_FOR_TABS or value is None or value is False:
            continue
        if value is True:
            given.append(option)
        else:
            values = value if isinstance(value, list) else [value]
            given += [f"{option}={one}" for one in values]
    return given


def _listening_address(text: str) -> tuple[str, int]:
    """Parse ``[HOST:]PORT``."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; accepted is [HOST:]PORT, such as 8080 or 0.0.0.0:8080"
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _code(returned: int | None) -> int:
    """Return the exit code; Textual returns None after an error."""
    return 1 if returned is None else returned


def check_terminal(otherwise: str) -> None:
    """Refuse to start without a terminal; the error has what to use otherwise."""
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    # Textual draws on standard error.
    if dumb or not all(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)):
        raise CommandError(f"top needs a terminal: {otherwise}")
    if os.environ.get("NO_COLOR") == "":
        # Unset for us, set for Textual.
        del os.environ["NO_COLOR"]
