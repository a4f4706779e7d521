"""Show whom a job waits for, its ranks and its blocked calls, from its store.

Connects to the store of a running job as one more client, writes nothing to it
and waits for nothing in it. On a node of the job, as its user, it finds the
store. With --ask it writes a question, which it deletes
with its answers, and shows what the other ranks do. Blocked ranks publish their
calls in the store. Ranks that serve their metrics (TRACEDSTORE_HTTP_PORT) and
can be reached are queried for all of their calls in flight.

Examples:
  tracedstore status
  tracedstore status --store node1:29400
  tracedstore status --store tcp://node1:29400 --ask
  tracedstore status --store tcp://node1:29400 --run-id job-7 --watch
  tracedstore status --store file:///shared/store --json
  tracedstore status --store etcd://etcd1:2379/jobs/7 --after 60 || alert
  tracedstore status --store etcds://etcd1:2379/job-7 --etcd-ca-cert ca.pem

Exit codes: 0 nothing is missing; 1 the store cannot be reached or read, which
also ends --watch; 2 something is missing: a stall is reported and confirmed,
ranks are blocked, a barrier or a rendezvous is not complete, a node of a
rendezvous is silent, or ranks have not registered; 3 nothing is missing, but
nothing has moved for stall_after in any rank: no store call, barrier or
collective has ended; 64 invalid command line; 130 Ctrl-C
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tracedstore.tools.attach.address import interruptible_import
from tracedstore.tools.cli.options import (
    add_store_argument,
    add_token_arguments,
    add_watch_arguments,
    seconds,
    store_address,
    token_policy,
)

if TYPE_CHECKING:
    from tracedstore.tools.attach.job_reading import JobReading

# 3: it is not known that the job is healthy.
_MISSING, _UNKNOWN = 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_store_argument(parser)
    parser.add_argument(
        "--run-id", metavar="ID", help="leave out ranks and barriers of other jobs"
    )
    parser.add_argument(
        "--after",
        type=seconds(0),
        default=0.0,
        metavar="SECONDS",
        help="seconds a barrier may take, or a rank may be blocked, before it counts as"
        " missing (0)",
    )
    parser.add_argument(
        "--ask",
        action="store_true",
        help="ask all ranks through the store what they do; waits for up to 5 s",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_watch_arguments(parser, "repeat until Ctrl-C", 2.0)
    add_token_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status, once or at intervals."""
    address = store_address(arguments)
    address.probe()
    tokens = token_policy(arguments, address.host)
    # Only for a store that answers, because torch takes seconds.
    with interruptible_import():
        from tracedstore.tools.attach.job_reading import read_job  # noqa: PLC0415

    with _json_output() if arguments.json else _text_output(arguments.watch) as show:
        while True:
            reading = read_job(
                address,
                tokens,
                run_id=arguments.run_id,
                after=arguments.after,
                ask=arguments.ask,
            )
            show(reading)
            if not arguments.watch:
                if reading.missing():
                    return _MISSING
                return _UNKNOWN if reading.unknown() or reading.still() else 0
            time.sleep(arguments.interval)


@contextmanager
def _json_output() -> "Iterator[Callable[[JobReading], None]]":
    def show(reading: "JobReading") -> None:
        sys.stdout.write(json.dumps(reading.to_json()) + "\n")
        sys.stdout.flush()

    yield show


@contextmanager
def _text_output(watch: bool) -> "Iterator[Callable[[JobReading], None]]":
    # Only for text, because rich takes 50 ms.
    from rich.console import Group  # noqa: PLC0415

    from tracedstore.tools.attach.job_text import status_lines  # noqa: PLC0415
    from tracedstore.tools.attach.live_view import view_of  # noqa: PLC0415
    from tracedstore.tools.terminal import Line, Screen  # noqa: PLC0415

    with Screen(sys.stdout) as screen:
        if watch and screen.interactive:
            screen.print(Line("tracedstore top is this as a screen with keys", "dim"))

        def show(reading: "JobReading") -> None:
            lines = status_lines(view_of(reading))
            if not watch:
                screen.print(*lines)
            elif screen.interactive:
                screen.show(Group(*lines))
            else:
                now = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(reading.now))
                screen.print(Line(now), *lines, Line(""))

        yield show
