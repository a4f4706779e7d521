"""The barrier that says who is missing: torch's own, with names.

The keys are torch's (see `protocol`), so traced and plain ranks meet in one barrier.
A rank that arrives signs the ledger and counts itself; the last one says so; the
others wait for that. While they wait, the first to have arrived look who is missing
and warn; at the timeout everybody knows.

The store's own timeout is left alone: the one wait there is has a timeout of its own,
so other threads that use the store do not notice.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from tracedstore.coordination import decoders, ranks
from tracedstore.coordination.errors import BarrierTimeout, torchs_words
from tracedstore.coordination.exchange import AnyStore
from tracedstore.coordination.finding import Finding
from tracedstore.coordination.missing import beside, look, sign
from tracedstore.coordination.protocol import Keys
from tracedstore.coordination.watch import BarrierWatch, Waiting
from tracedstore.core.barriers import Result, Stalled
from tracedstore.core.errors import TIMEOUT, error_message, error_type
from tracedstore.core.keys import printable
from tracedstore.core.recorder import RECORDER
from tracedstore.signals import names

WATCH: Final = BarrierWatch(RECORDER)

# How many of those that arrived first look who is missing. One may die of it; ten
# thousand would storm the store.
_LOOKERS = 2
# How often to look again for names of ranks that were counted without one.
_LOOK_AGAIN = 0.1
# Seconds that the others give those that look to say what they found.
_VERDICT_WITHIN = 1.0


def barrier(
    store: AnyStore,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
    *,
    warn_after: float = 30,
) -> None:
    """Wait until all ranks are here, and say who is not.

    A drop-in for ``torch.distributed.elastic.utils.store.barrier``, on every store.
    A prefix is for one use.

    Args:
        store: Through which the ranks meet; need not be traced.
        world_size: How many ranks there are.
        key_prefix: What the barrier's keys begin with.
        barrier_timeout: Seconds to wait.
        rank: Which rank this is. Without it others cannot name it.
        rank_tracing_decoder: Turns a rank into a name; by default what the ranks
            registered, else what the scheduler's environment says.
        trace_timeout: Seconds to give ranks that arrived without a name to write it.
        warn_after: Seconds after which `barrier.waiting` is told, if this rank is
            among the first; told again each time the wait has doubled. 0 for never.

    Raises:
        BarrierTimeout: Some rank did not come in time.
        AssertionError: A decoder was given, and no rank.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    visit = _Visit(
        store,
        world_size,
        Keys(key_prefix),
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
    )
    RECORDER.set_up()
    visit.make(warn_after)


