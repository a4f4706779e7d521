"""Asks the ranks of a job through its store what they are doing.

Unlike the other modules of this package it writes to the store: a question, which is
deleted with its answers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore

from tracedstore.common.errors import CommandError
from tracedstore.coordination.rank_registry import (
    RankInfo,
    latest_world_size,
    read_ranks,
)
from tracedstore.diagnosis.ask.questions import ask
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.child_process import Heartbeat
from tracedstore.tools.attach.job_discovery import followed_stores
from tracedstore.tools.attach.store_connection import connect

# Seconds beyond the timeout of the answers, to connect and to read.
_SLACK = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the ranks of one group of a job answered.

    Attributes:
        world_size: The number of ranks.
        registered: The ranks that have registered.
        answers: What is known about ranks.
    """

    world_size: int
    registered: dict[int, RankInfo]
    answers: dict[int, ProcessFacts]

    @property
    def silent_ranks(self) -> list[int]:
        """The ranks in question about which nothing is known."""
        return [rank for rank in range(self.world_size) if rank not in self.answers]


def ask_job(
    address: Address, kind: str, run_id: str | None, timeout: float
) -> list[Answers]:
    """Ask all ranks of a job, and those in its worker stores.

    Args:
        address: The job's store.
        kind: ``status`` or ``stacks``.
        run_id: Only ranks of this job.
        timeout: Seconds to wait for answers, for each store.

    Raises:
        CommandError: The store cannot be read, or no rank has registered in it.
    """
    groups = []
    for one in followed_stores(address):
        for prefix, infos in one.groups(run_id):
            world_size = latest_world_size(infos)
            groups.append(_ask(one.address, prefix, world_size, kind, timeout))
    if not groups:
        raise CommandError(
            f"no rank has registered in the store at {address.url}; is it traced?"
        )
    return groups


def _ask(
    address: Address, prefix: str, world_size: int, kind: str, timeout: float
) -> Answers:
    def work(heartbeat: Heartbeat) -> Answers:
        with connect(address, for_writing=True) as store:
            connection: Any = store
            if prefix:
                connection = PrefixStore(prefix.removesuffix("/"), store)
            heartbeat()
            ranks: Iterable[int] = range(world_size)
            registered = read_ranks(connection, ranks)
            answers = ask(
                connection, kind, ranks, timeout, asked_by=f"tracedstore {kind}"
            )
            return Answers(
                world_size=world_size, registered=registered, answers=answers
            )

    return address.run(timeout + _SLACK, work, timeout + _SLACK)
