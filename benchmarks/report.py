"""Measure time and memory of `tracedstore report` for the logs of a large job.

The default is 1,000 ranks with 1,000 barriers, in one file per rank. One rank is late
at all barriers, and one is missing at the last barrier. The limits are 30 s and 1 GB.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STARTED = datetime(2026, 11, 16, 9, tzinfo=UTC).timestamp()
# Seconds between two barriers, and of the timeout at the last one.
_INTERVAL = 10.0
_TIMEOUT = 60.0
_RANKS_PER_HOST = 8

MAX_SECONDS = 30.0
MAX_BYTES = 1 << 30


def iso(time: float) -> str:
    """Format a time as structlog does."""
    return datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")


def waits(ranks: int, barrier: int, late_rank: int) -> list[float]:
    """Return the wait of each rank at a barrier; the late rank is 2 s behind."""
    random_source = random.Random(barrier)
    arrivals = [random_source.uniform(0.0, 0.5) for _ in range(ranks)]
    arrivals[late_rank] += 2.0
    return [round(max(arrivals) - arrival, 6) for arrival in arrivals]


def events_of(
    rank: int,
    ranks: int,
    completed: list[list[float]],
    late_rank: int,
    missing_rank: int,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: completed barriers, then one that times out.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        completed: The waits of all ranks at each completed barrier.
        late_rank: The rank that arrives last at the completed barriers.
        missing_rank: The rank that is missing at the last barrier.
    """
    identity = {
        "run_id": "job-7",
        "rank": rank,
        "local_rank": rank % _RANKS_PER_HOST,
        "world_size": ranks,
        "host": f"node{rank // _RANKS_PER_HOST}",
        "pid": 1000 + rank,
    }
    for number, waited in enumerate(completed):
        yield {
            "timestamp": iso(STARTED + _INTERVAL * number),
            "level": "debug",
            "event": "barrier.completed",
            **identity,
            "barrier": f"checkpoint/{number}",
            "barrier_family": "checkpoint/*",
            "waited_seconds": waited[rank],
            "last_rank": late_rank,
            # The report does not read this field.
            "arrival_order": 1,
            "trace_id": f"{number + 1:032x}",
            "span_id": f"{rank + 1:016x}",
        }
    if rank != missing_rank:
        missing_host = f"node{missing_rank // _RANKS_PER_HOST}"
        yield {
            "timestamp": iso(STARTED + _INTERVAL * len(completed) + _TIMEOUT),
            "level": "error",
            "event": "barrier.timeout",
            **identity,
            "barrier": f"checkpoint/{len(completed)}",
            "barrier_family": "checkpoint/*",
            "waited_seconds": _TIMEOUT,
            "timeout_seconds": _TIMEOUT,
            "arrived_count": ranks - 1,
            "missing_ranks": [missing_rank],
            "missing_names": [missing_host],
            "missing": f"missing 1 of {ranks}: {missing_host} (rank {missing_rank})",
            "possibly_missing_ranks": [],
            "unidentified_count": 0,
        }


def write_logs(
    folder: Path, ranks: int, barriers: int, late_rank: int, missing_rank: int
) -> int:
    """Write one file per rank, with an unrelated line; return the number of bytes."""
    completed = [waits(ranks, number, late_rank) for number in range(barriers - 1)]
    size = 0
    for rank in range(ranks):
        lines = [f"step 1 of rank {rank}: loss 0.5\n"]
        lines += (
            json.dumps(event) + "\n"
            for event in events_of(rank, ranks, completed, late_rank, missing_rank)
        )
        size += (folder / f"rank{rank}.log").write_text("".join(lines), "utf-8")
    return size


def main() -> int:
    """Write the logs, create the report, and compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--barriers", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--page", type=Path, help="file to keep the page in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_logs(
            folder,
            options.ranks,
            options.barriers,
            late_rank=options.ranks // 3,
            missing_rank=options.ranks // 2,
        )
        page = options.page or folder / "report.html"
        command = [
            sys.executable,
            "-m",
            "tracedstore.tools.cli.main",
            "report",
            str(folder),
        ]
        started = time.perf_counter()
        subprocess.run([*command, "--output", str(page)], check=True)
        seconds = time.perf_counter() - started
        # At least the memory of this process when it started the other one.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        results = {
            "ranks": options.ranks,
            "barriers": options.barriers,
            "log_bytes": size,
            "page_bytes": page.stat().st_size,
            "seconds": round(seconds, 2),
            "peak_rss_bytes": peak,
        }
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return int(seconds > MAX_SECONDS or peak > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
