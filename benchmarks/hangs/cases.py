"""Random hangs: which scenario, how its victims hang, and in which store."""

import random
from dataclasses import dataclass
from typing import Final, Literal

from hangs.hang import SecondStore, StoreKind
from hangs.scenarios import SCENARIOS, Kind, Scenario

# How the ranks become processes: each is forked before tracedstore is set up, or by a
# program that has set it up, or it is an interpreter of its own. Or a launcher starts
# them: torchrun, torch.multiprocessing.spawn, or an agent of torchrun on each of two
# nodes.
Start = Literal["forked", "forked_later", "executed", "torchrun", "spawn", "two nodes"]
LAUNCHERS: Final[tuple[Start, ...]] = ("torchrun", "spawn", "two nodes")
# One interpreter takes seconds of processor time to import torch.
_MAX_EXECUTED: Final = 4
# How the victims of kind `mixed` hang, one after the other.
_MIXED: Final[tuple[Kind, ...]] = ("gone", "busy", "stopped")


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
        start: How the ranks become processes.
        wraps: The program only calls `tracedstore.wrap`.
        helpers: The ranks have helper threads that wait.
        second_store: What becomes of the second store's server; "" without one.
    """

    number: int
    scenario: Scenario
    kind: Kind
    world_size: int
    victims: tuple[int, ...]
    store: StoreKind
    start: Start = "forked"
    wraps: bool = False
    helpers: bool = False
    second_store: SecondStore = ""

    def __str__(self) -> str:
        ranks = f" rank {','.join(map(str, self.victims))}" if self.victims else ""
        more = [
            *([self.start] if self.start != "forked" else []),
            *(["wrap() alone"] if self.wraps else []),
            *(["helper threads"] if self.helpers else []),
            *([f"second store {self.second_store}"] if self.second_store else []),
        ]
        return ", ".join(
            (
                f"{self.scenario.name} {self.kind}{ranks} of {self.world_size}",
                self.store,
                *more,
            )
        )

    def rank_of(self, seat: int) -> int:
        """Return the rank that the process with this number is started as."""
        if self.kind == "pairs":
            return seat // 2
        if self.kind != "twice" or seat not in self.victims:
            return seat
        return max(rank for rank in range(self.world_size) if rank not in self.victims)

    def kind_of(self, rank: int) -> Kind:
        """Return how a victim hangs."""
        if self.kind != "mixed":
            return self.kind
        return _MIXED[self.victims.index(rank) % len(_MIXED)]

    def cause_of(self, rank: int) -> str:
        """Return the right cause of a victim, if the case has no cause as a whole."""
        kind = self.kind_of(rank)
        return "host_silent" if kind.startswith("node_") else kind

    @property
    def causes(self) -> tuple[str, ...]:
        """The right causes of the stall; empty if each victim has that of its kind."""
        if self.is_without_server:
            return ("server_unreachable",)
        return self.scenario.causes

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks for which no process is started."""
        return self.victims if self.kind == "not_started" else ()

    @property
    def hung(self) -> tuple[int, ...]:
        """The numbers of the processes that reach the point where they hang."""
        # That a rank is killed in a collective is harmless: gloo notices it.
        if self.scenario.harmless and self.kind != "gone":
            return ()
        if self.kind in ("twice", "pairs", "not_started"):
            return ()
        if self.kind in ("server_stopped", "server_killed"):
            return tuple(range(self.world_size))
        return self.victims

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
        hung = () if self.kind in ("twice", "pairs") else self.victims
        if self.scenario.harmless:
            hung = ()
        return tuple(seat for seat in range(self.world_size) if seat not in hung)


def make_case(seed: int, number: int, *, max_world_size: int, name: str = "") -> Case:
    """Return a case; the same for the same seed and number."""
    choose = random.Random(f"{seed}/{number}")
    names = [name] if name else sorted(SCENARIOS)
    scenario = SCENARIOS[names[number % len(names)]]
    if scenario.nodes:
        return Case(
            number=number,
            scenario=scenario,
            kind=choose.choice(scenario.kinds),
            world_size=4,
            victims=(2, 3),
            store="tcp",
            start="two nodes",
        )
    wraps = scenario.wraps and choose.random() < 1 / 4
    start: Start = choose.choices(("forked", "forked_later", "executed"), (4, 1, 1))[0]
    if wraps or scenario.name == "before_init" or "restarted" in scenario.kinds:
        # The program would set tracedstore up before it forks; a rank whose process
        # is not there yet when the others wait has not started; and the evidence of a
        # restart has the ranks that have registered again.
        start = "forked"
    most = min(scenario.max_world_size, max_world_size)
    if start == "executed":
        most = min(most, _MAX_EXECUTED)
    least = scenario.min_world_size
    world_size = choose.randint(least, max(least, most))
    kind = choose.choice(scenario.kinds)
    stores = [one for one in scenario.stores if one != "tcp" or not wraps]
    store = choose.choice(stores)
    count = choose.randint(1, max(1, min(scenario.max_victims, world_size - 1)))
    candidates = range(world_size)
    if store == "tcp" and kind in ("gone", "stopped", "mixed", "twice"):
        # Rank 0 serves the store: without it there is another hang.
        candidates = range(1, world_size)
    victims = choose.sample(candidates, min(count, len(candidates)))
    if kind in ("server_stopped", "server_killed") or not scenario.max_victims:
        victims = []
    elif scenario.first_rank_only:
        victims = [0]
    elif kind == "pairs":
        victims = list(range((world_size + 1) // 2, world_size))
    if kind == "twice" and store == "tcp" and len(victims) == world_size - 1:
        store = "server"  # two processes cannot serve a store at one port
    # Helper threads and a second store start after init_process_group.
    joins = kind in ("busy", "stopped", "gone", "mixed")
    joins &= scenario.name not in ("before_init", "groups_in_another_order")
    helpers = scenario.helpers or (joins and choose.random() < 1 / 4)
    second: SecondStore = "stopped" if kind == "second_stopped" else ""
    if joins and not scenario.harmless and choose.random() < 1 / 5:
        second = choose.choice(("stopped", "refusing"))
    return Case(
        number=number,
        scenario=scenario,
        kind=kind,
        world_size=world_size,
        victims=tuple(sorted(victims)),
        store=store,
        start=start,
        wraps=wraps,
        helpers=helpers,
        second_store=second,
    )
