"""methods_of() for Store classes with more or fewer methods than the METHODS table."""

from typing import Any

import pytest
from torch.distributed import Store

from contract.scenarios import PUBLIC
from support.versions import STORE_BARRIER, TORCH
from tracedstore.recording.operation import METHODS
from tracedstore.recording.store_proxy import methods_of

NAMES = [method.name for method in METHODS]


def store_class(*names: str) -> Any:
    """Return a class with these methods and a property."""
    methods: dict[str, Any] = dict.fromkeys(names, lambda _self: None)
    return type("Synthetic", (), methods | {"timeout": property(lambda _self: None)})


class TestMethodsOf:
    """methods_of() returns the operations of a Store class with their indexes."""

    def test_omits_methods_the_class_lacks(self) -> None:
        """A method of the table that an older class lacks is not in the result."""
        older = [name for name in NAMES if name != "queue_push"]

        assert list(methods_of(store_class(*older))) == older

    def test_appends_methods_the_table_lacks(self) -> None:
        """A method of a newer class that the table lacks is last and has no keys."""
        methods = methods_of(store_class(*NAMES, "scan"))

        assert list(methods) == [*NAMES, "scan"]
        assert (
            methods["scan"].keys,
            methods["scan"].parameters,
            methods["scan"].blocks,
        ) == ("none", (), False)

    @pytest.mark.parametrize("names", [NAMES, NAMES[3:], [*NAMES, "scan", "watch"]])
    def test_indexes_are_dense(self, names: list[str]) -> None:
        """Indexes start at 0 and have no gaps."""
        methods = methods_of(store_class(*names))

        assert [m.index for m in methods.values()] == list(range(len(names)))

    def test_known_method_keeps_its_description(self) -> None:
        """Only the index of a known method differs from the table."""
        get = methods_of(store_class("get"))["get"]

        assert (get.parameters, get.keys, get.blocks) == (("key",), "one", True)

    @pytest.mark.parametrize(
        "name", ["_private", "__len__", "timeout", "set_timeout", "has_extended_api"]
    )
    def test_omits_what_is_no_operation(self, name: str) -> None:
        """Private names, properties and local accessors are not operations."""
        assert list(methods_of(store_class("get", name))) == ["get"]

    def test_table_covers_this_torch(self) -> None:
        """The table has every operation of the installed torch."""
        local_accessors = {"timeout", "set_timeout", "has_extended_api"}

        assert set(methods_of(Store)) == set(PUBLIC) - local_accessors
        later = {"barrier": STORE_BARRIER}
        assert set(methods_of(Store)) == {
            name for name in NAMES if later.get(name, TORCH) <= TORCH
        }
