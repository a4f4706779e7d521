"""Builds log events and spans for tests of the report."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tracedstore import names
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.tools.report.log_reader import ReadStats, read_events

Event = dict[str, Any]


def timestamp(second: float) -> str:
    """Return the time of an event, in seconds after 9:00."""
    whole, part = divmod(second, 1)
    minutes, seconds = divmod(int(whole), 60)
    return f"2026-11-16T09:{minutes:02}:{seconds:02}.{round(part * 1e6):06}Z"


def event(name: str, second: float, rank: int | None = 0, **fields: Any) -> Event:
    """Return an event as a rank logs it; each host has two ranks."""
    identity = {} if rank is None else {"rank": rank, "host": f"node{rank // 2}"}
    return {
        "timestamp": timestamp(second),
        "event": name,
        "pid": 7,
        **identity,
        **fields,
    }


def completed_event(
    rank: int, end: float, waited: float, barrier: str = "b/0", last: int | None = 3
) -> Event:
    """Return the event of a barrier call that completed."""
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


def missing_event(
    rank: int,
    end: float,
    *missing: int,
    name: str = names.BARRIER_TIMEOUT,
    barrier: str = "b/1",
    waited: float = 5.0,
) -> Event:
    """Return the event of a barrier call that reports missing ranks."""
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


def stall_event(
    rank: int,
    second: float,
    waited: float,
    name: str = names.JOB_STALLED,
    **fields: Any,
) -> Event:
    """Return the report of a rank that the job waits for rank 2."""
    verdict = Verdict(
        phase="new_group 1",
        cause="busy",
        awaited=(
            AwaitedRank(rank=2, host="node1", pid=812, doing="in data.py:88 load"),
        ),
        awaited_ranks=(2,),
        waiting_ranks=(0, 1, 3),
        key="default_pg/0//1//cpu//0/2",
        waited_seconds=waited,
        evidence=("rank 2 answered itself",),
        remedy="look at what each awaited rank executes",
    )
    return event(name, second, rank, **verdict.event_fields() | fields)


def span_from_event(event: Event, log_delay: float = 0.0003) -> Event:
    """Return the span of the same call, which ended before its event was logged."""
    end = datetime.fromisoformat(event["timestamp"]) - timedelta(seconds=log_delay)
    start = end - timedelta(seconds=event["waited_seconds"])
    result = "completed" if event["event"] == names.BARRIER_COMPLETED else "timeout"
    attributes = {
        names.HOST_NAME: event["host"],
        names.BARRIER_PREFIX: event["barrier"],
        names.WORLD_SIZE: event["world_size"],
        names.RANK: event["rank"],
        names.BARRIER_RESULT: result,
    }
    if result == "completed":
        attributes[names.BARRIER_LAST_RANK] = event["last_rank"]
    else:
        attributes[names.BARRIER_MISSING_RANKS] = event["missing_ranks"]
        attributes[names.BARRIER_MISSING_TEXT] = event["missing"]
    return {
        "name": "barrier b/*",
        "start_time": start.isoformat().replace("+00:00", "Z"),
        "end_time": end.isoformat().replace("+00:00", "Z"),
        "status": {"status_code": "UNSET"},
        "attributes": attributes,
    }


def json_lines(objects: Sequence[Event]) -> str:
    """Return one line of JSON for each event or span."""
    return "".join(json.dumps(each) + "\n" for each in objects)


def read_file(file: Path) -> tuple[list[Event], ReadStats]:
    """Read the events of a file. All of them count as valid."""
    events: list[Event] = []
    stats = ReadStats()

    def add(event: Event) -> bool:
        events.append(event)
        return True

    read_events([str(file)], add, stats)
    return events, stats


EVENT_LINE = json.dumps(completed_event(0, 1.0, 0.5)).encode()
