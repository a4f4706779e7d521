"""Counts of the requests to etcd's v3 API, over all stores of this process."""

import threading
from collections import Counter
from typing import Literal

RequestResult = Literal["ok", "failed", "unknown"]
Recovery = Literal["retry", "failover", "watch_restart", "log_in"]
RESULTS: tuple[RequestResult, ...] = ("ok", "failed", "unknown")
RECOVERIES: tuple[Recovery, ...] = ("retry", "failover", "watch_restart", "log_in")


class EtcdStats:
    """Requests by method and result, what was done about failures, and bytes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._lock = threading.RLock()
        self._requests: Counter[tuple[str, RequestResult]] = Counter()
        self._recoveries: Counter[Recovery] = Counter()
        self._bytes: Counter[str] = Counter()

    def add_request(
        self, method: str, result: RequestResult, *, sent: int, received: int
    ) -> None:
        """Count a request and the bytes of its messages."""
        with self._lock:
            self._requests[method, result] += 1
            self._bytes["sent"] += sent
            self._bytes["received"] += received

    def add_recovery(self, kind: Recovery) -> None:
        """Count a step that a failure made necessary."""
        with self._lock:
            self._recoveries[kind] += 1

    def requests(self) -> dict[tuple[str, RequestResult], int]:
        """Return the requests by method and result, with zeros."""
        with self._lock:
            methods = dict.fromkeys(method for method, _ in self._requests)
            return {
                (method, result): self._requests[method, result]
                for method in methods
                for result in RESULTS
            }

    def recoveries(self) -> dict[Recovery, int]:
        """Return the steps by kind; empty if there was no request."""
        with self._lock:
            if not self._requests:
                return {}
            return {kind: self._recoveries[kind] for kind in RECOVERIES}

    def bytes(self) -> dict[str, int]:
        """Return the bytes of all messages by direction."""
        with self._lock:
            return dict(self._bytes)
