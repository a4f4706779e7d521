"""Stores written in Python: the wrapper passes arguments and results unchanged."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore, Store

from contract.harness import SHAPES, Make, call, outcomes
from contract.scenarios import MINUTE
from support.stores import SHORT
from tracedstore import wrap
from tracedstore.testing import FlakyStore


class Interrupt(BaseException):
    """A BaseException that is no Exception, as KeyboardInterrupt is."""


class Minimal(Store):
    """A user's store with three methods and other parameter names than torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}

    def set(self, name: str, content: str | bytes) -> None:
        """Store the content as bytes."""
        self.data[name] = content if isinstance(content, bytes) else content.encode()

    def get(self, name: str) -> bytes:
        """Return the content, or raise KeyError."""
        return self.data[name]

    def check(self, names: list[str]) -> bool:
        """Return whether all names are present."""
        return all(name in self.data for name in names)


class PythonSpelling(Minimal):
    """Has delete_key and num_keys under the names that Python callers use."""

    def delete_key(self, name: str) -> bool:
        """Delete the name, and return whether it was present."""
        return self.data.pop(name, None) is not None

    def num_keys(self) -> int:
        """Return the number of names."""
        return len(self.data)


class CppSpelling(Minimal):
    """Has delete_key and num_keys under the names that torch's C++ calls."""

    deleteKey = PythonSpelling.delete_key  # noqa: N815 - torch's spelling
    getNumKeys = PythonSpelling.num_keys  # noqa: N815 - torch's spelling


class BothSpellings(PythonSpelling, CppSpelling):
    """Has delete_key and num_keys under both names."""


class UnexpectedTypes(Minimal):
    """Returns other types than torch's own stores do."""

    def get(self, name: str) -> Any:
        """Return a str instead of bytes."""
        return self.data[name].decode()

    def check(self, names: list[str]) -> Any:
        """Return a number instead of a bool."""
        return len(names)

    def multi_get(self, names: list[str]) -> Any:
        """Return a tuple of str instead of a list of bytes."""
        return tuple(self.data[name].decode() for name in names)

    def add(self, name: str, number: int) -> Any:
        """Return text instead of a number."""
        return f"{name} {number}"

    def wait(self, names: list[str], limit: timedelta = MINUTE) -> Any:
        """Return its arguments instead of None."""
        return names, limit


class WithOptions(Minimal):
    """Has keyword arguments that torch's Store lacks."""

    last_reason: Any = None

    def set_timeout(self, timeout: timedelta, *, reason: str = "") -> None:
        """Set the timeout and record the reason."""
        super().set_timeout(timeout)
        self.last_reason = reason

    def has_extended_api(self, *, reason: str = "") -> bool:
        """Return True and record the reason."""
        self.last_reason = reason
        return True

    def clone(self, *, reason: str = "") -> Store:
        """Return a new store and record the reason."""
        self.last_reason = reason
        return WithOptions()

    def statistics(self, *, verbose: bool = False) -> dict[str, int]:
        """Return counts, with a method that torch's Store lacks."""
        return {"keys": len(self.data)} if verbose else {}


class TestSpelling:
    """C++ calls delete_key deleteKey, and num_keys getNumKeys."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        "kind", [Minimal, PythonSpelling, CppSpelling, BothSpellings]
    )
    def test_has_same_outcome(self, kind: Callable[[], Store], shape: str) -> None:
        """Each spelling works or fails as it does with the bare store."""
        steps = [
            call("set", "k", "v"),
            call("num_keys"),
            call("delete_key", "k"),
            call("check", ["k"]),
            call("delete_key", "k"),
        ]
        bare, inner = kind(), kind()

        expected = outcomes(steps, SHAPES[shape].bare(bare))

        assert outcomes(steps, SHAPES[shape].wrapped(inner)) == expected

    @pytest.mark.parametrize("kind", [CppSpelling, BothSpellings])
    def test_for_cpp_works_under_prefix_store(self, kind: Callable[[], Store]) -> None:
        """A PrefixStore calls the C++ spelling of the user's store."""
        above = PrefixStore("p", wrap(kind()))
        above.set("k", "v")

        assert above.num_keys() == 1
        assert above.delete_key("k")
        assert not above.check(["k"])


