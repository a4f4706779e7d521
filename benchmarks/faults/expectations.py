"""What the faults of a case allow a rank to do."""

from faults.cases import Case
from faults.oracle import RankRecord

# Faults after which a rank cannot write its events.
_LOG_LOST = ("limit_file_size", "limit_memory", "refuse_threads")
# Faults after which the store has forgotten arrivals.
_DATA_LOST = ("file_delete", "file_truncate", "server_restart")
# A FileStore that reads half an entry waits for the rest of it.
_BLOCKS_ALL = ("server_stop", "file_delete", "file_truncate")


def record_of(case: Case, rank: int) -> RankRecord:
    """Return the record of a rank that has done nothing, with what it may do."""
    own = {fault.action for fault in case.faults_of(rank).values()}
    return RankRecord(
        rank=rank,
        flavour=case.flavours[rank],
        may_fail=_may_fail(case, rank),
        may_block=may_block(case, rank) or _may_hold_lock(case),
        lossy=any(fault.action in _DATA_LOST for fault in case.faults),
        unnamed="refuse_threads" in own,
        log_works=case.log == "file" and own.isdisjoint(_LOG_LOST),
    )


def may_block(case: Case, rank: int) -> bool:
    """Return whether a fault blocks the store of a rank without end."""
    return any(
        not fault.release
        and (
            fault.action in _BLOCKS_ALL
            or (fault.action == "proxy_hold" and rank in case.proxied)
        )
        for fault in case.faults
    )


def _may_hold_lock(case: Case) -> bool:
    """Return whether a rank that is stopped without end may hold a FileStore's lock."""
    return case.store == "file" and any(
        fault.action == "stop" and not fault.release for fault in case.faults
    )


def _may_fail(case: Case, rank: int) -> bool:
    # Nodes of a rendezvous depend on each other after they have joined.
    return case.protocol == "rendezvous" or any(
        fault.action.startswith(("server", "file"))
        or (fault.action.startswith("proxy") and rank in case.proxied)
        or (fault.action.startswith("limit") and fault.rank == rank)
        for fault in case.faults
    )
