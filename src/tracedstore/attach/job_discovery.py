"""Look at the store that was named, and at those that it points to.

torchrun's agents meet in the store of ``--rdzv-endpoint``, and make another one for
their workers, which is where the ranks are. People know the first.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tracedstore.attach.address import Address
from tracedstore.attach.collect import JobState, tells_of_workers, wanted, workers_of
from tracedstore.coordination.rank_registry import RankInfo, prefix_of, read_all
from tracedstore.core.errors import CommandError


def surveyed(address: Address, run_id: str | None) -> JobState:
    """Find out about the one job, or whatever is there, and its workers."""
    found = JobState.of(address.look(wanted), run_id)
    for url in found.running_workers() - {address.url}:
        try:
            workers = JobState.of(Address(url).look(wanted), run_id)
        except CommandError as error:
            found = replace(found, unread={**found.unread, url: str(error)})
        else:
            found = found.joined(workers)
    return found


def registered(address: Address) -> list[RankInfo]:
    """List the ranks that registered there, and among its workers."""
    snapshot = address.look(_of_ranks)
    infos = read_all(snapshot)
    for url in set(workers_of(snapshot).values()) - {address.url}:
        # A job that has ended, or one that cannot be reached from here.
        with suppress(CommandError):
            infos += read_all(Address(url).look(_of_ranks))
    return infos


def _of_ranks(keys: Sequence[str]) -> list[str]:
    return [key for key in keys if prefix_of(key) is not None or tells_of_workers(key)]
