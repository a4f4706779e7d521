"""Parsers of values that any client of a store, or any server, can write."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hostile_json import (
    ENTRY,
    HUGE,
    LAST_ARRIVAL,
    PROCESS_STATUS,
    REPORT,
    values,
)
from tracedstore.common import validation
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    MissingReport,
    encode_arrival,
    last_rank,
)
from tracedstore.coordination.rank_registry import REGISTRY, parse_entry
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.job_reading import JobReading
from tracedstore.tools.attach.job_state import read_job_state
from tracedstore.tools.attach.job_text import status_lines
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.store_snapshot import StoreSnapshot


class TestRegistryEntry:
    """parse_entry."""

    def test_valid(self) -> None:
        """A valid entry is parsed, with all fields or with the required ones."""
        info = parse_entry(json.dumps(ENTRY | {"unknown": "field"}).encode())
        assert info is not None
        assert (info.rank, info.world_size, info.metrics) == (0, 2, ENTRY["metrics"])
        optional = dict.fromkeys(("local_rank", "run_id", "metrics"))
        assert parse_entry(json.dumps(ENTRY | optional).encode()) is not None

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("rank", value) for value in (-1, HUGE, True, 0.0, "0", None, 2)),
            *(("world_size", value) for value in (0, -1, HUGE, 2.0, None, 10**6 + 1)),
            *(("host", value) for value in ("", "x" * 1025, 3, None, ["a"])),
            *(("pid", value) for value in (-1, "7", None, HUGE)),
            *(("agent", value) for value in (-1, "7", True, HUGE)),
            *(("local_rank", value) for value in (-1, "0", HUGE)),
            *(("run_id", value) for value in (7, "x" * 1025)),
            *(("started", value) for value in (-1, "1", None, 1e300, True)),
            *(("started", float(value)) for value in ("nan", "inf", "-inf")),
            *(
                ("metrics", value)
                for value in (
                    *("node0", "http://h:99999", "http://h:0/", "http://", "//h:1"),
                    *("http://h:x/", "http://[::1/", "ftp://h:1/", "file:///etc", 3),
                    *("http://a@h:1/", "http://h :1/", "http://h:1/\r\nX: y"),
                    *("http://h:1/\u202e", "http://h:1/" + "x" * 1024),
                )
            ),
        ],
    )
    def test_invalid_fields(self, field: str, value: Any) -> None:
        """An entry with one wrong field is None."""
        assert parse_entry(json.dumps(ENTRY | {field: value}).encode()) is None

    @pytest.mark.parametrize("field", ["rank", "host", "pid", "world_size", "started"])
    def test_missing_fields(self, field: str) -> None:
        """An entry without a required field is None."""
        entry = {name: value for name, value in ENTRY.items() if name != field}
        assert parse_entry(json.dumps(entry).encode()) is None

    @given(values(ENTRY))
    def test_any_value(self, value: bytes) -> None:
        """No value raises, and what is parsed is bounded."""
        info = parse_entry(value)
        if info is not None:
            assert 0 <= info.rank < info.world_size <= 10**6
            assert 0 <= info.started < validation.MAX_TIME
            assert len(info.host) <= 1024


@given(values(REPORT))
def test_missing_report(value: bytes) -> None:
    """MissingReport.from_bytes returns None or a bounded report."""
    report = MissingReport.from_bytes(value, 4)
    if report is not None:
        assert report.arrived_count <= 2 * 10**6
        assert all(rank < 10**6 for rank in report.unseen_ranks)
        assert len(report.describe()) < 10_000


@given(values(LAST_ARRIVAL))
def test_last_arrival(value: bytes) -> None:
    """last_rank returns None or a bounded rank."""
    rank = last_rank(value)
    assert rank is None or 0 <= rank < 2**32


@given(st.binary(max_size=400))
def test_ledger(value: bytes) -> None:
    """Any bytes are a ledger, with one rank per entry at most."""
    ledger = Ledger(value)
    assert len(ledger.ranks()) <= len(value) // 12
    assert len(ledger.times()) <= len(value) // 12


@given(values(PROCESS_STATUS))
def test_process_status(value: bytes) -> None:
    """ProcessFacts.from_page raises nothing but ValueError."""
    try:
        status = ProcessFacts.from_page(value)
    except ValueError:
        return
    assert all(abs(call.waited_seconds) < float("inf") for call in status.in_flight)


def test_many_ranges_in_process_status() -> None:
    """A status with more missing ranks than a job has is not expanded."""
    barrier = {"barrier": "b", "arrived_count": 1, "possibly_missing_count": 0}
    missing = {"missing": {f"node{n}": "0-131071" for n in range(2000)}}
    barriers = [barrier | missing] * 20
    written = json.dumps(PROCESS_STATUS | {"barriers": barriers}).encode()
    started = time.thread_time()

    with pytest.raises(ValueError, match="more than 0 ranks"):
        ProcessFacts.from_page(written)

    # Expanding all ranges takes an hour.
    assert time.thread_time() - started < 20


_AGENT = PROCESS_STATUS | {"pid": 7, "workers": {"0": PROCESS_STATUS}}


@given(values(_AGENT))
def test_status_of_worker(value: bytes) -> None:
    """ProcessFacts.of_worker raises nothing but ValueError."""
    try:
        ProcessFacts.of_worker(value, 7, 0)
    except ValueError:
        return


def test_valid_status_of_worker() -> None:
    """The status of a worker is that of its rank, on the page of its own agent."""
    written = json.dumps(_AGENT | {"workers": {"0": PROCESS_STATUS, "1": None}})

    worker = ProcessFacts.of_worker(written.encode(), 7, 0)

    assert worker is not None
    assert worker.pid == PROCESS_STATUS["pid"]
    assert ProcessFacts.of_worker(written.encode(), 7, 1) is None
    with pytest.raises(ValueError, match="another process responds"):
        ProcessFacts.of_worker(written.encode(), 8, 0)


def test_valid_process_status() -> None:
    """The status that the test above changes is valid."""
    written = json.dumps(PROCESS_STATUS).encode()
    assert len(ProcessFacts.from_page(written).barriers) == 1


BARRIER_VALUES = values(REPORT) | st.sampled_from(
    [b"1", b"2", b"9" * 16, b"9" * 400, b"9" * 5000, b"-1", b"abc", b"\xb2"]
)


class TestStatus:
    """A status is made from a store with any values."""

    @given(st.data())
    def test_any_values(self, data: st.DataObject) -> None:
        """Neither the text nor the JSON raises."""
        keys = BarrierKeys("b")
        names = (
            *(keys.num_members, keys.last_member, keys.ledger, keys.missing_report),
            *(keys.confirmations, keys.repeat_count),
            "torch.rendezvous.job",
            *("torch.rendezvous.job.1/MASTER_ADDR", f"{REGISTRY}/1"),
            *("torch.rendezvous.job.1/MASTER_PORT", f"{REGISTRY}/9"),
        )
        contents = data.draw(
            st.dictionaries(st.sampled_from(names), BARRIER_VALUES, min_size=3)
        )
        contents[f"{REGISTRY}/0"] = json.dumps(ENTRY).encode()
        snapshot = StoreSnapshot(contents, contents)

        status = JobReading(
            store="s", now=9.0, job=read_job_state(snapshot), replies={}
        )

        assert status.job.groups
        assert len(status_lines(view_of(status))) < 40
        json.dumps(status.to_json(), allow_nan=False)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("num_members", value) for value in (b"9" * 16, b"9" * 400, b"abc")),
            ("num_members", b"9" * 5_000_000),
            ("ARRIVALS", encode_arrival(0, float("nan"))),
            ("ARRIVALS", encode_arrival(0, float("inf"))),
            ("ARRIVALS", encode_arrival(2**31, 1.0)),
            ("ARRIVALS", encode_arrival(0, 1.0) * 1_000_000),
            ("REPEATS", b"many"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_unreadable_barrier(self, name: str, value: bytes) -> None:
        """It is listed as such, and the other barriers are read."""
        contents = {
            "bad/num_members": b"1",
            f"bad/{name}": value,
            "good/num_members": b"1",
            f"{REGISTRY}/0": json.dumps(ENTRY).encode(),
        }

        job = read_job_state(StoreSnapshot(contents, contents))
        status = JobReading(store="s", now=9.0, job=job, replies={})
        text = [str(line.text) for line in status_lines(view_of(status))]

        assert job.unreadable_barriers == ("bad",)
        assert [one.prefix for one in job.in_progress] == ["good"]
        assert "  bad: cannot be read" in text
        assert status.to_json()["barriers_unreadable"] == ["bad"]

    def test_deleted_count(self) -> None:
        """A barrier whose count was deleted after it was listed cannot be read."""
        snapshot = StoreSnapshot(["b/num_members"], {})
        assert read_job_state(snapshot).unreadable_barriers == ("b",)

    @pytest.mark.parametrize(
        "counts",
        [{"arrived_count": HUGE}, {"unseen_ranks": "0-999999999999"}],
        ids=["arrivals", "ranks"],
    )
    def test_huge_report(self, counts: dict[str, Any]) -> None:
        """A report with absurd counts is ignored; the group has the world size."""
        contents = {
            "b/num_members": b"1",
            "b/MISSING": json.dumps(REPORT | {"arrived_count": 1} | counts).encode(),
            f"{REGISTRY}/0": json.dumps(ENTRY).encode(),
        }
        (barrier,) = read_job_state(StoreSnapshot(contents, contents)).in_progress
        assert barrier.world_size == 2

    @pytest.mark.parametrize(
        ("host", "port", "url"),
        [
            (b"node1", b"29500", "tcp://node1:29500"),
            (b"fe80::1", b"29500", "tcp://[fe80::1]:29500"),
            (b"node1", b"99999", None),
            (b"node1", b"0", None),
            (b"node1", b"9" * 5000, None),
            (b"node 1", b"1", None),
            (b"a@b", b"1", None),
            (b"\xff", b"1", None),
            (b"", b"1", None),
            (b"x" * 300, b"1", None),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_worker_store(self, host: bytes, port: bytes, url: str | None) -> None:
        """An address that is not a host and a port is None."""
        under = "torch.rendezvous.job.3/MASTER_"
        contents = {f"{under}ADDR": host, f"{under}PORT": port}
        job = read_job_state(StoreSnapshot(contents, contents))
        assert job.worker_stores == {"job": url}
