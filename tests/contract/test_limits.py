"""Known limits of the Python base: calls that torch's C++ does not forward to Python.

Each test asserts what happens instead, and the workaround where one exists.
"""

from typing import Any

import pytest
from torch.distributed import PrefixStore

import tracedstore
from contract.harness import Make, call
from contract.scenarios import MINUTE
from support.versions import needs_store_barrier
from tracedstore import wrap
from tracedstore.testing import OperationLog

# The native base has none of these limits: see test_native.
pytestmark = pytest.mark.parametrize("core", ["python"], indirect=True)

# These bare stores are C++ only, so they do not have these limits.
CPP_KINDS = ["tcp", "tcp-legacy", "file", "hash"]


@pytest.fixture
def log() -> OperationLog:
    """Record the operations of all wrappers."""
    log = OperationLog()
    tracedstore.configure(observers=[log], slow_after=0, log_format="off")
    return log


def recorded(log: OperationLog) -> list[str]:
    """Return the names of the operations recorded so far."""
    return [operation.method.name for operation in log.operations]


class TestNeverReachesPython:
    """Queue methods and list_keys() of a PrefixStore above a wrapper."""

    @pytest.mark.parametrize(
        ("step", "text"),
        [
            (call("queue_push", "q", "v"), "queue support is not implemented."),
            (call("queue_pop", "q"), "queue support is not implemented."),
            (call("queue_len", "q"), "queue support is not implemented."),
            (call("list_keys"), "listKeys support is not implemented."),
        ],
    )
    def test_raises_not_implemented(
        self, make: Make, log: OperationLog, step: Any, text: str
    ) -> None:
        """The call raises NotImplementedError at once; no wrapper records it."""
        above = PrefixStore("p", wrap(make()))

        with pytest.raises(NotImplementedError) as caught:
            step(above)

        assert str(caught.value) == text
        assert recorded(log) == []

    @pytest.mark.parametrize("kind", ["tcp", "hash"], indirect=True)
    def test_works_with_wrapper_outside(self, make: Make) -> None:
        """Wrapping the PrefixStore instead of the store below supports queues."""
        store: Any = wrap(PrefixStore("p", make()))

        store.queue_push("q", "v")

        assert store.queue_pop("q") == b"v"

    @pytest.mark.parametrize("kind", ["tcp", "hash"], indirect=True)
    def test_lists_keys_with_wrapper_outside(self, make: Make) -> None:
        """Wrapping the PrefixStore instead of the store below supports list_keys."""
        store: Any = wrap(PrefixStore("p", make()))

        store.set("k", "v")

        assert "k" in store.list_keys()


@needs_store_barrier
class TestBarrierFromCpp:
    """barrier() of a PrefixStore above a wrapper."""

    def test_is_recorded_as_its_parts(self, make: Make, log: OperationLog) -> None:
        """C++ implements it with add, set and wait, which are recorded."""
        above: Any = PrefixStore("p", wrap(make()))

        above.barrier("b", 1)

        assert recorded(log) == ["add", "set", "wait"]

    def test_is_recorded_with_wrapper_outside(
        self, make: Make, log: OperationLog
    ) -> None:
        """A wrapper of the PrefixStore records a barrier."""
        store: Any = wrap(PrefixStore("p", make()))

        store.barrier("b", 1)

        assert recorded(log) == ["barrier"]


class TestTimeoutFromCpp:
    """set_timeout() of a PrefixStore above a wrapper."""

    def test_reaches_inner_store_with_next_blocking_call(self, make: Make) -> None:
        """The inner store's timeout changes with the next blocking call."""
        inner = make()
        above: Any = PrefixStore("p", wrap(inner))
        before = inner.timeout
        above.set("k", "v")

        above.set_timeout(MINUTE)
        above.check(["k"])
        after_check = inner.timeout
        above.get("k")

        assert [after_check, inner.timeout] == [before, MINUTE]


class TestUndecodableKeyFromCpp:
    """A key that is not UTF-8 on a PrefixStore above a wrapper."""

    KEY = b"\xff"

    @pytest.mark.parametrize(
        "step",
        [
            call("set", KEY, "v"),
            call("add", KEY, 1),
            call("check", [KEY]),
            call("get", KEY),
            call("delete_key", KEY),
        ],
    )
    def test_raises_decode_error(self, make: Make, step: Any) -> None:
        """C++ converts keys to str for Python, which fails for this one."""
        above = PrefixStore("p", wrap(make()))

        with pytest.raises(UnicodeDecodeError, match="can't decode byte 0xff"):
            step(above)

    @pytest.mark.parametrize("kind", CPP_KINDS, indirect=True)
    def test_works_without_cpp_above_wrapper(self, make: Make) -> None:
        """The bare store and a wrapper called from Python accept such a key."""
        bare: Any = PrefixStore("p", make())
        direct: Any = wrap(make())
        outside: Any = wrap(PrefixStore("p", make()))

        for store in (bare, direct, outside):
            store.set(self.KEY, "v")

        values = [store.get(self.KEY) for store in (bare, direct, outside)]
        assert values == [b"v"] * 3


class TestBothSpellings:
    """C++ and Python use different names for two methods."""

    @pytest.mark.parametrize("kind", CPP_KINDS, indirect=True)
    def test_wrapper_has_both(self, make: Make) -> None:
        """A wrapper has deleteKey and getNumKeys, which the bare store lacks."""
        inner = make()
        store: Any = wrap(inner)
        keys = store.num_keys()
        store.set("k", "v")

        assert not hasattr(inner, "deleteKey")
        assert not hasattr(inner, "getNumKeys")
        assert store.getNumKeys() == keys + 1
        assert store.deleteKey("k")
        assert not store.check(["k"])
