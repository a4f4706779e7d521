"""A Store class with more or fewer methods than the table."""

from typing import Any

import pytest
from torch.distributed import Store

from contract.scenarios import PUBLIC
from tracedstore.core.operation import METHODS
from tracedstore.core.store_proxy import methods_of

NAMES = [method.name for method in METHODS]


def store_class(*names: str) -> Any:
    """A class with these methods, and a property."""
    methods: dict[str, Any] = dict.fromkeys(names, lambda _self: None)
    return type("Synthetic", (), methods | {"timeout": property(lambda _self: None)})


class TestMethodsOf:
    """The operations of a Store class, numbered."""

    def test_older_class_has_fewer(self) -> None:
        """What the class does not have is not there."""
        older = [name for name in NAMES if name != "queue_push"]

        assert list(methods_of(store_class(*older))) == older

    def test_newer_class_has_more(self) -> None:
        """What the table does not know comes last, and without keys."""
        methods = methods_of(store_class(*NAMES, "scan"))

        assert list(methods) == [*NAMES, "scan"]
        assert (
            methods["scan"].keys,
            methods["scan"].parameters,
            methods["scan"].blocks,
        ) == ("none", (), False)

    @pytest.mark.parametrize("names", [NAMES, NAMES[3:], [*NAMES, "scan", "watch"]])
    def test_numbers_are_dense(self, names: list[str]) -> None:
        """The numbers are places in a row, without a gap."""
        methods = methods_of(store_class(*names))

        assert [m.index for m in methods.values()] == list(range(len(names)))

    def test_known_method_keeps_its_facts(self) -> None:
        """Apart from its number a method is as the table has it."""
        get = methods_of(store_class("get"))["get"]

        assert (get.parameters, get.keys, get.blocks) == (("key",), "one", True)

    @pytest.mark.parametrize(
        "name", ["_private", "__len__", "timeout", "set_timeout", "has_extended_api"]
    )
    def test_no_operation(self, name: str) -> None:
        """What is private, a property or answered on the spot is no operation."""
        assert list(methods_of(store_class("get", name))) == ["get"]

    def test_of_this_torch(self) -> None:
        """The table knows every operation of the torch it is tested with."""
        answered_on_the_spot = {"timeout", "set_timeout", "has_extended_api"}

        assert set(methods_of(Store)) == set(PUBLIC) - answered_on_the_spot
        assert set(methods_of(Store)) == set(NAMES)
