"""A rank whose store has a hostile record: a question about a million ranks."""

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# More than two intervals in which questions are read.
_SECONDS = 3.0
_RANKS = 1_000_000


def main() -> None:
    """Make calls while the question can be read; fail if their count is wrong."""
    base = sys.argv[1]
    bare = dist.TCPStore(
        *("127.0.0.1", 0, 1),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    bare.set("tracedstore/QUESTIONS", "1")
    question = {"number": 1, "kind": "status", "ranks": f"0-{_RANKS - 1}"}
    question |= {"families": [], "asked_by": "nobody", "time": time.time()}
    bare.set("tracedstore/QUESTION/1", json.dumps(question))
    if base == "bare":
        _call(bare)
        return
    from prometheus_client import REGISTRY  # noqa: PLC0415

    import tracedstore  # noqa: PLC0415 - a bare process does not import it

    tracedstore.configure(core=base, log_format="off")
    store = tracedstore.wrap(bare)
    tracedstore.barrier(store, 1, "barrier", rank=0)
    calls = _call(store)
    counted = sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "tracedstore_operation_duration_seconds_count"
        and sample.labels["operation"] == "check"
    )
    if counted != calls:
        sys.exit(f"{calls} calls, {counted:g} counted")


def _call(store: Any) -> int:
    calls = 0
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        store.check(["key"])
        calls += 1
    return calls


if __name__ == "__main__":
    main()