class _Visit:
    """One rank's visit of one barrier."""

    def __init__(
        self,
        store: AnyStore,
        world_size: int,
        keys: Keys,
        timeout: float,
        rank: int | None,
        decoder: Callable[[int], str] | None,
        trace_timeout: float,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._keys = keys
        self._timeout = timeout
        self._rank = rank
        self._decoder = decoder
        self._trace_timeout = trace_timeout
        self._started = time.perf_counter_ns()
        self._family = RECORDER.families.of(printable(keys.prefix))
        self._token = RECORDER.barriers.token()

    def make(self, warn_after: float) -> None:
        """Arrive, wait for the others, and tell how it was."""
        place = 0
        try:
            place = self._arrive()
            last = self._wait(place, warn_after)
        except Exception as error:
            if error_type(error) != TIMEOUT:
                self._end("failed", error)
                raise
            timeout = self._timed_out(place)
            self._end("timeout", timeout)
            raise timeout from None
        self._end("completed", last_rank=last, place=place)

    def _arrive(self) -> int:
        if self._rank is not None:
            _quietly(ranks.register, self._store, self._rank, self._world_size)
            _quietly(sign, self._store, self._keys, self._rank)
        place: int = self._store.add(self._keys.num_members, 1)
        if place > self._world_size:
            _quietly(self._stale, place)
        return place

    def _wait(self, place: int, warn_after: float) -> int | None:
        """Wait for the last one; give its rank, where it said so."""
        if place == self._world_size:
            self._store.set(self._keys.last_member, json.dumps({"rank": self._rank}))
            RECORDER.barriers.came_last(self._family)
            return self._rank
        watched = None
        if warn_after > 0 and place <= _LOOKERS:
            watched = Waiting(self._warn, warn_after)
            _quietly(WATCH.add, watched)
        try:
            self._store.wait([self._keys.last_member], timedelta(seconds=self._timeout))
        finally:
            if watched is not None:
                WATCH.remove(watched)
        if not RECORDER.detailed():
            return None
        last: bytes | None = _quietly(self._store.get, self._keys.last_member)
        return None if last is None else _last_rank(last)

    # What follows is told while waiting, or at the end, and may not fail the barrier.

    def _warn(self) -> None:
        with beside(self._store) as store:
            finding = self._find(store)
            if not finding.unnamed:
                return
            store.set(self._keys.verdict, finding.to_bytes())
        RECORDER.barriers.stalled(
            self._token,
            Stalled(
                family=self._family,
                arrived=finding.count,
                missing=dict(zip(finding.missing, finding.missing_names, strict=True)),
                possible=finding.missing_count if finding.possibly_missing else 0,
            ),
        )
        self._emit(names.BARRIER_WAITING, **finding.facts())

    def _timed_out(self, place: int) -> BarrierTimeout:
        try:
            with beside(self._store) as store:
                if self._rank is not None and store.has_extended_api():
                    # Where plain torch's rank 0 looks for us; elsewhere it is there.
                    store.set(self._keys.trace(self._rank), "here")
                finding = self._settled(store, place)
                if self._rank == 0:
                    # Plain torch's other ranks wait for this one to have looked.
                    store.set(self._keys.tracing_gate, "<val_ignored>")
        except Exception as error:
            RECORDER.failures.add(names.BARRIERS, error)
            finding = Finding.nothing(self._world_size)
        self._emit(
            names.BARRIER_TIMEOUT, timeout_seconds=self._timeout, **finding.facts()
        )
        return self._exception(finding)

    def _settled(self, store: Any, place: int) -> Finding:
        """Find out who is missing, from somebody who has or by looking.

        Those that arrived without a name get until trace_timeout to write it.
        """
        if place > _LOOKERS:
            # The first to arrive time out first, or at about the same time.
            patience = min(_VERDICT_WITHIN, self._trace_timeout)
            with suppress(Exception):
                store.wait([self._keys.verdict], timedelta(seconds=patience))
            verdict = self._verdict(store)
            if verdict is not None:
                return verdict
        deadline = time.monotonic() + self._trace_timeout
        while True:
            finding = self._find(store)
            if not finding.unidentified or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN)
        store.set(self._keys.verdict, finding.to_bytes())
        return finding

    def _verdict(self, store: Any) -> Finding | None:
        """Read what somebody found, if that still holds."""
        if not store.check([self._keys.verdict]):
            return None
        written = store.get(self._keys.verdict)
        found = Finding.from_bytes(written, self._world_size)
        if found is None or found.unidentified:
            return None
        if found.count != store.add(self._keys.num_members, 0):
            return None
        return found if self._decoder is None else found.named_by(self._decoder)

    def _find(self, store: Any) -> Finding:
        arrivals = look(store, self._keys, self._world_size)
        missing = arrivals.missing(self._world_size)
        return Finding.of(arrivals, self._world_size, self._names(store, missing))

    def _names(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self._decoder is not None:
            return self._decoder
        known = _quietly(ranks.by_registry, store, missing)
        roster = decoders.auto()
        return roster if known is None else decoders.chain(known, roster)

    def _exception(self, finding: Finding) -> BarrierTimeout:
        shown: Sequence[str] = finding.missing_names
        if self._decoder is None:
            # torch's own decoder, where none is given, is str().
            shown = [
                str(rank) if name == decoders.nameless(rank) else f"{rank} on {name}"
                for rank, name in zip(finding.missing, shown, strict=True)
            ]
        words = torchs_words(
            self._keys.prefix, self._rank, self._world_size, shown, self._timeout
        )
        return BarrierTimeout(
            f"{words}: {finding.described()}",
            key_prefix=self._keys.prefix,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
            waited=self._waited(),
            arrived_ranks=finding.arrived,
            missing_ranks=finding.missing,
            missing_names=finding.missing_names,
            possibly_missing_ranks=finding.possibly_missing,
            unidentified_count=finding.unidentified,
            signed_twice_ranks=finding.signed_twice,
        )

    def _stale(self, place: int) -> None:
        self._emit(
            names.BARRIER_STALE_KEY,
            arrived_count=place,
            signed_twice_ranks=list(
                look(self._store, self._keys, self._world_size).signed_twice
            ),
        )

    def _end(
        self,
        result: Result,
        error: Exception | None = None,
        last_rank: int | None = None,
        place: int = 0,
    ) -> None:
        RECORDER.barriers.released(self._token)
        RECORDER.barriers.ended(
            self._family, result, time.perf_counter_ns() - self._started
        )
        if result == "completed":
            self._emit(names.BARRIER_COMPLETED, last_rank=last_rank, place=place)
        elif result == "failed" and error is not None:
            self._emit(
                names.BARRIER_FAILED,
                error_type=error_type(error),
                error=error_message(error),
            )

    def _waited(self) -> float:
        return (time.perf_counter_ns() - self._started) / 1e9

    def _emit(self, event: str, **facts: Any) -> None:
        _quietly(
            RECORDER.emit,
            event,
            barrier=printable(self._keys.prefix),
            barrier_family=self._family,
            **({} if self._rank is None else {"rank": self._rank}),
            world_size=self._world_size,
            waited_seconds=round(self._waited(), 6),
            **facts,
        )


def after_fork() -> None:
    """Be the child's: nothing watched, nobody registered."""
    WATCH.forget()
    ranks.forget()


def _last_rank(written: bytes) -> int | None:
    """Read who came last; plain torch's last rank does not say."""
    try:
        found = json.loads(written)
        rank = found["rank"]
    except (ValueError, TypeError, KeyError):
        return None
    return rank if isinstance(rank, int) else None


def _quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do something that the barrier can do without."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        RECORDER.failures.add(names.BARRIERS, error)
        return None
