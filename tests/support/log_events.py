"""What ranks say in tests of the report: events, and spans that say the same."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tracedstore import names
from tracedstore.report.reader import ReadStats, read_events

Event = dict[str, Any]


def at(second: float) -> str:
    """A time on the day of the job."""
    whole, part = divmod(second, 1)
    minutes, seconds = divmod(int(whole), 60)
    return f"2026-11-16T09:{minutes:02}:{seconds:02}.{round(part * 1e6):06}Z"


def event(name: str, second: float, rank: int | None = 0, **fields: Any) -> Event:
    """An event as a rank writes it; four ranks are on two hosts."""
    who = {} if rank is None else {"rank": rank, "host": f"node{rank // 2}"}
    return {"timestamp": at(second), "event": name, "pid": 7, **who, **fields}


def completed(
    rank: int, end: float, waited: float, barrier: str = "b/0", last: int | None = 3
) -> Event:
    """A rank got through."""
    return event(
        names.BARRIER_COMPLETED,
        end,
        rank,
        barrier=barrier,
        world_size=4,
        waited_seconds=waited,
        last_rank=last,
        arrival_order=1,
    )


def missed(
    rank: int,
    end: float,
    *missing: int,
    name: str = names.BARRIER_TIMEOUT,
    barrier: str = "b/1",
    waited: float = 5.0,
) -> Event:
    """A rank that others were missed by."""
    return event(
        name,
        end,
        rank,
        barrier=barrier,
        world_size=4,
        waited_seconds=waited,
        timeout_seconds=5.0,
        arrived_count=4 - len(missing),
        missing_ranks=list(missing),
        missing_names=[f"node{each // 2}" for each in missing],
        missing=f"missing {len(missing)} of 4: {missing}",
        possibly_missing_ranks=[],
        unidentified_count=0,
    )


def span_of(told: Event, late: float = 0.0003) -> Event:
    """The span of the same visit, which ended a little before its line was written."""
    end = datetime.fromisoformat(told["timestamp"]) - timedelta(seconds=late)
    start = end - timedelta(seconds=told["waited_seconds"])
    result = "completed" if told["event"] == names.BARRIER_COMPLETED else "timeout"
    attributes = {
        names.HOST_NAME: told["host"],
        names.BARRIER_PREFIX: told["barrier"],
        names.WORLD_SIZE: told["world_size"],
        names.RANK: told["rank"],
        names.BARRIER_RESULT: result,
    }
    if result == "completed":
        attributes[names.BARRIER_LAST_RANK] = told["last_rank"]
    else:
        attributes[names.BARRIER_MISSING_RANKS] = told["missing_ranks"]
        attributes[names.BARRIER_MISSING_TEXT] = told["missing"]
    return {
        "name": "barrier b/*",
        "start_time": start.isoformat().replace("+00:00", "Z"),
        "end_time": end.isoformat().replace("+00:00", "Z"),
        "status": {"status_code": "UNSET"},
        "attributes": attributes,
    }


def lines(told: Sequence[Event]) -> str:
    """Events as lines."""
    return "".join(json.dumps(each) + "\n" for each in told)


def gathered(file: Path) -> tuple[list[Event], ReadStats]:
    """Events that are read from a file, all of them taken as fit."""
    found: list[Event] = []
    stats = ReadStats()

    def take(event: Event) -> bool:
        found.append(event)
        return True

    read_events([str(file)], take, stats)
    return found, stats


LINE = json.dumps(completed(0, 1.0, 0.5)).encode()