class TestResults:
    """Results of a Python store."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_of_unexpected_type_have_same_outcome(self, shape: str) -> None:
        """Python callers get the result unchanged; C++ rejects or converts it."""
        steps = [
            call("set", "k", b"v"),
            call("get", "k"),
            call("check", ["k"]),
            call("multi_get", ["k"]),
            call("add", "k", 1),
            call("wait", ["k"]),
            call("wait", ["k"], SHORT),
        ]
        bare, inner = UnexpectedTypes(), UnexpectedTypes()

        expected = outcomes(steps, SHAPES[shape].bare(bare))

        assert outcomes(steps, SHAPES[shape].wrapped(inner)) == expected

    def test_are_not_copied(self) -> None:
        """The caller gets the object that the store returned."""
        inner = Minimal()
        value = bytes(range(256))
        inner.set("k", value)

        assert value is wrap(inner).get("k")


class TestExceptions:
    """Exceptions of a Python store."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        "error",
        [
            ConnectionError("connection lost"),
            DistStoreError("wait timeout after 1ms"),
            LookupError("no such key"),
            KeyboardInterrupt(),
            Interrupt("not even an Exception"),
            StopIteration(1),
        ],
        ids=repr,
    )
    def test_are_not_replaced(self, error: BaseException, shape: str) -> None:
        """The caller gets the exception object that the store raised, via C++ too."""
        flaky = FlakyStore()
        flaky.fail("get", error)
        store = SHAPES[shape].wrapped(flaky)

        with pytest.raises(type(error)) as caught:
            store.get("k")

        assert error is caught.value

    def test_leave_store_usable(self) -> None:
        """A call after a failed call succeeds."""
        flaky = FlakyStore()
        store = wrap(flaky)
        flaky.fail("set", ConnectionError("connection lost"))

        with pytest.raises(ConnectionError):
            store.set("k", "lost")
        store.set("k", "kept")

        assert store.get("k") == b"kept"


class TestKeywords:
    """Keyword arguments have the names of the inner store."""

    @pytest.mark.parametrize(
        "kind", [pytest.param("etcd", marks=pytest.mark.etcd)], indirect=True
    )
    def test_of_etcd_store(self, make: Make) -> None:
        """A wrapped EtcdStore accepts all of its arguments by keyword."""
        store: Any = wrap(make())

        store.set(value="v", key="k")
        store.wait(keys=["k"])
        store.wait(override_timeout=SHORT, keys=["k"])

        assert store.get(key="k") == b"v"
        assert store.add(num=3, key="n") == 3
        assert store.check(keys=["k", "n"])
        with pytest.raises(LookupError, match="Timeout while waiting for keys"):
            store.wait(keys=["missing"], override_timeout=SHORT)

    def test_of_python_store(self) -> None:
        """Parameter names that torch does not use reach the store."""
        store: Any = wrap(Minimal())

        store.set(content=b"v", name="k")

        assert store.get(name="k") == b"v"
        assert store.check(names=["k"])

    @pytest.mark.parametrize(
        ("method", "arguments"),
        [
            ("set_timeout", {"timeout": MINUTE}),
            ("has_extended_api", {}),
            ("clone", {}),
        ],
    )
    def test_that_torch_lacks_reach_store(
        self, method: str, arguments: dict[str, Any]
    ) -> None:
        """Keyword arguments that torch's Store lacks reach the inner store."""
        inner = WithOptions()

        getattr(wrap(inner), method)(**arguments, reason="a test")

        assert inner.last_reason == "a test"

    def test_of_method_that_torch_lacks(self) -> None:
        """A method that torch's Store lacks can be called with its arguments."""
        store: Any = wrap(WithOptions())
        store.set("k", b"v")

        assert store.statistics(verbose=True) == {"keys": 1}
