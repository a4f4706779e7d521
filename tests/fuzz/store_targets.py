"""Targets for the contents of a store, which any of its clients can write."""

import json
import struct
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from urllib.parse import urlsplit

from hypothesis import strategies as st

from fuzz.target import RANGES, Inputs, Target, changed_bytes, changed_json
from support.hostile_json import ENTRY, JSON, LAST_ARRIVAL, REPORT
from support.hostile_pickles import OPCODES
from support.rendezvous import pickled_state
from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS, fold, unfold
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    MissingReport,
    encode_arrival,
    last_rank,
)
from tracedstore.coordination.rank_registry import REGISTRY, parse_entry
from tracedstore.coordination.store_access import etcd_contents
from tracedstore.diagnosis.ask.questions import Question
from tracedstore.diagnosis.judgement.collective_waits import judge_waits, resolve
from tracedstore.diagnosis.judgement.verdict import (
    AwaitedRank,
    Verdict,
    find_suspects,
)
from tracedstore.diagnosis.observe import collective_ledger, flight_recorder
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    Called,
    CollectivePosition,
)
from tracedstore.diagnosis.observe.incarnations import Replacement, Stamp
from tracedstore.diagnosis.observe.movement import StillRecord
from tracedstore.diagnosis.observe.torch_keys import ROWS, meaning
from tracedstore.export.discovery import listed
from tracedstore.local.facts import Frame, ProcessFacts, WrittenFamily
from tracedstore.naming import rosters
from tracedstore.rendezvous.state import Attendance, parse_state
from tracedstore.tools.attach.job_reading import JobReading
from tracedstore.tools.attach.job_state import read_job_state, select_keys
from tracedstore.tools.attach.job_text import status_lines
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.store_snapshot import StoreSnapshot
from tracedstore.tools.attach.token_policy import TokenPolicy

_NOW = datetime(2026, 11, 16, tzinfo=UTC)
_PAIR = struct.Struct(">BH")


def _validation(data: bytes) -> None:
    value = validation.load_json(data, 1 << 20)
    for check in (
        lambda: validation.integer(value, 100),
        lambda: validation.digits(data, 10**12),
        lambda: validation.seconds(value),
        lambda: validation.text(value),
        lambda: urlsplit(validation.http_url(value)).port,
        lambda: validation.host_and_port(value).encode("ascii"),
    ):
        try:
            check()
        except ValueError:
            continue


def _ledger(data: bytes) -> None:
    ledger = Ledger(data)
    assert len(ledger.ranks()) <= len(data) // 12
    assert len(ledger.times()) <= len(data) // 12


def _last_arrival(data: bytes) -> None:
    rank = last_rank(data)
    assert rank is None or 0 <= rank < 2**32


def _registry_entry(data: bytes) -> None:
    info = parse_entry(data)
    if info is None:
        return
    assert 0 <= info.rank < info.world_size <= MAX_RANKS
    json.dumps(listed([info])).encode()
    if info.metrics is not None:
        url = urlsplit(info.metrics)
        sent = TokenPolicy(token="secret", hosts=["node0"]).headers(url)
        assert not sent or url.scheme == "https"


def _missing_report(data: bytes) -> None:
    report = MissingReport.from_bytes(data, 8)
    if report is not None:
        assert len(report.describe()) < 1 << 20
        json.dumps(report.event_fields())
        assert len(report.arrived_ranks) <= MAX_RANKS


def _rendezvous_state(data: bytes) -> None:
    # Without the cache of the four latest states.
    state = parse_state.__wrapped__(data)
    if state is None:
        return
    seen = Attendance()
    seen.record(state)
    nodes = [*seen.joined(None), *seen.waiting(None), *seen.left(None)]
    seen.silent_seconds(nodes, 0.0)
    sorted(state.present)


def _torch_keys(data: bytes) -> None:
    found = meaning(data.decode("utf-8", "replace"))
    assert found is None or found.phase


def _diagnosis(data: bytes) -> None:
    for parse in (
        Verdict.from_bytes,
        BlockedRecord.from_bytes,
        Question.from_bytes,
        ProcessFacts.from_bytes,
        Replacement.from_bytes,
        Stamp.from_bytes,
        StillRecord.from_bytes,
    ):
        parse(data)
    record = BlockedRecord.from_bytes(data, 8)
    if record is not None:
        blocked = resolve({record.rank: record, 1: _IN_COLLECTIVE}, 8)
        judge_waits(blocked, find_suspects(blocked, 8), 8, {}, {}, lambda _: "", 9.0)


def _collectives(data: bytes) -> None:
    found = collective_ledger.parse(data, 0.0, 8)
    assert found.keys() <= set(range(8))
    entries = flight_recorder.parse(data.decode("utf-8", "replace"))
    for record in flight_recorder.records_of([entries]).values():
        assert 0 <= record.last_called < 2**63


