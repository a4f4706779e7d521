"""Blocking calls end when they should, and every timeout is the inner store's."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore

from contract.harness import OUTERMOST, SHAPES, Make, Step, outcomes
from contract.scenarios import MINUTE, OVERDUE, OVERDUE_BARRIER, OVERDUE_POP
from support.stores import SHORT
from tracedstore import wrap

# FileStore rounds up to seconds; what is still blocked then has lost its timeout.
GENEROUSLY = 15.0
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Ended:
    """How steps ended on one store, and after how many seconds."""

    outcomes: list[tuple[type, Any]]
    seconds: float


def play_at_once(steps: list[Step], stores: Mapping[str, Any]) -> dict[str, Ended]:
    """Take the same steps on several stores at once, for waiting costs time."""
    ended: dict[str, Ended] = {}

    def play(name: str) -> None:
        started = time.monotonic()
        played = outcomes(steps, stores[name])
        ended[name] = Ended(played, time.monotonic() - started)

    # Daemons, so that one which never ends fails its test and nothing else.
    threads = [
        threading.Thread(target=play, args=(name,), daemon=True) for name in stores
    ]
    deadline = time.monotonic() + GENEROUSLY
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    blocked = [name for name in stores if name not in ended]
    assert not blocked, f"still blocked after {GENEROUSLY} s"
    return ended


class TestOverdue:
    """What does not come in time ends alike, bare and wrapped."""

    def check(self, make: Make, steps: list[Step], shapes: tuple[str, ...]) -> None:
        """Play the steps on every shape; the last one is what times out."""
        bare = {shape: SHAPES[shape].bare(make()) for shape in shapes}
        wrapped = {shape: SHAPES[shape].wrapped(make()) for shape in shapes}

        ended = play_at_once(
            steps,
            {f"bare {shape}": store for shape, store in bare.items()}
            | {f"wrapped {shape}": store for shape, store in wrapped.items()},
        )

        for shape in shapes:
            expected, actual = ended[f"bare {shape}"], ended[f"wrapped {shape}"]
            assert actual.outcomes == expected.outcomes
            assert issubclass(actual.outcomes[-1][0], Exception)
            # Clocks of threads and of C++ do not agree to the millisecond.
            assert actual.seconds >= 0.9 * SHORT.total_seconds()

    @pytest.mark.parametrize("scenario", OVERDUE)
    def test_ends_the_same(self, make: Make, scenario: str) -> None:
        """The same exception and text, after the timeout and not long after it."""
        self.check(make, OVERDUE[scenario], tuple(SHAPES))

    def test_barrier_ends_the_same(self, make: Make) -> None:
        """So does a barrier that is given no timeout of its own."""
        self.check(make, OVERDUE_BARRIER, ("direct",))

    @pytest.mark.parametrize(
        ("kind", "shapes"),
        [("tcp", OUTERMOST), ("hash", OUTERMOST), ("python", ("direct",))],
        indirect=["kind"],
    )
    def test_pop_ends_the_same(self, make: Make, shapes: tuple[str, ...]) -> None:
        """So does waiting for an empty queue, where there are queues."""
        self.check(make, OVERDUE_POP, shapes)


class TestTimeoutSet:
    """There is one timeout, wherever it is set and read."""

    def test_before_wrapping_is_taken_over(self, make: Make) -> None:
        """The inner store's timeout is the wrapper's, for Python and for C++."""
        inner = make()
        inner.set_timeout(MINUTE)

        store = wrap(inner)
        above: Any = PrefixStore("p", store)

        assert [store.timeout, above.timeout] == [MINUTE] * 2

    def test_on_wrapper_reaches_all(self, make: Make) -> None:
        """Setting it on the wrapper sets the inner store's, and what C++ reads."""
        inner = make()
        store = wrap(inner)
        above: Any = PrefixStore("p", store)

        store.set_timeout(MINUTE)

        assert [inner.timeout, store.timeout, above.timeout] == [MINUTE] * 3

    def test_on_inner_store_shows(self, make: Make) -> None:
        """Setting it behind the wrapper's back counts, and is not undone."""
        inner = make()
        store = wrap(inner)
        store.set("k", "v")

        inner.set_timeout(MINUTE)
        store.get("k")

        assert [inner.timeout, store.timeout] == [MINUTE] * 2

    @pytest.mark.parametrize("prefixes", [1, 3])
    def test_on_prefix_store_reaches_inner_store(
        self, make: Make, prefixes: int
    ) -> None:
        """Setting it on a PrefixStore above, in C++, holds for the next call."""
        inner = make()
        store = wrap(inner)
        above: Any = store
        for _ in range(prefixes):
            above = PrefixStore("p", above)
        above.set("k", "v")

        above.set_timeout(MINUTE)
        above.wait(["k"])

        assert [inner.timeout, store.timeout, above.timeout] == [MINUTE] * 3

    def test_last_one_wins(self, make: Make) -> None:
        """Setting it in C++ and in Python by turns leaves the last one."""
        store = wrap(make())
        above = PrefixStore("p", store)

        above.set_timeout(HOUR)
        store.set_timeout(MINUTE)
        after_python = store.timeout
        above.set_timeout(HOUR)

        assert [after_python, store.timeout] == [MINUTE, HOUR]
