"""Reads who is missing at a barrier, while a rank waits and after its timeout."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from tracedstore.common import election
from tracedstore.common.timeouts import run_with_timeout
from tracedstore.coordination.arrivals import (
    confirm_arrival,
    read_arrivals,
    read_key,
)
from tracedstore.coordination.barrier_telemetry import guarded
from tracedstore.coordination.missing_report import Examine, MissingReport
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.coordination.rank_registry import registry_decoder
from tracedstore.naming import decoders
from tracedstore.recording.recorder import RECORDER

# How many of the first ranks to arrive read who is missing.
READERS: Final = election.REPORTERS
# Seconds that reading may take: the store may be gone, or hang. The verdict is due
# within 5 s of the timeout.
READ_TIMEOUT: Final = 4.0
# Seconds between reads while ranks that were counted have not written their names.
_READ_INTERVAL = 0.1
# Seconds that the other ranks wait for the readers' report.
_REPORT_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReader:
    """Reads who is missing, for one rank that has arrived.

    Attributes:
        keys: The keys of the barrier.
        rank: The rank, where it is known.
        world_size: Number of ranks.
        order: The position of its arrival, from 1; 0 if it is unknown.
        decoder: Returns the name of a rank, where the caller gave one.
        trace_timeout: Seconds for ranks that arrived without a name to write it.
        examine: Finds out why ranks do not arrive.
    """

    keys: BarrierKeys
    rank: int | None
    world_size: int
    order: int
    decoder: Callable[[int], str] | None
    trace_timeout: float
    examine: Examine

    def read(self, store: Any) -> MissingReport:
        """Return who is missing and why, where that is known for certain."""
        report = self._read(store)
        if not report.missing_ranks:
            return report
        with RECORDER.unrecorded():
            findings = guarded(
                self.examine, store, report.missing_ranks, self.world_size
            )
        return report.with_findings(findings or {})

    def read_after_timeout(self, store: Any) -> MissingReport:
        """Return who is missing, from another rank's report or by reading."""
        with RECORDER.no_call_spans():
            if self.rank is not None:
                confirm_arrival(store, self.keys, self.rank)
                if store.has_extended_api():
                    # Plain torch's rank 0 reads this key. Other stores have it already.
                    store.set(self.keys.trace(self.rank), "here")
            if self.order > READERS and self._name_timeout:
                # The first ranks to arrive time out first, or at about the same time.
                report_timeout = min(_REPORT_TIMEOUT, self._name_timeout)
                with suppress(Exception):
                    store.wait(
                        [self.keys.missing_report], timedelta(seconds=report_timeout)
                    )
                published = self._published(store)
                if published is not None:
                    return published
            return self.read(store)

    def wait_for_names(self, store: Any, report: MissingReport) -> MissingReport:
        """Read again while ranks that were counted have not written their names."""
        deadline = time.monotonic() + self._name_timeout
        while report.unidentified_count and time.monotonic() < deadline:
            time.sleep(_READ_INTERVAL)
            report = run_with_timeout(READ_TIMEOUT, partial(self._read, store))
        return report

    @property
    def _name_timeout(self) -> float:
        """Seconds for ranks that arrived without a name to write it.

        Where this rank has no name either, torch's barrier does not wait, nor does
        this one.
        """
        return 0.0 if self.rank is None else self.trace_timeout

    def _published(self, store: Any) -> MissingReport | None:
        """Return another rank's report, if no rank has arrived since."""
        if not store.check([self.keys.missing_report]):
            return None
        written = read_key(store, self.keys.missing_report)
        report = MissingReport.from_bytes(written, self.world_size)
        if report is None or report.unidentified_count:
            return None
        if self.rank in report.missing_ranks:
            return None
        if report.arrived_count != store.add(self.keys.num_members, 0):
            return None
        return report if self.decoder is None else report.with_names(self.decoder)

    def _read(self, store: Any) -> MissingReport:
        arrivals = read_arrivals(store, self.keys, self.world_size)
        if arrivals.arrived_count < self.order:
            # The server restarted without its data, or the file was truncated. Ranks
            # whose arrival is gone must not be named: this one is among them.
            return MissingReport.unknown(self.world_size)
        decoder = self._decoder_for(store, arrivals.unseen_ranks)
        return MissingReport.from_arrivals(arrivals, self.world_size, decoder)

    def _decoder_for(self, store: Any, missing: tuple[int, ...]) -> decoders.Decoder:
        if self.decoder is not None:
            return self.decoder
        registered = guarded(registry_decoder, store, missing)
        roster = decoders.auto()
        return roster if registered is None else decoders.chain(registered, roster)
