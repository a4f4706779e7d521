"""Counts what a job costs its store and its log: requests and lines, by phase.

A job of real ranks (`job_ranks`) and one of simulated ranks (`simulated_job`) start,
are idle, pass barriers, wait in one without all ranks, and hang. A relay counts the
requests that reach a real TCPStore. How many such a server answers is measured too
(`store_capacity`).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import job_ranks
import simulated_job
import store_capacity
from harness import Bar, discarded_standard_error, finish, parser, tcp_server
from store_requests import counting_relay

RANKS, SIMULATED_RANKS = 64, 16_384
_SECONDS = {
    "capacity": 3.0,
    "idle": 30.0,
    "barrier-timeout": 40.0,
    # Reports are due after 30, 60, 120 and 240 seconds.
    "hang": 250.0,
}
MAX_LINES_A_MINUTE = 8
MAX_POLLS_A_SECOND = 520


def _real(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tcp_server() as port,
        counting_relay(port) as relay,
        tempfile.TemporaryDirectory() as folder,
    ):
        return job_ranks.measure(
            relay,
            Path(folder),
            options.ranks,
            idle=options.idle,
            barrier_timeout=options.barrier_timeout,
            hang=options.hang,
        )


def _simulated(ranks: int, hang_seconds: float) -> dict[str, Any]:
    with (
        tcp_server() as port,
        counting_relay(port) as relay,
        discarded_standard_error(),
    ):
        return simulated_job.measure(relay, ranks, hang_seconds)


def _print(title: str, ranks: int, phases: dict[str, Any]) -> None:
    print(f"{ranks:,} {title} ranks")
    for phase, row in phases.items():
        requests, log = row["requests"], row["log"]
        print(
            f"  {phase:<16}{row['seconds']:>7.1f} s{requests['requests']:>10,} requests"
            f"{requests['most_a_second']:>8,} in a second{log['lines']:>8,} lines"
            f"{log['bytes'] / 1e3:>10,.1f} kB  {log['events']}",
            flush=True,
        )


def main() -> int:
    """Run the benchmark, print the results, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=RANKS)
    arguments.add_argument("--simulated-ranks", type=int, default=SIMULATED_RANKS)
    for name, seconds in _SECONDS.items():
        arguments.add_argument(f"--{name}", type=float, default=seconds, help="seconds")
    options = arguments.parse_args()
    # torch resolves the address of every connection to a name, and the duration of that
    # is not what this measures. The child processes inherit this: torch warns if it
    # finds no name.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Processes are forked from this one, so that which starts threads is last.
    with discarded_standard_error():
        capacity = store_capacity.measure(options.capacity)
    for one in capacity:
        print(
            f"{one.backend:<6}{one.clients:>3} clients {one.call:<12}"
            f"{one.requests_a_second:>9,.0f} requests a second",
            flush=True,
        )
    real = _real(options)
    _print("real", options.ranks, real)
    simulated = _simulated(options.simulated_ranks, options.hang)
    _print("simulated", options.simulated_ranks, simulated)
    idle = simulated["idle"]
    bars = [
        Bar.at_most(
            "log lines a minute of a hung job",
            max(max(job["hang"]["log"]["lines_a_minute"]) for job in (real, simulated)),
            MAX_LINES_A_MINUTE,
        ),
        Bar.at_most(
            "requests a second for questions",
            idle["requests"]["requests"] / idle["seconds"],
            MAX_POLLS_A_SECOND,
        ),
    ]
    results = {
        "ranks": options.ranks,
        "simulated_ranks": options.simulated_ranks,
        "real": real,
        "simulated": simulated,
        "capacity": [
            {
                "backend": one.backend,
                "clients": one.clients,
                "call": one.call,
                "requests_a_second": one.requests_a_second,
            }
            for one in capacity
        ],
    }
    return finish(bars, results, options.output)


if __name__ == "__main__":
    sys.exit(main())
