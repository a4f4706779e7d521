"""Show what every rank of a job executes: the stacks of its threads.

Asks the ranks through the job's store and prints their stacks, innermost frame
first, grouped by the line of the program that they are in: the odd ones first.
It needs no open port. It also shows which collective of which group a rank is
in. Agents and other ranks answer for processes that do not answer themselves.
The question is written to the store, and deleted with its answers.

Examples:
  tracedstore stacks
  tracedstore stacks --store tcp://node1:29400 --threads --json

Exit codes: 0 all ranks answered; 1 the store cannot be reached or read, or no
rank has registered; 2 ranks did not answer; 64 invalid command line; 130 Ctrl-C
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tracedstore.tools.attach.address import interruptible_import
from tracedstore.tools.cli.options import add_store_argument, seconds, store_address

if TYPE_CHECKING:
    from tracedstore.tools.attach.job_reading import Answers

_SILENT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_store_argument(parser)
    parser.add_argument("--run-id", metavar="ID", help="only ranks of this job")
    parser.add_argument(
        "--timeout",
        type=seconds(0.1),
        default=5.0,
        metavar="SECONDS",
        help="seconds to wait for answers; large jobs look for questions every 5 s (5)",
    )
    parser.add_argument(
        "--threads",
        action="store_true",
        help="all threads, not only the main ones, and grouped by all of them",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the stacks."""
    address = store_address(arguments)
    address.probe()
    # Only for a store that answers, because torch takes seconds.
    with interruptible_import():
        from tracedstore.tools.attach.job_reading import ask_job  # noqa: PLC0415

    groups = ask_job(address, "stacks", arguments.run_id, arguments.timeout)
    if arguments.json:
        from tracedstore.tools.attach.job_text import to_json  # noqa: PLC0415

        sys.stdout.write(json.dumps({"groups": list(map(to_json, groups))}) + "\n")
    else:
        _print(groups, all_threads=arguments.threads)
    return _SILENT if any(group.silent_ranks for group in groups) else 0


def _print(groups: "list[Answers]", *, all_threads: bool) -> None:
    # Only for text, because rich takes 50 ms.
    from tracedstore.tools.attach.job_text import stack_lines  # noqa: PLC0415
    from tracedstore.tools.terminal import Screen  # noqa: PLC0415

    with Screen(sys.stdout) as screen:
        for group in groups:
            screen.print(*stack_lines(group, all_threads=all_threads))
