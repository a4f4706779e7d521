"""The creation of a process group: gloo's addresses, and the file of a FileStore.

gloo connects every two ranks after they exchanged their addresses. No Store call is in
flight then, so the diagnosis of blocked calls does not see it.

Each rank writes its host name and socket address under a key of its own: size, host
name, size, sockaddr, and the ids of its connections (gloo's transport/tcp/context.cc).
Any client can write the key, so the value is checked.
"""

import ipaddress
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tracedstore import names
from tracedstore.common import election, ranges
from tracedstore.common.codec import printable_text
from tracedstore.common.errors import error_message
from tracedstore.common.identity import (
    ProcessIdentity,
    bottom_of,
    process_identity,
    restart_count,
)
from tracedstore.common.procfs import IPAddress
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.threads import run_with_timeout, start_bounded_thread
from tracedstore.coordination.rank_registry import Member
from tracedstore.coordination.store_access import (
    bare_store,
    find_absent,
    side_connection,
)
from tracedstore.diagnosis.connection import file_store
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.judgement.stall_reports import LOOKERS
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe import incarnations
from tracedstore.diagnosis.observe.blocked_record import CONNECTS, BlockedRecord
from tracedstore.diagnosis.observe.waits import OF_GROUP, PENDING, Pending, Repeated
from tracedstore.local.facts import store_url
from tracedstore.recording.counters import StoreState, handle_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER, Watch

_MAX_HOST_NAME = 256
_MAX_VALUE = 1024 * 1024
# sizeof(struct sockaddr_storage)
_SOCKADDR = 128
_SIZE = struct.Struct("=Q")
_MAX_RANKS_READ = 4096
_READ_TIMEOUT = 2.0
_guarded = partial(RECORDER.failures.guarded, names.DIAGNOSIS)


@dataclass(frozen=True, slots=True)
class GlooAddress:
    """What a rank published.

    Attributes:
        host: Its host name.
        address: The IP address at which it listens.
        port: The port.
    """

    host: str
    address: IPAddress
    port: int


def parse_address(value: bytes) -> GlooAddress | None:
    """Parse a published value; None if it is not one."""
    try:
        if len(value) > _MAX_VALUE:
            return None
        host, rest = _sized(value, _MAX_HOST_NAME)
        peer, _ = _sized(rest, _MAX_VALUE)
        if len(peer) < _SOCKADDR:
            return None
        family = int.from_bytes(peer[:2], "little")
        port = int.from_bytes(peer[2:4], "big")
        if family == socket.AF_INET:
            address: IPAddress = ipaddress.IPv4Address(peer[4:8])
        elif family == socket.AF_INET6:
            address = ipaddress.IPv6Address(peer[8:24])
        else:
            return None
        return GlooAddress(printable_text(host.decode()), address, port)
    except (ValueError, struct.error):
        return None


def _sized(data: bytes, limit: int) -> tuple[bytes, bytes]:
    (size,) = _SIZE.unpack_from(data)
    end = _SIZE.size + size
    if not 0 < size <= limit or end > len(data):
        raise ValueError("not a size")
    return data[_SIZE.size : end], data[end:]


def read_addresses(store: Any, prefix: str, size: int) -> dict[int, GlooAddress]:
    """Read what the ranks of a group have published.

    Args:
        store: A store that no other thread waits on.
        prefix: The key of a rank without the rank.
        size: The number of ranks of the group.
    """
    keys = [f"{prefix}{rank}" for rank in range(min(size, _MAX_RANKS_READ))]
    absent = set(find_absent(lambda some: bool(store.check(list(some))), keys))
    present = [rank for rank, key in enumerate(keys) if key not in absent]
    values = store.multi_get([keys[rank] for rank in present]) if present else []
    parsed = zip(present, map(parse_address, values), strict=True)
    return {rank: address for rank, address in parsed if address is not None}


