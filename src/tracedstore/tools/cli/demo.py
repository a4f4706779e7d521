"""See it at work: a job of real processes on this machine, which loses two ranks.

It has six scenarios: healthy steps, a skipped collective, contention, a
straggler, a busy rank, and two ranks that are killed, rank 0 among them. All of
it is read from the ranks' logs, metrics and traces, which stay in a folder. It
takes about 40 seconds.

Examples:
  tracedstore demo
  tracedstore demo --top
  tracedstore demo --store file --ranks 4 --output here/
  tracedstore demo --serve
  tracedstore demo --json | jq .missing

With --top it runs on the screen of `tracedstore top`, until q.

Exit codes: 0 success (with --serve, also after Ctrl-C; with --top, after q),
1 failure, 64 invalid command line, 130 Ctrl-C before the end
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tracedstore._version import __version__

_MIN_RANKS, _MAX_RANKS = 4, 64
# On two cores 24 took 49 s; 32 took 82 s, and survivors did not agree in time.
_MAX_RANKS_ON_ETCD = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.set_defaults(refuse=parser.error)
    parser.add_argument(
        "--store",
        choices=["tcp", "file", "etcd", "etcd-v2"],
        default="tcp",
        help="the store of the ranks: TCPStore, FileStore, EtcdV3Store, or torch's"
        " EtcdStore (tcp)",
    )
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=8,
        metavar="N",
        help=f"the number of ranks, {_MIN_RANKS} to {_MAX_RANKS}, with etcd-v2 to"
        f" {_MAX_RANKS_ON_ETCD} (8)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="selects the late, the busy and, with rank 0, the killed rank (0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for logs, metrics and traces (a new temporary folder)",
    )
    parser.add_argument(
        "--top",
        action="store_true",
        help="show the job on the screen of tracedstore top, until q; needs"
        " tracedstore[tools]",
    )
    parser.add_argument(
        "--json", action="store_true", help="write only the summary, as JSON"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="keep the survivors' endpoints up for a Prometheus, until Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    if arguments.store == "etcd-v2" and arguments.ranks > _MAX_RANKS_ON_ETCD:
        arguments.refuse(
            f"--ranks {arguments.ranks} is too many for --store etcd-v2, at most"
            f" {_MAX_RANKS_ON_ETCD}: they would not finish in a minute; use fewer, or"
            " --store tcp or file"
        )
    if arguments.top and (arguments.json or arguments.serve):
        arguments.refuse("--top goes with neither --json nor --serve")
    # The ranks must end when a terminal is closed or a supervisor ends this process.
    # Under nohup SIGHUP stays ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)
    # torch looks up the host name of every connection. No name server knows those of
    # loopback, and one that does not answer takes seconds each time.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    if not arguments.json:
        sys.stdout.write(f"tracedstore {__version__} demo: loading torch\n")
        sys.stdout.flush()
    if arguments.top:
        return _run_on_top(arguments)
    # Only now, because torch takes seconds.
    from tracedstore.tools.demo.scenarios import run_demo  # noqa: PLC0415

    return run_demo(arguments)


def _run_on_top(arguments: argparse.Namespace) -> int:
    from tracedstore.tools.cli.top import check_terminal  # noqa: PLC0415

    check_terminal("tracedstore demo prints lines")
    from tracedstore.tools.demo.on_top import run_on_top  # noqa: PLC0415

    def run(announce: Callable[..., None]) -> int:
        # In another process: that of the screen does not import torch.
        from tracedstore.tools.demo.scenarios import run_demo  # noqa: PLC0415

        return run_demo(arguments, announce)

    return run_on_top(run)


def _ranks(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not _MIN_RANKS <= number <= _MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks from {_MIN_RANKS} to {_MAX_RANKS}: two"
            " are killed, and two must agree"
        )
    return number


def _exit(number: int, _frame: FrameType | None) -> None:
    # The exit code of a shell for a process that a signal ended.
    sys.exit(128 + number)
