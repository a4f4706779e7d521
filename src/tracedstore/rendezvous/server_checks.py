"""Checks of the servers that a rendezvous leads to, after a round.

**Another job's rendezvous in the same store.** A second torchrun on a host connects to
the server of the first one, if both have the same endpoint. Run ids keep their states
apart, but the server ends with the job that started it, and takes the other one with
it. The first agent of each traced job adds the key of its state to an index, which the
agents of later jobs read. They do not list the keys of the store: that costs a reply as
long as the store is large, and torch holds the GIL until it is there.

**A MASTER_ADDR of an earlier round.** With a shared TCPStore, torch's agents keep the
address of the first round for as long as they are not rank 0. If the node of rank 0 is
replaced, they give their workers the address of a server that no longer exists.
"""

import json
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from tracedstore.common import validation
from tracedstore.common.codec import printable_text
from tracedstore.common.threads import pause
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.coordination.store_access import (
    absent_keys,
    read_existing,
    side_connection,
)
from tracedstore.diagnosis.observe import incarnations
from tracedstore.recording.recorder import RECORDER
from tracedstore.rendezvous.state import Node, RendezvousState, parse_state

INDEX: Final = "tracedstore/RENDEZVOUS"
_PREFIX: Final = "torch.rendezvous."
# Nodes write a heartbeat every 5 s; the clocks of hosts may differ.
_MAX_SILENT_SECONDS = 30.0
_MAX_RUNS_READ, _MAX_RUNS_SHOWN = 16, 4
# Bytes of one state, and of all of them: parsing a megabyte may take half a second.
_MAX_STATE_BYTES, _MAX_STATES_BYTES = 1 << 20, 2 << 20
# Bytes of the end of the index, which has the latest runs.
_MAX_INDEX_BYTES = 128 * 1024
_MAX_ENTRY_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """A job whose nodes are alive.

    Attributes:
        run_id: Its run id.
        node: Its first node.
        heartbeat: The latest heartbeat of this node, in seconds since the epoch.
    """

    run_id: str
    node: Node
    heartbeat: float

    def __str__(self) -> str:
        return f"run {self.run_id!r} (agent {self.node})"


def find_other_runs(
    store: Any, own_key: str, *, is_first: bool, now: float
) -> list[OtherRun]:
    """Return the other jobs with a rendezvous in a store, as far as they are alive.

    Args:
        store: A connection to a TCPStore that no other thread uses.
        own_key: The key of this job's state.
        is_first: Whether this agent adds the key to the index for its job.
        now: The time, in seconds since the epoch.
    """
    # Before reading: of two jobs that start at once, one finds the other.
    if is_first:
        store.append(INDEX, f"{json.dumps(own_key)}\n")
    indexed = (
        key
        for value in read_existing(store, [INDEX])
        for key in _read_index(value[-_MAX_INDEX_BYTES:])
    )
    keys = [
        key
        for key in dict.fromkeys(indexed)
        if key.startswith(_PREFIX) and "/" not in key and key != own_key
    ]
    runs: list[OtherRun] = []
    remaining = _MAX_STATES_BYTES
    for key in keys[-_MAX_RUNS_READ:]:
        for value in read_existing(store, [key]):
            remaining -= len(value)
            if remaining < 0:
                return runs
            run = _parse(key.removeprefix(_PREFIX), value, now)
            if run is not None:
                runs.append(run)
    return runs


def report_other_runs(runs: Sequence[OtherRun], endpoint: str, run_id: str) -> str:
    """Report the other jobs at an endpoint; return a sentence on them for failures."""
    if not runs:
        return ""
    shown = ", ".join(map(str, runs[:_MAX_RUNS_SHOWN]))
    first = runs[0]
    incarnations.report_stale(
        f"two jobs share the server {endpoint}: {shown}, and this agent of run"
        f" {run_id!r}; the server ends with the job that started it",
        found=RankInfo(
            rank=0,
            world_size=1,
            host=first.node.addr,
            pid=first.node.pid,
            run_id=first.run_id,
            started=first.heartbeat,
        ),
        remedy=incarnations.SHARED_REMEDY,
    )
    return (
        f"{shown} used this server too when this job started: the server ends with the"
        " job that started it"
    )


def _read_index(value: bytes) -> Iterator[str]:
    """Return the keys in the index; malformed entries are omitted."""
    for line in value.splitlines():
        try:
            key = validation.text(validation.load_json(line, _MAX_ENTRY_BYTES))
            key.encode()  # raises ValueError for half of a surrogate pair
            yield key
        except (ValueError, TypeError):
            continue


def _parse(run_id: str, value: bytes, now: float) -> OtherRun | None:
    if len(value) > _MAX_STATE_BYTES:
        return None
    try:
        state = parse_state(b64decode(value, validate=True))
    except ValueError:
        return None
    if state is None or state.closed:
        return None
    for node in sorted(state.participants, key=lambda node: state.participants[node]):
        silent = state.silent_seconds(node, now)
        if silent is not None and silent < _MAX_SILENT_SECONDS:
            return OtherRun(run_id=run_id, node=node, heartbeat=state.heartbeats[node])
    return None


_KEYS: Final = ["MASTER_ADDR", "MASTER_PORT"]
# Seconds in which rank 0 of the round publishes its address, and between two looks.
_TIMEOUT, _INTERVAL = 10.0, 0.5
_MAX_BYTES = 256
_REMEDY: Final = (
    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: its agents read the address"
    " of every round then"
)


def check_master_address(info: RendezvousInfo, last: RendezvousState | None) -> None:
    """Report that workers get another address than rank 0 of the round published.

    A round in which rank 0 publishes none within 10 s has the address of an earlier
    one. It takes that long, so call it in a bounded thread.

    Args:
        info: What the agent got for its workers.
        last: The state of the round.
    """
    address = info.bootstrap_store_info
    if address is None or info.rank == 0:
        return
    given = f"{address.master_addr}:{address.master_port}"
    with RECORDER.unrecorded(), side_connection(info.store) as store:
        published = _read_published(store)
    if published in ("", given):
        return
    number = "this round" if last is None else f"round {last.round}"
    incarnations.report_stale(
        f"this agent gives its workers the MASTER_ADDR of an earlier round: {given};"
        f" that of {number} is {published}. The workers cannot connect if the process"
        " that served the former has ended",
        remedy=_REMEDY,
    )


def _read_published(store: Any) -> str:
    """Return the address that rank 0 of the round published.

    "" if it does not publish one, or this process ends meanwhile.
    """
    deadline = time.monotonic() + _TIMEOUT
    # The values are read once: any client can have written long ones.
    while absent_keys(store, _KEYS):
        if time.monotonic() > deadline or not pause(_INTERVAL):
            return ""
    values = read_existing(store, _KEYS)
    if len(values) < len(_KEYS):
        return ""
    host, port = (value[:_MAX_BYTES].decode("utf-8", "replace") for value in values)
    return printable_text(f"{host}:{port}")
