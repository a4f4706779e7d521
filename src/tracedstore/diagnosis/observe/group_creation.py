"""The creation of a process group: gloo's addresses, and the file of a FileStore.

gloo connects every two ranks after they exchanged their addresses. No Store call is in
flight then, so the diagnosis of blocked calls does not see it.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tracedstore import names
from tracedstore.common.election import first_of
from tracedstore.common.errors import error_message
from tracedstore.common.identity import bottom_of, process_identity
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.timeouts import run_with_timeout, start_bounded_thread
from tracedstore.coordination.connections import bare_store, side_connection
from tracedstore.diagnosis.ask.claims import Claim, claim
from tracedstore.diagnosis.connection import file_store
from tracedstore.diagnosis.judgement import stalled
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe import gloo_addresses, incarnations
from tracedstore.diagnosis.observe import group_stamps as stamps
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER, Watch

_READ_TIMEOUT = 2.0
_guarded = partial(RECORDER.failures.guarded, names.DIAGNOSIS)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupCreation:
    """A process group that is being created.

    Attributes:
        store: The store given to it.
        name: Its name.
        size: The number of its ranks.
        rank: The rank of this process in the group.
        ranks: Its global ranks in order, empty for the default group.
        claimed: The claim of this process to report two jobs in one store.
    """

    store: Any
    name: str
    size: int
    rank: int
    ranks: tuple[int, ...] = ()
    verdict: Verdict | None = None
    claimed: Claim | None = None
    started: float = field(default_factory=time.monotonic)

    def stamp(self) -> None:
        """Stamp the keys that this rank is about to write."""
        with RECORDER.unrecorded():
            stamps.write(bottom_of(self.store), self.name, self._own_rank())

    def look(self) -> None:
        """Check the addresses that gloo's ranks have published."""
        with RECORDER.unrecorded(), side_connection(self.store) as connection:
            prefix = gloo_addresses.key_prefix(self.name)
            found = gloo_addresses.read(connection, prefix, self.size)
        verdict = gloo_addresses.check_loopback(
            found, f"connecting gloo's ranks of group {self.name}", self._members()
        )
        if verdict is not None:
            self._set_verdict(verdict)

    def look_and_report(self) -> None:
        """Look for stale keys and bad addresses; emit `job.stalled` if there are some.

        The first rank of the group reports, and the first one with a bad address. Of
        ranks with stale keys none may run, so the first of the others reports.
        """
        # The store's failures are not failures of the telemetry.
        with suppress(RuntimeError, OSError):
            self._look_for_stale_keys()
            if self.verdict is None:
                self.look()
        verdict = self.verdict
        if verdict is None:
            return
        members = self.ranks or range(self.size)
        reporters = {
            *first_of(members, reporters=1),
            *first_of(verdict.awaited_ranks, reporters=1),
        }
        if verdict.cause == "too_many":
            # The first rank may be the other job's: one process of a host reports.
            run_id = process_identity().run_id
            self.claimed = self.claimed or claim(f"{run_id}/{self.name}/too_many")
            reporters = {self._own_rank()} if self.claimed is not None else set()
        elif verdict.cause == "stale":
            reporters = set(
                first_of(members, without=verdict.awaited_ranks, reporters=1)
            )
        if self._own_rank() in reporters:
            stalled.report(self, verdict)

    def _set_verdict(self, verdict: Verdict) -> None:
        self.verdict = replace(
            verdict,
            # What the others do is not known.
            waiting_ranks=verdict.waiting_ranks or (self._own_rank(),),
            waited_seconds=time.monotonic() - self.started,
        )

    def _members(self) -> Mapping[int, int]:
        return dict(enumerate(self.ranks))

    def _own_rank(self) -> int:
        return self._members().get(self.rank, self.rank)

    def _look_after_failure(self) -> None:
        """Look for keys of an earlier attempt, and for addresses that cannot work."""
        with suppress(RuntimeError, OSError):
            run_with_timeout(_READ_TIMEOUT, self._look_for_stale_keys)
            if self.verdict is None:
                run_with_timeout(_READ_TIMEOUT, self.look)
        if self.verdict is not None:
            stalled.report(self, self.verdict)

    def _look_for_stale_keys(self) -> None:
        with RECORDER.unrecorded(), side_connection(bottom_of(self.store)) as store:
            members = self.ranks or tuple(range(self.size))
            verdict = stamps.find_stale(store, self.name, members)
            jobs = incarnations.jobs_in(
                incarnations.read_replacements(store), process_identity().run_id
            )
        if jobs:
            phase = stamps.phase_of(self.name)
            verdict = incarnations.shared_store(
                verdict or Verdict(phase=phase, cause="unknown", time=time.time()), jobs
            )
        if verdict is not None:
            self._set_verdict(verdict)

    def add_note(self, error: Exception) -> None:
        """Add to an exception what torch's text does not contain."""
        if self.verdict is None and "connect" in error_message(error).lower():
            self._look_after_failure()
        if self.verdict is not None:
            note = f"tracedstore: {self.verdict.describe()}"
            # The Store call that failed may have come to the same verdict.
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        bottom = bare_store(self.store)
        if type(bottom).__name__ == "FileStore":
            text = file_store.describe_wait(bottom.path, self.size)
            error.add_note(f"tracedstore: {text}")


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

    if creation.rank >= 0:
        _guarded(creation.stamp)
    watch = Watch(names.DIAGNOSIS, report, after)
    if math.isfinite(after):
        _guarded(WATCHER.add, watch)
    try:
        yield
    except Exception as error:
        if not raised_by_handler(error):
            _guarded(creation.add_note, error)
        _guarded(stalled.failed, creation)
        raise
    finally:
        WATCHER.remove(watch)
    if creation.verdict is not None:
        waited = time.monotonic() - creation.started
        ended = replace(creation.verdict, waited_seconds=waited)
        _guarded(stalled.resumed, creation, ended)
