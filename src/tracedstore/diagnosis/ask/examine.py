"""Finds out what ranks do: those of this host first, the others through the store."""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from tracedstore.common.identity import process_identity
from tracedstore.common.timeouts import run_with_timeout
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.ask.questions import ask
from tracedstore.local.facts import ProcessFacts
from tracedstore.local.host_ranks import ask_host
from tracedstore.recording.recorder import RECORDER

# Seconds for the processes of this host, and the share of the timeout at most.
_HOST_TIMEOUT, _HOST_SHARE = 2.0, 0.5
# Seconds that the store gets after the timeout, to delete what was asked.
_STORE_GRACE = 1.0


def examine(
    connection: Any,
    infos: Mapping[int, RankInfo],
    ranks: Iterable[int],
    world_size: int,
    timeout: float,
    *,
    kind: str = "status",
    families: Iterable[str] = (),
) -> dict[int, ProcessFacts]:
    """Return what is known about these ranks; those without any answer are omitted.

    It never raises, and takes at most a second longer than the timeout. A store that
    does not respond costs no more than that.

    Args:
        connection: A bare store that no other thread uses. If it hangs, the thread
            that uses it is abandoned, so the caller must not use it any more.
        infos: The ranks that have registered.
        ranks: The ranks in question.
        world_size: The number of ranks.
        timeout: Seconds for all of it.
        kind: ``status`` or ``stacks``.
        families: The key families in question.
    """
    deadline = time.monotonic() + timeout
    wanted = {rank for rank in ranks if 0 <= rank < world_size}
    families = tuple(families)
    if not wanted:
        return {}
    answers: dict[int, ProcessFacts] = {}
    with suppress(OSError, ValueError):
        host_timeout = min(_HOST_TIMEOUT, _HOST_SHARE * timeout)
        answers = ask_host(infos, wanted, host_timeout, kind=kind, families=families)
    elsewhere = wanted - answers.keys()
    remaining = deadline - time.monotonic()
    if elsewhere and remaining > 0:
        through_store: dict[int, ProcessFacts] = {}
        with suppress(Exception):  # whatever a store raises: nothing more is known
            run_with_timeout(
                remaining + _STORE_GRACE,
                partial(
                    _ask_unrecorded,
                    connection,
                    kind,
                    elsewhere,
                    remaining,
                    families=families,
                    asked_by=_own_name(),
                    answers=through_store,
                ),
            )
        answers |= dict(through_store)
    return answers


def _ask_unrecorded(*args: Any, **kwargs: Any) -> None:
    # In a thread of its own, whose calls are the telemetry's.
    with RECORDER.unrecorded():
        ask(*args, **kwargs)


def _own_name() -> str:
    identity = process_identity()
    rank = "" if identity.rank is None else f"rank {identity.rank} on "
    return f"{rank}{identity.host} (pid {os.getpid()})"
