"""Wrapped calls time out as bare ones do, and the timeout is the inner store's."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore

from contract.harness import OUTERMOST, SHAPES, Make, Step, outcomes
from contract.scenarios import BARRIER_TIMEOUT, MINUTE, POP_TIMEOUT, TIMEOUTS
from support.stores import SHORT
from support.versions import needs_store_barrier
from tracedstore import wrap

# FileStore rounds a timeout up to seconds. A call that is still blocked after this
# many seconds has lost its timeout.
DEADLINE_SECONDS = 120.0
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Played:
    """The outcomes of steps on one store, and how many seconds they took."""

    outcomes: list[tuple[type, Any]]
    seconds: float


def play_concurrently(
    steps: list[Step], stores: Mapping[str, Any]
) -> dict[str, Played]:
    """Run the same steps on several stores at once, which saves waiting time."""
    played: dict[str, Played] = {}

    def play(name: str) -> None:
        started = time.monotonic()
        results = outcomes(steps, stores[name])
        played[name] = Played(results, time.monotonic() - started)

    # Daemon threads, so that one which never ends fails only its own test.
    threads = [
        threading.Thread(target=play, args=(name,), daemon=True) for name in stores
    ]
    deadline = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    blocked = [name for name in stores if name not in played]
    assert not blocked, f"still blocked after {DEADLINE_SECONDS} s"
    return played


class TestTimesOut:
    """A call that times out has the same outcome, bare and wrapped."""

    def check(self, make: Make, steps: list[Step], shapes: tuple[str, ...]) -> None:
        """Run the steps on every shape; the last step times out."""
        bare = {shape: SHAPES[shape].bare(make()) for shape in shapes}
        wrapped = {shape: SHAPES[shape].wrapped(make()) for shape in shapes}

        played = play_concurrently(
            steps,
            {f"bare {shape}": store for shape, store in bare.items()}
            | {f"wrapped {shape}": store for shape, store in wrapped.items()},
        )

        for shape in shapes:
            expected, actual = played[f"bare {shape}"], played[f"wrapped {shape}"]
            assert actual.outcomes == expected.outcomes
            assert issubclass(actual.outcomes[-1][0], Exception)
            # The clocks of Python and of C++ do not agree to the millisecond.
            assert actual.seconds >= 0.9 * SHORT.total_seconds()

    @pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(
                name,
                marks=needs_store_barrier if name.startswith("barrier") else (),
            )
            for name in TIMEOUTS
        ],
    )
    def test_with_same_exception(self, make: Make, scenario: str) -> None:
        """The exception and its text are the same, soon after the timeout."""
        self.check(make, TIMEOUTS[scenario], tuple(SHAPES))

    @needs_store_barrier
    def test_barrier_with_same_exception(self, make: Make) -> None:
        """A barrier without an explicit timeout times out the same."""
        self.check(make, BARRIER_TIMEOUT, ("direct",))

    @pytest.mark.parametrize(
        ("kind", "shapes"),
        [("tcp", OUTERMOST), ("hash", OUTERMOST), ("python", ("direct",))],
        indirect=["kind"],
    )
    def test_pop_with_same_exception(self, make: Make, shapes: tuple[str, ...]) -> None:
        """queue_pop() on an empty queue times out the same on stores with queues."""
        self.check(make, POP_TIMEOUT, shapes)


class TestTimeoutSet:
    """The wrapper, the inner store and C++ share one timeout."""

    def test_before_wrapping_is_taken_over(self, make: Make) -> None:
        """Python and C++ read the inner store's timeout from the wrapper."""
        inner = make()
        inner.set_timeout(MINUTE)

        store = wrap(inner)
        above: Any = PrefixStore("p", store)

        assert [store.timeout, above.timeout] == [MINUTE] * 2

    def test_on_wrapper_reaches_inner_store_and_cpp(self, make: Make) -> None:
        """set_timeout() on the wrapper sets the inner store's and what C++ reads."""
        inner = make()
        store = wrap(inner)
        above: Any = PrefixStore("p", store)

        store.set_timeout(MINUTE)

        assert [inner.timeout, store.timeout, above.timeout] == [MINUTE] * 3

    def test_on_inner_store_is_kept(self, make: Make) -> None:
        """set_timeout() on the inner store takes effect; the wrapper keeps it."""
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
        """set_timeout() on a PrefixStore above, in C++, applies to the next call."""
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
        """The last set_timeout() applies, whether C++ or Python called it."""
        store = wrap(make())
        above = PrefixStore("p", store)

        above.set_timeout(HOUR)
        store.set_timeout(MINUTE)
        after_python = store.timeout
        above.set_timeout(HOUR)

        assert [after_python, store.timeout] == [MINUTE, HOUR]
