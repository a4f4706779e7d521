"""Stores that are written in Python: what they take and return is their affair."""

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
    """As little of an Exception as a KeyboardInterrupt."""


class Minimal(Store):
    """No more than some user needs, under parameter names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}

    def set(self, name: str, content: str | bytes) -> None:
        """Keep it."""
        self.data[name] = content if isinstance(content, bytes) else content.encode()

    def get(self, name: str) -> bytes:
        """Give it, or fail as a dict does."""
        return self.data[name]

    def check(self, names: list[str]) -> bool:
        """Tell whether all are there."""
        return all(name in self.data for name in names)


class PythonSpelling(Minimal):
    """Has the two methods under the names that Python callers use."""

    def delete_key(self, name: str) -> bool:
        """Drop it."""
        return self.data.pop(name, None) is not None

    def num_keys(self) -> int:
        """Count them."""
        return len(self.data)


class CppSpelling(Minimal):
    """Has them under the names that torch's C++ looks for."""

    deleteKey = PythonSpelling.delete_key  # noqa: N815 - torch's spelling
    getNumKeys = PythonSpelling.num_keys  # noqa: N815 - torch's spelling


class BothSpellings(PythonSpelling, CppSpelling):
    """Has them under both."""


class Odd(Minimal):
    """Returns other types than torch's own stores do."""

    def get(self, name: str) -> Any:
        """Give a str where bytes are due."""
        return self.data[name].decode()

    def check(self, names: list[str]) -> Any:
        """Give a number where a bool is due."""
        return len(names)

    def multi_get(self, names: list[str]) -> Any:
        """Give a tuple of str where a list of bytes is due."""
        return tuple(self.data[name].decode() for name in names)

    def add(self, name: str, number: int) -> Any:
        """Give text where a number is due."""
        return f"{name} {number}"

    def wait(self, names: list[str], patience: timedelta = MINUTE) -> Any:
        """Give something where nothing is due."""
        return names, patience


class WithOptions(Minimal):
    """Takes more than torch's Store does, by keyword."""

    seen: Any = None

    def set_timeout(self, timeout: timedelta, *, reason: str = "") -> None:
        """Note why."""
        super().set_timeout(timeout)
        self.seen = reason

    def has_extended_api(self, *, reason: str = "") -> bool:
        """Note why."""
        self.seen = reason
        return True

    def clone(self, *, reason: str = "") -> Store:
        """Note why, and give another one."""
        self.seen = reason
        return WithOptions()

    def statistics(self, *, verbose: bool = False) -> dict[str, int]:
        """Something that torch's Store does not have."""
        return {"keys": len(self.data)} if verbose else {}


class TestSpelling:
    """delete_key is deleteKey to C++, and num_keys is getNumKeys."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        "kind", [Minimal, PythonSpelling, CppSpelling, BothSpellings]
    )
    def test_of_the_store_decides(self, kind: Callable[[], Store], shape: str) -> None:
        """A caller finds the method, or fails to, as with the bare store."""
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
        """Through a PrefixStore the C++ spelling reaches the user's store."""
        above = PrefixStore("p", wrap(kind()))
        above.set("k", "v")

        assert above.num_keys() == 1
        assert above.delete_key("k")
        assert not above.check(["k"])


class TestResults:
    """Whatever a store returns."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_of_odd_type_end_the_same(self, shape: str) -> None:
        """Python callers get it as it is; C++ refuses or converts it as ever."""
        steps = [
            call("set", "k", b"v"),
            call("get", "k"),
            call("check", ["k"]),
            call("multi_get", ["k"]),
            call("add", "k", 1),
            call("wait", ["k"]),
            call("wait", ["k"], SHORT),
        ]
        bare, inner = Odd(), Odd()

        expected = outcomes(steps, SHAPES[shape].bare(bare))

        assert outcomes(steps, SHAPES[shape].wrapped(inner)) == expected

    def test_is_the_very_object(self) -> None:
        """A result is passed on, not copied."""
        inner = Minimal()
        value = bytes(range(256))
        inner.set("k", value)

        assert value is wrap(inner).get("k")


class TestExceptions:
    """Whatever a store raises."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize(
        "error",
        [
            ConnectionError("gone"),
            DistStoreError("wait timeout after 1ms"),
            LookupError("no such key"),
            KeyboardInterrupt(),
            Interrupt("not even an Exception"),
            StopIteration(1),
        ],
        ids=repr,
    )
    def test_is_the_very_object(self, error: BaseException, shape: str) -> None:
        """An exception reaches the caller as itself, through C++ too."""
        flaky = FlakyStore()
        flaky.fail("get", error)
        store = SHAPES[shape].wrapped(flaky)

        with pytest.raises(type(error)) as caught:
            store.get("k")

        assert error is caught.value

    def test_leaves_store_usable(self) -> None:
        """The call after one that failed is an ordinary one."""
        flaky = FlakyStore()
        store = wrap(flaky)
        flaky.fail("set", ConnectionError("gone"))

        with pytest.raises(ConnectionError):
            store.set("k", "lost")
        store.set("k", "kept")

        assert store.get("k") == b"kept"


class TestKeywords:
    """Keyword arguments are the inner store's to name."""

    @pytest.mark.parametrize(
        "kind", [pytest.param("etcd", marks=pytest.mark.etcd)], indirect=True
    )
    def test_of_etcd_store(self, make: Make) -> None:
        """EtcdStore takes all of its arguments by keyword, wrapped as well."""
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
        """Names that torch does not use are passed on."""
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
    def test_beyond_torch_reach_store(
        self, method: str, arguments: dict[str, Any]
    ) -> None:
        """Options that torch's Store does not have reach the store that does."""
        inner = WithOptions()

        getattr(wrap(inner), method)(**arguments, reason="a test")

        assert inner.seen == "a test"

    def test_of_method_of_its_own(self) -> None:
        """A method that no Store has is there, and takes what it takes."""
        store: Any = wrap(WithOptions())
        store.set("k", b"v")

        assert store.statistics(verbose=True) == {"keys": 1}