def check_published(
    addresses: Mapping[int, GlooAddress], phase: str, members: Mapping[int, int]
) -> Verdict | None:
    """Find ranks that publish loopback addresses to ranks of other hosts.

    Args:
        addresses: What the ranks of a group have published.
        phase: What the ranks execute.
        members: Global ranks by group rank; a rank that is not in it is its own.
    """
    hosts = {address.host for address in addresses.values()}
    loopback = {
        rank: found for rank, found in addresses.items() if found.address.is_loopback
    }
    if len(hosts) < 2 or not loopback:  # noqa: PLR2004 - more than one host
        return None
    named = [
        AwaitedRank(
            rank=members.get(rank, rank),
            host=found.host,
            cause="address",
            doing=f"publishes {found.address}:{found.port}",
        )
        for rank, found in sorted(loopback.items())
    ]
    ranks = tuple(sorted(one.rank for one in named))
    shown = ", ".join(sorted({found.host for found in loopback.values()})[:4])
    evidence = (
        "loopback addresses, which ranks of other hosts cannot reach, published to"
        f" gloo by {ranges.ranks_text(ranks)}"
    )
    return Verdict(
        phase=phase,
        cause="address",
        awaited=tuple(named),
        awaited_ranks=ranks,
        waiting_ranks=tuple(
            sorted(members.get(rank, rank) for rank in addresses.keys() - loopback)
        ),
        evidence=(evidence,),
        remedy=f"set GLOO_SOCKET_IFNAME on {shown}, or let its name resolve to its"
        " network address",
        time=time.time(),
    )


def key_prefix(group_name: str) -> str:
    """Return the keys of a group's ranks without the rank, below the store given to it.

    For the first device and the backend of the CPU.
    """
    return f"{group_name}//cpu//0/"


@dataclass(slots=True, kw_only=True, eq=False)
class GroupCreation:
    """A process group that is being created.

    Attributes:
        store: The store given to it.
        name: Its name.
        size: The number of its ranks.
        rank: The rank of this process in the group.
        ranks: Its global ranks in order, empty for the default group.
        verdict: Why it does not end, if that is known.
        elected: This process reports that; None before it is known.
        thread_id: The thread that creates it.
    """

    store: Any
    name: str
    size: int
    rank: int
    ranks: tuple[int, ...] = ()
    verdict: Verdict | None = None
    elected: bool | None = None
    thread_id: int = 0
    started: float = field(default_factory=time.monotonic)

    def stamp(self) -> None:
        """Stamp the keys that this rank is about to write."""
        with RECORDER.unrecorded():
            incarnations.write_stamp(
                bottom_of(self.store), self.name, self._own_rank(), self._all_members()
            )

    def look_and_report(self) -> None:
        """Look for what is wrong in the store; emit `job.stalled` if something is.

        While the thread that creates the group is in a Store call, that call's own
        diagnosis reports.
        """
        # The store's failures are not failures of the telemetry.
        with suppress(RuntimeError, OSError):
            self._look()
            if self.verdict is not None and not self._is_in_store_call():
                self._report(self.verdict)

    def _look(self, *, failed: bool = False) -> None:
        self._look_at_stamps(failed=failed)
        if self.verdict is None:
            self._look_for_bad_addresses()

    def _look_for_bad_addresses(self) -> None:
        """Check the addresses that gloo's ranks have published."""
        with RECORDER.unrecorded(), side_connection(self.store) as connection:
            found = read_addresses(connection, key_prefix(self.name), self.size)
        verdict = check_published(
            found, f"connecting gloo's ranks of group {self.name}", self._members()
        )
        if verdict is not None:
            self._set_verdict(verdict)

    def _is_in_store_call(self) -> bool:
        return any(
            active.thread_id == self.thread_id and active.method.blocks
            for active in RECORDER.counters.calls()
        )

    def _report(self, verdict: Verdict) -> None:
        """Report the verdict, if this process is the first of its job that does.

        Jobs that share a store report for themselves. Of ranks with stale keys none may
        run, so the first of all that find them reports.
        """
        if self.elected is None:
            run_id = process_identity().run_id
            launch = f"{run_id}/{restart_count(os.environ)}/{self.name}"
            with RECORDER.unrecorded(), side_connection(bottom_of(self.store)) as store:
                position = election.take_position(store, f"{LOOKERS}/{launch}")
            self.elected = election.is_elected(position, reporters=1)
        if self.elected:
            stall_reports.report(self, verdict, store_url(self.store))

    def _set_verdict(self, verdict: Verdict) -> None:
        self.verdict = replace(
            verdict,
            # What the others do is not known.
            waiting_ranks=verdict.waiting_ranks or (self._own_rank(),),
            waited_seconds=time.monotonic() - self.started,
        )

    def _all_members(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(self.size))

    def _members(self) -> Mapping[int, int]:
        return dict(enumerate(self.ranks))

    def _own_rank(self) -> int:
        return self._members().get(self.rank, self.rank)

    def _look_after_failure(self, error: Exception) -> None:
        """Look for keys of an earlier attempt, and for addresses that cannot work."""
        with suppress(RuntimeError, OSError):
            run_with_timeout(_READ_TIMEOUT, partial(self._look, failed=True))
            # A Store call that failed has been reported by its own diagnosis.
            is_reported = bool(getattr(error, "__notes__", ()))
            if self.verdict is None or self.verdict.cause == "diverged":
                return
            if not is_reported:
                run_with_timeout(_READ_TIMEOUT, partial(self._report, self.verdict))

    def _look_at_stamps(self, *, failed: bool) -> None:
        """Look for stale keys, and after a failure for ranks that diverged."""
        with RECORDER.unrecorded(), side_connection(bottom_of(self.store)) as store:
            members = self._all_members()
            verdict = incarnations.find_stale(store, self.name, members)
            if verdict is None and failed:
                # The diagnosis of the wait reports it.
                verdict = incarnations.find_diverged(
                    store, [self.name], members, members
                )
            jobs = incarnations.jobs_in(
                incarnations.read_replacements(store), process_identity().run_id
            )
        if jobs:
            phase = incarnations.phase_of(self.name)
            verdict = incarnations.shared_store(
                verdict or Verdict(phase=phase, cause="unknown", time=time.time()), jobs
            )
        if verdict is not None:
            self._set_verdict(verdict)

    def add_note(self, error: Exception) -> None:
        """Add to an exception what torch's text does not contain."""
        if self.verdict is None and "connect" in error_message(error).lower():
            self._look_after_failure(error)
        if self.verdict is not None:
            note = f"tracedstore: {self.verdict.describe()}"
            # The Store call that failed may have come to the same verdict.
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        bottom = bare_store(self.store)
        if type(bottom).__name__ == "FileStore":
            text = file_store.describe_wait(bottom.path, self.size)
            error.add_note(f"tracedstore: {text}")


