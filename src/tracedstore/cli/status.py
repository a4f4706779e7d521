"""Show who is there, who is missing and what is blocked, from the job's store.

Attaches to the store of a running job as one more client, writes nothing to it
and waits for nothing in it. What a rank is blocked in is asked of the ranks
themselves, of those that serve it (TRACEDSTORE_HTTP_PORT) and can be reached.

Examples:
  tracedstore status --store tcp://node1:29400
  tracedstore status --store tcp://node1:29400 --run-id job-7 --watch
  tracedstore status --store file:///shared/store --json
  tracedstore status --store etcd://etcd1:2379/jobs/7 --after 60 || alert

Exit codes: 0 nothing is missing; 1 the store cannot be reached or read, which
also ends --watch; 2 something is missing: a barrier or a rendezvous is not
complete, a node of a rendezvous is silent, or ranks have not registered;
64 the command line makes no sense; 130 Ctrl-C
"""

import argparse
import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

from tracedstore.attach.address import Address
from tracedstore.attach.torch_import import loading
from tracedstore.cli.options import add_store_argument, add_watch_arguments, seconds

if TYPE_CHECKING:
    from tracedstore.attach.job_status import Status

_MISSING = 2
_TOKEN = "TRACEDSTORE_HTTP_TOKEN"  # noqa: S105 - where it is, not what
_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    add_store_argument(parser)
    parser.add_argument(
        "--run-id", metavar="ID", help="leave out what belongs to other jobs"
    )
    parser.add_argument(
        "--after",
        type=seconds(0),
        default=0.0,
        metavar="SECONDS",
        help="how long a barrier may take before somebody is missing (0)",
    )
    parser.add_argument("--json", action="store_true", help="for programs: an object")
    add_watch_arguments(parser, "show it again and again", 2.0)
    parser.add_argument(
        "--token",
        default=os.environ.get(_TOKEN),
        help=f"the token that the ranks' endpoints ask for (${_TOKEN})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show it, once or again and again."""
    address = Address(arguments.store)
    address.probe()
    # Only where there is something to look at: torch takes seconds.
    with loading():
        from tracedstore.attach.blocked import ask  # noqa: PLC0415
        from tracedstore.attach.job_discovery import surveyed  # noqa: PLC0415
        from tracedstore.attach.job_status import Status  # noqa: PLC0415

    while True:
        survey = surveyed(address, arguments.run_id)
        infos = [info for group in survey.groups for info in group.ranks]
        status = Status(
            store=arguments.store,
            now=time.time(),
            survey=survey,
            replies=ask(infos, arguments.token),
            after=arguments.after,
        )
        _show(status, arguments)
        if not arguments.watch:
            return _MISSING if status.missing() else 0
        time.sleep(arguments.interval)


def _show(status: "Status", arguments: argparse.Namespace) -> None:
    if arguments.json:
        text = json.dumps(status.to_json())
    elif not arguments.watch:
        text = status.text(_WIDTH)
    elif sys.stdout.isatty():
        text = _in_place(status)
    else:
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(status.now))
        text = f"{at}\n{status.text(_WIDTH)}\n"
    # Hosts and keys may have letters that a terminal of old does not.
    encoding = sys.stdout.encoding
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _in_place(status: "Status") -> str:
    """Write over what was there, line by line: a screen cleared first flickers."""
    columns, rows = shutil.get_terminal_size()
    lines = status.text(min(_WIDTH, columns)).splitlines()
    # One is for the cursor. What matters most is at the top, and is not to scroll away.
    room = max(2, rows - 1)
    if len(lines) > room:
        more = len(lines) - room + 1
        lines[room - 1 :] = [f"... {more} more lines; the terminal has {rows}"]
    # What is too long is cut off meanwhile, so that a line stays one.
    shown = "\x1b[K\n".join(lines)
    return f"\x1b[H\x1b[?7l{shown}\x1b[?7h\x1b[J"
