"""See it at work: a job of real processes on this machine, which loses two ranks.

In four acts: healthy steps, contention, a straggler, and two ranks that are
killed, rank 0 among them. What is shown is read from the ranks' own logs,
metrics and traces, which stay in a folder for you to look at. It takes about
half a minute.

Examples:
  tracedstore demo
  tracedstore demo --store file --ranks 4 --output here/
  tracedstore demo --serve
  tracedstore demo --json | jq .missing

Where standard output is no terminal, or NO_COLOR is set, plain lines are
written.

Exit codes: 0 shown (with --serve, also after Ctrl-C), 1 it could not be shown,
64 the command line makes no sense, 130 Ctrl-C before its end
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tracedstore._version import __version__

_FEWEST_RANKS, _MOST_RANKS = 4, 64
# On two cores 24 took 49 s; 32 took 82 s, and survivors did not agree in time.
_MOST_RANKS_ON_ETCD = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    parser.set_defaults(refuse=parser.error)
    parser.add_argument(
        "--store",
        choices=["tcp", "file", "etcd"],
        default="tcp",
        help="what the ranks meet through: TCPStore, FileStore or EtcdStore (tcp)",
    )
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=8,
        metavar="N",
        help=f"how many, {_FEWEST_RANKS} to {_MOST_RANKS}, with etcd to"
        f" {_MOST_RANKS_ON_ETCD} (8)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="who is late and who is killed beside rank 0 (0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where logs, metrics and traces go (a new folder for temporary files)",
    )
    parser.add_argument(
        "--json", action="store_true", help="write the summary as JSON, and no more"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="keep the survivors' endpoints up for a Prometheus, until Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    if arguments.store == "etcd" and arguments.ranks > _MOST_RANKS_ON_ETCD:
        arguments.refuse(
            f"--ranks {arguments.ranks} is too many for --store etcd, at most"
            f" {_MOST_RANKS_ON_ETCD}: they would not be through in a minute; give"
            " fewer, or --store tcp or file"
        )
    # A terminal that is closed, or a supervisor: the ranks end with this too.
    # nohup's way of saying that it shall not is respected.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    # torch asks for the name behind the address of every connection. No name server has
    # one for loopback, and where none answers that takes seconds each.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    if not arguments.json:
        sys.stdout.write(f"tracedstore {__version__} demo: loading torch\n")
        sys.stdout.flush()
    from tracedstore.demo.acts import perform  # noqa: PLC0415 - said just above

    return perform(arguments)


def _ranks(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not _FEWEST_RANKS <= number <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks from {_FEWEST_RANKS} to {_MOST_RANKS}:"
            " two are killed, and two have to agree"
        )
    return number


def _end(number: int, _frame: FrameType | None) -> None:
    # As a shell counts them.
    sys.exit(128 + number)