@dataclass(slots=True, eq=False, kw_only=True)
class PendingCreation(Pending):
    """A rank that creates a process group: in gloo it connects to the other ranks."""

    creation: GroupCreation

    def describe(
        self,
        connection: Any,  # noqa: ARG002 - of the base
        member: Member,
        started: float,
        *,
        complete: bool = False,  # noqa: ARG002 - of the base
        also: Sequence[int] = (),  # noqa: ARG002 - of the base
    ) -> BlockedRecord | None:
        """Return that it waits for the members; None if it is known what is wrong."""
        creation = self.creation
        if creation.verdict is not None:
            return None
        return BlockedRecord(
            rank=member.rank,
            host=ProcessIdentity().host,
            pid=os.getpid(),
            attempt=restart_count(os.environ),
            operation=CONNECTS,
            keys=(),
            phase=incarnations.phase_of(creation.name),
            members=creation.ranks or None,
            creates=creation.name,
            started=started,
        )


@contextmanager
def _announced(creation: GroupCreation) -> Iterator[None]:
    """Let the diagnosis know that a rank waits for the other members meanwhile."""
    state = handle_of(bottom_of(creation.store))
    if creation.rank < 0 or not isinstance(state, StoreState):
        yield
        return
    pending = PendingCreation(
        key=(creation.thread_id, "group", creation.name),
        repeated=Repeated(since=creation.started),
        thread_id=creation.thread_id,
        order=OF_GROUP,
        state=state,
        creation=creation,
    )
    PENDING.add(pending)
    pending.failed = True
    try:
        yield
        pending.failed = False
    finally:
        PENDING.discard(pending)


@contextmanager
def watched(creation: GroupCreation) -> Iterator[None]:
    """Diagnose the creation of a process group that runs in this context."""
    after = RECORDER.overdue_ns / 1e9
    if not RECORDER.on:
        yield
        return

    def report() -> None:
        # The other watches must not wait for it.
        start_bounded_thread(partial(_guarded, creation.look_and_report))

    creation.thread_id = threading.get_ident()
    if creation.rank >= 0:
        _guarded(creation.stamp)
    watch = Watch(names.DIAGNOSIS, report, after)
    if math.isfinite(after):
        _guarded(WATCHER.add, watch)
    try:
        with _announced(creation):
            yield
    except Exception as error:
        if not raised_by_handler(error):
            _guarded(creation.add_note, error)
        _guarded(stall_reports.failed, creation)
        raise
    finally:
        WATCHER.remove(watch)
    if creation.verdict is not None:
        waited = time.monotonic() - creation.started
        ended = replace(creation.verdict, waited_seconds=waited)
        _guarded(stall_reports.resumed, creation, ended)
