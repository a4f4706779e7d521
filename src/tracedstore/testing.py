"""Helpers for testing code that uses traced stores.

>>> from tracedstore import configure, wrap
>>> from tracedstore.testing import FakeClock, FlakyStore, OperationLog
>>> clock, log = FakeClock(), OperationLog()
>>> configure(clock=clock.clock, observers=[log], log_format="off", slow_after=0)
>>> flaky = FlakyStore()
>>> store = wrap(flaky)
>>> store.set("greeting", "hello")
>>> flaky.fail("get", ConnectionError("gone"))
>>> store.get("greeting")
Traceback (most recent call last):
ConnectionError: gone
>>> [(o.method.name, o.error_type) for o in log.operations]
[('set', ''), ('get', 'ConnectionError')]
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

from torch.distributed import HashStore, Store

from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import Clock
from tracedstore.recording.store_proxy import RECORDED

__all__ = ["FakeClock", "FlakyStore", "OperationLog"]


class FakeClock:
    """A clock that stands still until it is advanced.

    Attributes:
        clock: The argument for ``configure(clock=...)``.
    """

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self._ticks = 0
        self._wall = int(wall * 1e9)
        self.clock = Clock(ticks=lambda: self._ticks, wall=lambda: self._wall)

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self._ticks += int(seconds * 1e9)
        self._wall += int(seconds * 1e9)

    def set_back(self, seconds: float) -> None:
        """Set the time of day back; the monotonic time stays."""
        self._wall -= int(seconds * 1e9)


class OperationLog:
    """An observer that keeps operations.

    Attributes:
        operations: The operations, in order.
    """

    name = "operation_log"

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def observe(self, operation: Operation) -> None:
        """Keep the operation."""
        self.operations.append(operation)


class FlakyStore(Store):
    """A Store in Python that forwards to another one, and fails on request."""

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__()
        self._inner = cast("Any", HashStore() if inner is None else inner)
        self.set_timeout(self._inner.timeout)
        self._actions: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)

    def fail(self, method: str, error: BaseException, times: int = 1) -> None:
        """Raise an error in the next calls of a method."""

        def raise_it() -> None:
            raise error

        self.before(method, raise_it, times)

    def before(self, method: str, action: Callable[[], None], times: int = 1) -> None:
        """Run an action in the next calls of a method, before the forwarded call."""
        self._actions[method].extend([action] * times)


def _flaky(name: str) -> Callable[..., Any]:
    def method(self: FlakyStore, *args: Any, **kwargs: Any) -> Any:
        actions = self._actions[name]
        if actions:
            actions.popleft()()
        # torch's C++ may have set the timeout of this store only.
        self._inner.set_timeout(self.timeout)  # type: ignore[attr-defined]
        return getattr(self._inner, name)(*args, **kwargs)

    return method


for _name in RECORDED:
    setattr(FlakyStore, _name, _flaky(_name))
for _spelling, _name in (("deleteKey", "delete_key"), ("getNumKeys", "num_keys")):
    setattr(FlakyStore, _spelling, _flaky(_name))
setattr(FlakyStore, "has_extended_api", _flaky("has_extended_api"))  # noqa: B010
