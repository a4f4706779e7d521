"""Random hangs: which scenario, how its victims hang, and in which store."""

import random
from dataclasses import dataclass

from hangs.scenarios import SCENARIOS, Kind, Scenario, StoreKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hang.

    Attributes:
        number: Its number in the run; with the seed it determines the rest.
        scenario: What its ranks do.
        kind: How its victims hang.
        world_size: The number of ranks.
        victims: The ranks that cause the hang; empty if none does.
        store: Where the ranks meet.
    """

    number: int
    scenario: Scenario
    kind: Kind
    world_size: int
    victims: tuple[int, ...]
    store: StoreKind

    def __str__(self) -> str:
        ranks = f" rank {','.join(map(str, self.victims))}" if self.victims else ""
        return (
            f"{self.scenario.name} {self.kind}{ranks} of {self.world_size},"
            f" {self.store}"
        )

    def rank_of(self, seat: int) -> int:
        """Return the rank that the process with this number is started as."""
        if self.kind != "twice" or seat not in self.victims:
            return seat
        return max(rank for rank in range(self.world_size) if rank not in self.victims)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks for which no process is started."""
        return self.victims if self.kind == "not_started" else ()

    @property
    def is_without_server(self) -> bool:
        """Whether rank 0, which serves the store, does not begin to."""
        return (
            self.scenario.name == "before_init"
            and self.store == "tcp"
            and 0 in self.victims
        )

    @property
    def awaited(self) -> tuple[int, ...]:
        """The victims that can be known: without a store only rank 0 is."""
        return (0,) if self.is_without_server else self.victims

    @property
    def survivors(self) -> tuple[int, ...]:
        """The numbers of the processes that wait."""
        hung = () if self.kind == "twice" else self.victims
        return tuple(seat for seat in range(self.world_size) if seat not in hung)


def make_case(seed: int, number: int, *, max_world_size: int, name: str = "") -> Case:
    """Return a case; the same for the same seed and number."""
    choose = random.Random(f"{seed}/{number}")
    names = [name] if name else sorted(SCENARIOS)
    scenario = SCENARIOS[names[number % len(names)]]
    world_size = choose.randint(scenario.min_world_size, max_world_size)
    kind = choose.choice(scenario.kinds)
    store = choose.choice(scenario.stores)
    count = choose.randint(1, max(1, min(scenario.max_victims, world_size - 1)))
    candidates = range(world_size)
    if store == "tcp" and kind in ("gone", "stopped", "twice"):
        # Rank 0 serves the store: without it there is another hang.
        candidates = range(1, world_size)
    victims = choose.sample(candidates, min(count, len(candidates)))
    if kind in ("server_stopped", "server_killed") or not scenario.max_victims:
        victims = []
    elif scenario.first_rank_only:
        victims = [0]
    if kind == "twice" and store == "tcp" and len(victims) == world_size - 1:
        store = "server"  # two processes cannot serve a store at one port
    return Case(
        number=number,
        scenario=scenario,
        kind=kind,
        world_size=world_size,
        victims=tuple(sorted(victims)),
        store=store,
    )
