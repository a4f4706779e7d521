"""Which process of which job this is, as processes of one host tell them apart."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tracedstore.common import codec, procfs
from tracedstore.common.codec import Large, Pid, Printable, Rank, Small, UpTo, Words
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
from tracedstore.recording.counters import StoreState, handle_of

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

    rank: Rank | None
    world_size: Annotated[int, codec.below(MAX_RANKS + 1)] | None
    run_id: Printable | None
    attempt: Small
    pid: Pid
    start_ticks: Large | None
    master: Words
    registered: bool
    stores: Annotated[tuple[Printable, ...], UpTo(_MAX_STORES)] = ()

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
