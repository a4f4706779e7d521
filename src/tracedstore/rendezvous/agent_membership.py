"""The ranks of torchrun's agents in the store that they share."""

from collections.abc import Callable

from tracedstore.coordination import membership
from tracedstore.rendezvous.backend import TracedRendezvousBackend
from tracedstore.store import TracedStore


def record_membership(
    store: TracedStore, rank: int, world_size: int, backend: TracedRendezvousBackend
) -> None:
    """Record the rank of this agent, and the agents of the last completed round."""
    last = backend.attendance.last
    nodes = {} if last is None else {r: n for n, r in last.participants.items()}
    membership.record(
        store,
        membership.Membership(
            rank,
            world_size,
            _decoder(backend),
            {rank: (node.addr, node.pid) for rank, node in nodes.items()},
        ),
    )


def _decoder(backend: TracedRendezvousBackend) -> Callable[[int], str]:
    """Return a decoder for the agents of the last completed round."""
    last = backend.attendance.last
    nodes = {} if last is None else {r: str(n) for n, r in last.participants.items()}
    return lambda rank: nodes.get(rank) or f"agent {rank}"
