"""Measure `tracedstore report` on the logs of a large job.

By default 1,000 ranks that came to 1,000 barriers each, as one file a rank: one of
them is late, and at the last barrier one stays away. It is held to 30 s and 1 GB.
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
# Seconds between two barriers, and how long the last one is waited for.
_STEP = 10.0
_TIMEOUT = 60.0
_A_HOST_HAS = 8

MOST_SECONDS = 30.0
MOST_BYTES = 1 << 30


def iso(when: float) -> str:
    """Write a time as structlog does."""
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def waits(ranks: int, barrier: int, late: int) -> list[float]:
    """How long each rank waits at a barrier; the late one is 2 s behind the others."""
    chance = random.Random(barrier)
    came = [chance.uniform(0.0, 0.5) for _ in range(ranks)]
    came[late] += 2.0
    return [round(max(came) - each, 6) for each in came]


def log_of(
    rank: int, ranks: int, told: list[list[float]], late: int, missing: int
) -> Iterator[dict[str, Any]]:
    """Give a rank's events: it completes all barriers that are told, not the next."""
    who = {
        "run_id": "job-7",
        "rank": rank,
        "local_rank": rank % _A_HOST_HAS,
        "world_size": ranks,
        "host": f"node{rank // _A_HOST_HAS}",
        "pid": 1000 + rank,
    }
    for number, waited in enumerate(told):
        yield {
            "timestamp": iso(STARTED + _STEP * number),
            "level": "debug",
            "event": "barrier.completed",
            **who,
            "barrier": f"checkpoint/{number}",
            "barrier_family": "checkpoint/*",
            "waited_seconds": waited[rank],
            "last_rank": late,
            "place": sum(other >= waited[rank] for other in waited)
            if ranks < 99
            else 1,
            "trace_id": f"{number + 1:032x}",
            "span_id": f"{rank + 1:016x}",
        }
    if rank != missing:
        yield {
            "timestamp": iso(STARTED + _STEP * len(told) + _TIMEOUT),
            "level": "error",
            "event": "barrier.timeout",
            **who,
            "barrier": f"checkpoint/{len(told)}",
            "barrier_family": "checkpoint/*",
            "waited_seconds": _TIMEOUT,
            "timeout_seconds": _TIMEOUT,
            "arrived_count": ranks - 1,
            "missing_ranks": [missing],
            "missing_names": [f"node{missing // _A_HOST_HAS}"],
            "missing": f"missing 1 of {ranks}: node{missing // _A_HOST_HAS}"
            f" (rank {missing})",
            "possibly_missing_ranks": [],
            "unidentified_count": 0,
        }


def write_logs(folder: Path, ranks: int, barriers: int, late: int, missing: int) -> int:
    """Write one file a rank, with foreign lines in it; give how many bytes."""
    told = [waits(ranks, number, late) for number in range(barriers - 1)]
    size = 0
    for rank in range(ranks):
        lines = [f"step 1 of rank {rank}: loss 0.5\n"]
        lines += (
            json.dumps(event) + "\n"
            for event in log_of(rank, ranks, told, late, missing)
        )
        size += (folder / f"rank{rank}.log").write_text("".join(lines), "utf-8")
    return size


def main() -> int:
    """Write the logs, make the report, and hold it to the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--barriers", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    parser.add_argument("--page", type=Path, help="keep the page here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_logs(
            folder,
            options.ranks,
            options.barriers,
            late=options.ranks // 3,
            missing=options.ranks // 2,
        )
        page = options.page or folder / "report.html"
        command = [sys.executable, "-m", "tracedstore.cli.main", "report", str(folder)]
        started = time.perf_counter()
        subprocess.run([*command, "--output", str(page)], check=True)
        seconds = time.perf_counter() - started
        # At least what this process had when it started the other.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        found = {
            "ranks": options.ranks,
            "barriers": options.barriers,
            "log_bytes": size,
            "page_bytes": page.stat().st_size,
            "seconds": round(seconds, 2),
            "peak_rss_bytes": peak,
        }
    print(json.dumps(found, indent=2))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return int(seconds > MOST_SECONDS or peak > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
