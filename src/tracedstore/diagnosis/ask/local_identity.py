"""Which process of which job this is, as processes of one host tell them apart."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tracedstore.common import procfs, validation
from tracedstore.common.identity import (
    ProcessIdentity,
    StoreIdentity,
    bottom_of,
    identify,
    process_identity,
    restart_count,
)
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.judgement.verdict import printable_text
from tracedstore.recording.counters import StoreState, handle_of

_MAX_PID = 2**32
_MAX_STORES = 16
_MAX_NAME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIdentity:
    """The identity of a process of this host.

    Attributes:
        rank: Its rank, None for an agent.
        world_size: The number of ranks.
        run_id: The run id of its job, if known.
        attempt: The attempt of torchrun that it belongs to.
        pid: Its process id.
        start_ticks: When it started, in ticks since the boot.
        master: ``MASTER_ADDR:MASTER_PORT`` of its environment, "" without them.
        registered: It has registered in a store.
        stores: The stores in which it has registered, as processes of one host can
            compare them.
    """

    rank: int | None
    world_size: int | None
    run_id: str | None
    attempt: int
    pid: int
    start_ticks: int | None
    master: str
    registered: bool
    stores: tuple[str, ...] = ()

    @classmethod
    def own(cls) -> "LocalIdentity":
        """Return the identity of this process, as far as it is known now."""
        registered = [handle for handle, _ in rank_registry.registered_stores()]
        identity = _identity(
            process_identity(),
            os.environ,
            os.getpid(),
            procfs.own_start_ticks(),
            registered=bool(registered),
        )
        names = {name for handle in registered if (name := _store_name(handle))}
        return replace(identity, stores=tuple(sorted(names)[:_MAX_STORES]))

    @classmethod
    def of_process(cls, pid: int) -> "LocalIdentity | None":
        """Return the identity of a process that does not answer, from /proc.

        None if its environment cannot be read. Variables that it set after its start
        are not known, and neither is whether it has registered.
        """
        environ = procfs.read_environ(pid)
        stat = procfs.read_stat(pid)
        if not environ or stat is None:
            return None
        return replace(cls.of_environment(environ, pid), start_ticks=stat.start_ticks)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], pid: int) -> "LocalIdentity":
        """Return the identity of a process with these variables."""
        identity = ProcessIdentity.from_environment(environ)
        return _identity(identity, environ, pid, None, registered=False)

    def same_job(self, other: "LocalIdentity") -> bool:
        """Return whether two processes belong to the same attempt of the same job.

        Two jobs may have the same environment. Processes that have registered in
        stores, but in no common one, belong to different jobs.
        """
        if self.stores and other.stores and set(self.stores).isdisjoint(other.stores):
            return False
        return (
            self.world_size == other.world_size
            and self.run_id == other.run_id
            and self.attempt == other.attempt
            and self.master == other.master
        )

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Any) -> "LocalIdentity":
        """Return the identity with these values; ValueError if one is not valid."""
        try:
            return cls(
                rank=_number(fields["rank"], MAX_RANKS),
                world_size=_number(fields["world_size"], MAX_RANKS + 1),
                run_id=None
                if fields["run_id"] is None
                else printable_text(fields["run_id"]),
                attempt=validation.integer(fields["attempt"], MAX_RANKS),
                pid=validation.integer(fields["pid"], _MAX_PID),
                start_ticks=_number(fields["start_ticks"], 2**63),
                master=printable_text(fields["master"]) if fields["master"] else "",
                registered=fields["registered"] is True,
                stores=tuple(map(printable_text, fields["stores"]))[:_MAX_STORES],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the identity of a process") from error


def _identity(
    identity: ProcessIdentity,
    environ: Mapping[str, str],
    pid: int,
    start_ticks: int | None,
    *,
    registered: bool,
) -> LocalIdentity:
    address = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return LocalIdentity(
        rank=identity.rank,
        world_size=identity.world_size,
        run_id=identity.run_id,
        attempt=restart_count(environ),
        pid=pid,
        start_ticks=start_ticks,
        master=f"{address[0]}:{address[1]}" if all(address) else "",
        registered=registered,
    )


def _store_name(handle: Any) -> str:
    """Return what processes of one host call the same store; "" if they share none."""
    found = _store_identity(handle)
    if found.in_process or not (found.port or found.address):
        return ""
    # Processes may use different names of a host, and different paths to a file.
    where = found.port or os.path.realpath(found.address)
    return f"{found.kind} {where} {found.namespace}"[:_MAX_NAME].strip()


def _store_identity(handle: Any) -> StoreIdentity:
    bottom = handle_of(bottom_of(handle))
    return bottom.identity if isinstance(bottom, StoreState) else identify(bottom)


def _number(value: Any, below: int) -> int | None:
    return None if value is None else validation.integer(value, below)