def _texts(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for parse in (
        lambda: fold(unfold(text)),
        lambda: rosters.parse_node_list(text),
        lambda: rosters.parse_task_counts(text),
        lambda: rosters.parse_host_file(text.splitlines()),
        lambda: rosters.parse_slurm_host_file(text.splitlines()),
    ):
        try:
            parse()
        except ValueError:
            continue


class EtcdStore:
    """The part of torch's EtcdStore that lists its keys; its class name counts."""

    prefix = "/p/"

    def __init__(self, nodes: Sequence[tuple[str, str | None]]) -> None:
        children = [
            SimpleNamespace(key=f"/p/{key}", value=value, dir=False)
            for key, value in nodes
        ]
        listing = SimpleNamespace(children=children)
        self.client = SimpleNamespace(get=lambda key: listing)


def _etcd(data: bytes) -> None:
    texts = data.decode("utf-8", "replace").split("\n")
    values = [*texts[1::2], None]
    nodes = list(zip(texts[::2], values, strict=False))
    contents = etcd_contents(EtcdStore(nodes))
    assert contents is not None
    assert len(contents.items) + len(contents.invalid_keys) <= len(nodes)
    StoreSnapshot.take(EtcdStore(nodes), list)


def _pairs(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Split an input into the keys and values of a store."""
    position = 0
    while position + _PAIR.size <= len(data):
        key_size, value_size = _PAIR.unpack_from(data, position)
        position += _PAIR.size
        key = data[position : position + key_size]
        position += key_size
        yield key.decode("utf-8", "replace"), data[position : position + value_size]
        position += value_size


def _joined(pairs: Sequence[tuple[str, bytes]]) -> bytes:
    return b"".join(
        _PAIR.pack(len(key := name.encode()[:255]), len(value[:65535]))
        + key
        + value[:65535]
        for name, value in pairs
    )


def _store_contents(data: bytes) -> None:
    """Read a whole store as ``tracedstore status`` does, and print it."""
    contents = dict(_pairs(data))
    selected = select_keys(list(contents))
    snapshot = StoreSnapshot(contents, {key: contents[key] for key in selected})
    job = read_job_state(snapshot)
    status = JobReading(store="tcp://h:1", now=_NOW.timestamp(), job=job, replies={})
    for line in status_lines(view_of(status)):
        str(line)
    json.dumps(status.to_json()).encode()


_ARRIVAL: Inputs = st.builds(
    encode_arrival, st.integers(0, 2**32 - 1) | st.integers(0, 9), st.floats()
)
_LEDGERS: Inputs = st.lists(_ARRIVAL, max_size=12).map(b"".join)
_STATES: Inputs = st.sampled_from(
    [
        pickled_state(now=_NOW),
        pickled_state({"a": 1.0, "b": 20.0}, {"c": 1.0}, now=_NOW, round=3),
        pickled_state({"a": 0.0}, now=_NOW, complete=True, closed=True),
    ]
)
_OPCODES: Inputs = st.lists(st.sampled_from(OPCODES), max_size=60).map(
    lambda some: b"\x80\x04" + b"".join(some) + b"."
)
_URLS = st.sampled_from(
    ["http://h:1/metrics", "https://h", "http://[::1]:9/m", "http://h:99999/", "h:1"]
)
_FIELDS = JSON | _URLS
_ENTRIES = changed_json(ENTRY, _FIELDS)
_REPORTS = changed_json(REPORT, JSON | RANGES)
_LAST_ARRIVALS = changed_json(LAST_ARRIVAL, JSON)
_COUNTS: Inputs = st.sampled_from([b"1", b"2", b"9" * 16, b"9" * 5000, b"-1", b"x"])
_BARRIERS = st.sampled_from(["b/1", "b/2", "", "p/0/b"]).map(BarrierKeys)
_CONTENTS = st.one_of(
    st.tuples(
        st.builds(
            "{}{}/{}".format,
            st.sampled_from(["", "p/0/"]),
            st.just(REGISTRY),
            st.integers(0, 9),
        ),
        _ENTRIES,
    ),
    st.tuples(_BARRIERS.map(lambda keys: keys.num_members), _COUNTS),
    st.tuples(_BARRIERS.map(lambda keys: keys.ledger), _LEDGERS),
    st.tuples(_BARRIERS.map(lambda keys: keys.confirmations), _LEDGERS),
    st.tuples(_BARRIERS.map(lambda keys: keys.repeat_count), _COUNTS),
    st.tuples(_BARRIERS.map(lambda keys: keys.missing_report), _REPORTS),
    st.tuples(_BARRIERS.map(lambda keys: keys.last_member), _LAST_ARRIVALS),
    st.tuples(st.just("torch.rendezvous.job"), _STATES.map(b64encode)),
    st.tuples(
        st.sampled_from(
            [
                "torch.rendezvous.job.0/MASTER_ADDR",
                "torch.rendezvous.job.0/MASTER_PORT",
            ]
        ),
        st.sampled_from([b"node0", b"::1", b"29500", b"\xff", b""]),
    ),
    st.tuples(st.text(max_size=20), st.binary(max_size=20)),
)

_WRITTEN = WrittenFamily(family="go/*", last_key="go/3", rank_positions=(0,))
_IN_COLLECTIVE = BlockedRecord(
    rank=1,
    host="node0",
    pid=7,
    operation="all_reduce",
    keys=(),
    phase="all_reduce 7 of group 0",
    protocol="collective",
    group="0/7",
    awaits=(2,),
    started=1.0,
    collective=CollectivePosition(
        group="0",
        number=7,
        operation="all_reduce",
        recent=(Called(number=6, operation="barrier"),),
        expected=Called(number=0, operation="barrier"),
        called={"0": 7},
    ),
)
_DIAGNOSES = st.sampled_from(
    [
        Verdict(
            phase="new_group 1",
            cause="busy",
            awaited=(AwaitedRank(rank=2, host="node0", pid=7, cause="busy"),),
            awaited_ranks=(2,),
            waiting_ranks=(0, 1, 3),
            evidence=("it answered",),
        ).to_bytes(),
        BlockedRecord(
            rank=1,
            host="node0",
            pid=7,
            operation="wait",
            keys=("go/4",),
            phase="key go/4",
            awaits=(2,),
            wrote=(_WRITTEN,),
            started=1.0,
        ).to_bytes(),
        _IN_COLLECTIVE.to_bytes(),
        b'{"rank": 1, "host": "a", "pid": 1, "since": 1.0, "seen": 2.0, "place": "b"}',
        Question(number=1, ranks=frozenset([1]), families=("go/*",)).to_bytes(),
        ProcessFacts(
            rank=2,
            host="node0",
            frames=(Frame(file="a.py", line=3, function="f"),),
            wrote=(_WRITTEN,),
            stacks={"MainThread": (Frame(file="a.py", line=3, function="f"),)},
        ).to_bytes(),
        b'{"rank": 1, "hosts": ["a", "b"], "pids": [1, 2]}',
        b'{"rank": 1, "attempt": 0, "host": "a", "pid": 1, "time": 2.5}',
    ]
)

_ENTRY = {
    "collective_seq_id": 7,
    "input_sizes": [[10]],
    "input_dtypes": ["Float"],
    "is_p2p": False,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl:all_reduce",
    "retired": False,
    "thread_id": "7",
    "time_created_ns": 1,
}
_COLLECTIVES = st.sampled_from(
    [
        b"1:01234567:99;2:01234567:99;",
        json.dumps({"entries": [_ENTRY, {**_ENTRY, "retired": True}]}).encode(),
    ]
)

TARGETS = (
    Target(
        name="validation",
        run=_validation,
        inputs=changed_bytes(_FIELDS.map(lambda one: json.dumps(one).encode())),
        allowed=(ValueError,),
    ),
    Target(name="ledger", run=_ledger, inputs=changed_bytes(_LEDGERS)),
    Target(name="last_arrival", run=_last_arrival, inputs=_LAST_ARRIVALS),
    Target(name="registry_entry", run=_registry_entry, inputs=_ENTRIES),
    Target(name="missing_report", run=_missing_report, inputs=_REPORTS),
    Target(
        name="rendezvous_state",
        run=_rendezvous_state,
        inputs=changed_bytes(_STATES | _OPCODES),
    ),
    Target(
        name="torch_keys",
        run=_torch_keys,
        inputs=changed_bytes(st.sampled_from([row.example.encode() for row in ROWS])),
    ),
    Target(name="collectives", run=_collectives, inputs=changed_bytes(_COLLECTIVES)),
    Target(name="diagnosis", run=_diagnosis, inputs=changed_bytes(_DIAGNOSES)),
    Target(
        name="rosters",
        run=_texts,
        inputs=changed_bytes(
            st.sampled_from(
                [b"0-2,5", b"n[01-12,7],g[1-2]b3", b"8(x2),4", b"a slots=2\nb:3 # c"]
            )
        ),
        share=0.5,
    ),
    Target(
        name="etcd",
        run=_etcd,
        inputs=changed_bytes(
            st.lists(
                st.binary(max_size=12).map(b64encode) | st.just(b"%"), max_size=8
            ).map(b"\n".join)
        ),
        share=0.5,
    ),
    Target(
        name="store_contents",
        run=_store_contents,
        inputs=st.lists(_CONTENTS, max_size=8).map(_joined),
        share=0.5,
    ),
)
