"""Measures the cost of a barrier: ours and torch's, alternately in one run.

See `barrier_completed` for completed barriers and `barrier_naming` for barriers that
time out. Nothing is configured, as in a job that only calls the barrier; "configured"
is with structlog and a TracerProvider. Exits with 1 if a bar is missed.
"""

import os
import sys
from dataclasses import asdict

import barrier_completed
import barrier_naming
from barrier_completed import Completed
from barrier_naming import Naming
from harness import Bar, discarded_standard_error, finish, parser, tcp_server

MAX_ADDED_ROUND_TRIPS = 1
MAX_RATIO, MAX_CONFIGURED_RATIO = 1.15, 1.5
MAX_NAMING_RATIO = 0.01


def _print(completed: list[Completed], naming: list[Naming]) -> None:
    print(
        f"{'completed, ranks':<20}{'torch':>10}{'ours':>10}{'':>7}{'configured':>12}"
        f"{'':>7}{'floors':>13}"
        "   round trips (before release): torch, ours, configured, ours first"
    )
    for row in completed:
        print(
            f"{row.ranks:<20}{row.torch_ms:>8.2f}ms{row.ours_ms:>8.2f}ms"
            f"{row.ratio:>6.2f}x{row.configured_ms:>10.2f}ms"
            f"{row.configured_ratio:>6.2f}x{row.floor:>6.2f}x{row.configured_floor:>5.2f}x"
            f"   {row.torch_round_trips} ({row.torch_before_release})"
            f", {row.ours_round_trips} ({row.ours_before_release})"
            f", {row.configured_round_trips} ({row.configured_before_release})"
            f", {row.ours_first_round_trips}"
        )
    print(f"{'3 missing, ranks':<20}{'torch':>10}{'ours':>10}{'':>9}   wrong names")
    for result in naming:
        print(
            f"{result.ranks:<20}{result.torch_ms:>8.1f}ms{result.ours_ms:>8.1f}ms"
            f"{result.ratio:>8.4f}x"
            f"   torch {result.torch_wrong}, ours {result.ours_wrong}"
        )


def _bars(completed: list[Completed], naming: list[Naming]) -> list[Bar]:
    added = max(row.ours_round_trips - row.torch_round_trips for row in completed)
    added_configured = max(
        row.configured_round_trips - row.torch_round_trips for row in completed
    )
    largest = naming[-1]
    return [
        Bar.at_most(
            "round trips of a completed barrier more than torch's, of any rank",
            added,
            MAX_ADDED_ROUND_TRIPS,
        ),
        Bar.at_most(
            "the same, with structlog and tracing configured",
            added_configured,
            MAX_ADDED_ROUND_TRIPS,
        ),
        Bar.at_most(
            "a completed barrier, ranks as processes, ours / torch's, worst",
            max(row.ratio for row in completed),
            MAX_RATIO,
        ),
        Bar.at_most(
            "that with structlog and tracing configured",
            max(row.configured_ratio for row in completed),
            MAX_CONFIGURED_RATIO,
        ),
        Bar.at_most(
            f"naming 3 missing of {largest.ranks}, ours / torch's",
            largest.ratio,
            MAX_NAMING_RATIO,
        ),
        Bar.at_most(
            "times that ours named others than the 3",
            sum(row.ours_wrong for row in naming),
            0,
        ),
    ]


def main() -> int:
    """Run the benchmark, print the tables, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=30)
    arguments.add_argument("--sets", type=int, default=11)
    arguments.add_argument("--naming-repeats", type=int, default=5)
    arguments.add_argument("--max-ranks", type=int, default=64)
    options = arguments.parse_args()

    # torch resolves the address of every connection to a name, and the duration of that
    # is not what this measures.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    # The child processes inherit this: torch warns if it finds no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tcp_server() as port, discarded_standard_error():
        # First: processes are forked, and this one must have no threads yet.
        worlds = tuple(n for n in barrier_completed.WORLDS if n <= options.max_ranks)
        completed = barrier_completed.measure(
            port, worlds, options.repeats, options.sets
        )
        naming = [
            barrier_naming.measure(port, world, options.naming_repeats)
            for world in barrier_naming.WORLDS
        ]
    _print(completed, naming)
    results = {
        "completed": [asdict(row) for row in completed],
        "naming": [asdict(row) for row in naming],
    }
    return finish(_bars(completed, naming), results, options.output)


if __name__ == "__main__":
    sys.exit(main())
