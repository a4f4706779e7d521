"""JSON that any client of a store, or any server, can write instead of ours."""

import json
from typing import Any

from hypothesis import strategies as st

from tracedstore.coordination.arrivals import MissingReport, last_arrival

ENTRY = {
    "rank": 0,
    "host": "node0",
    "pid": 7,
    "local_rank": 0,
    "world_size": 2,
    "run_id": "job-7",
    "metrics": "http://node0:27400/metrics",
    "started": 1.0,
}
REPORT = json.loads(MissingReport.unknown(4).to_bytes())
LAST_ARRIVAL = json.loads(last_arrival(3))
PROCESS_STATUS = {
    **dict.fromkeys(("host", "operation", "detail", "source"), "x"),
    "rank": 0,
    "pid": 8,
    "state": "running",
    "registered": True,
    "idle_seconds": 1.0,
    "frames": [{"file": "f.py", "line": 1, "function": "f"}],
    "wrote": [],
    "stacks": {},
    "recording": True,
    "in_flight": [
        {
            **dict.fromkeys(
                ("operation", "store", "server", "key", "key_family", "thread"), "x"
            ),
            "key_count": 1,
            "started": 1.0,
            "waited_seconds": 2.0,
        }
    ],
    "more_in_flight": 0,
    "barriers": [
        {
            "barrier": "b",
            "arrived_count": 1,
            "missing": {"node0": "0-3"},
            "possibly_missing_count": 0,
        }
    ],
}
HUGE = 10**15
DEEP = b"[" * 100_000
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(["0-999999999999", "nan", "9" * 5000, "http://h:99999", HUGE]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)


def values(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return arbitrary bytes, arbitrary JSON, and valid JSON with changed fields."""
    changed = st.dictionaries(st.sampled_from(sorted(valid)), JSON).map(valid.__or__)
    return (
        st.binary(max_size=200)
        | (JSON | changed).map(lambda value: json.dumps(value).encode())
        | st.sampled_from([DEEP, b'{"a":' * 100_000, b"1" * 100_000])
    )
