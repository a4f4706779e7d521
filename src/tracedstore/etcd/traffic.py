"""Counts the requests of one etcd v3 client, by the thread that makes them."""

from tracedstore.etcd.attempt_counts import AttemptCounter
from tracedstore.recording.etcd_stats import Recovery, RequestResult
from tracedstore.recording.operation import EtcdRequest
from tracedstore.recording.recorder import RECORDER

# Requests of one call that its span shows.
_MAX_REQUESTS_SHOWN = 16


class Traffic(AttemptCounter):
    """The requests of a client: the `Probe` of a store, and the process's metrics."""

    def add_request(
        self,
        method: str,
        server: str,
        result: RequestResult,
        started: int,
        *,
        sent: int,
        received: int = 0,
    ) -> None:
        """Count a request that has ended.

        Args:
            method: The method, for example ``kv/range``.
            server: The member that it was sent to.
            result: What became of it.
            started: When it was sent, in ticks.
            sent: Bytes of the request.
            received: Bytes of the answer.
        """
        name = method.rpartition("/")[2]
        if RECORDER.on:
            RECORDER.etcd.add_request(name, result, sent=sent, received=received)
        counts = self.current()
        if counts is None:
            return
        counts.requests += 1
        if len(counts.shown) < _MAX_REQUESTS_SHOWN:
            duration = RECORDER.ticks() - started
            request = EtcdRequest(
                name, server, result, RECORDER.clock.wall_of(started), duration
            )
            counts.shown.append(request)

    def add_recovery(self, kind: Recovery) -> None:
        """Count a step that a failure made necessary."""
        if RECORDER.on:
            RECORDER.etcd.add_recovery(kind)
        counts = self.current()
        if counts is not None:
            counts.recoveries += 1

    def add_swap(self, *, won: bool) -> None:
        """Count a compare-and-set that the store makes by itself."""
        counts = self.current()
        if counts is not None:
            counts.swaps_won += won
            counts.swaps_lost += not won

    def add_watch_timeout(self) -> None:
        """Count a watch that ended without a change."""
        counts = self.current()
        if counts is not None:
            counts.watch_timeouts += 1
