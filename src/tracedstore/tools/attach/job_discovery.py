"""Reads a job's store, and the worker stores that it points to.

torchrun's agents meet in the store of ``--rdzv-endpoint``, which is the one that
people know. They make another store for their workers, where the ranks are.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tracedstore.common.errors import CommandError
from tracedstore.coordination.rank_registry import (
    RankInfo,
    parse_entry,
    prefix_of,
    read_registry,
    without_numbers,
)
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.collect import (
    is_worker_store_key,
    read_job_state,
    select_keys,
    worker_stores,
)
from tracedstore.tools.attach.job_state import JobState
from tracedstore.tools.attach.store_contents import StoreSnapshot

# Maximum number of worker stores read. Each may take seconds to time out.
_MAX_WORKER_STORES = 8


def collect_job(address: Address, run_id: str | None) -> JobState:
    """Read the state of one job, or of everything in the store, with its workers.

    Raises:
        CommandError: The store cannot be read. A worker store that cannot be read is
            in `JobState.unreadable_stores` instead.
    """
    job = read_job_state(address.read_snapshot(select_keys), run_id)
    for url in _followed(job.running_worker_stores(), address):
        try:
            workers = read_job_state(Address(url).read_snapshot(select_keys), run_id)
        except CommandError as error:
            unreadable = {**job.unreadable_stores, url: str(error)}
            job = replace(job, unreadable_stores=unreadable)
        else:
            job = job.merge(workers)
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRanks:
    """The ranks that registered in a store and in its worker stores.

    Attributes:
        infos: The ranks.
        invalid_count: The number of entries that are not valid.
    """

    infos: list[RankInfo]
    invalid_count: int


def registered_ranks(address: Address) -> RegisteredRanks:
    """Read the ranks that registered in the store and in its worker stores.

    Raises:
        CommandError: The store cannot be read.
    """
    snapshot = address.read_snapshot(_select_rank_keys)
    registries = [read_registry(snapshot)]
    for url in _followed(worker_stores(snapshot).values(), address):
        # The job has ended, or its worker store is unreachable from here.
        with suppress(CommandError):
            workers = Address(url).read_snapshot(_select_rank_keys)
            registries.append(read_registry(workers))
    return RegisteredRanks(
        infos=[info for registry in registries for info in registry.ranks()],
        invalid_count=sum(registry.invalid_count for registry in registries),
    )


class RegisteredStore:
    """A store in which ranks of a job have registered.

    Attributes:
        address: The store.
    """

    def __init__(self, address: Address, snapshot: StoreSnapshot) -> None:
        self.address = address
        self._snapshot = snapshot

    def groups(self, run_id: str | None) -> Iterator[tuple[str, list[RankInfo]]]:
        """Yield the prefixes under which ranks registered last, with the ranks.

        A job registers again after each restart, and its prefix may have another
        number then.
        """
        by_prefix: dict[str, list[RankInfo]] = {}
        for key in self._snapshot.list_keys():
            prefix = prefix_of(key)
            info = None if prefix is None else parse_entry(self._snapshot.get(key))
            if prefix is None or info is None:
                continue
            # Ranks without a run id may belong to any job.
            if run_id is None or info.run_id in (None, run_id):
                by_prefix.setdefault(prefix, []).append(info)
        latest: dict[str, str] = {}
        for prefix in sorted(by_prefix, key=lambda p: _registered_last(by_prefix[p])):
            latest[without_numbers(prefix)] = prefix
        for prefix in latest.values():
            yield prefix, by_prefix[prefix]


def _registered_last(infos: Iterable[RankInfo]) -> float:
    return max(info.started for info in infos)


def followed_stores(address: Address) -> list[RegisteredStore]:
    """Return the store, and the worker stores that it points to.

    Raises:
        CommandError: The store cannot be read.
    """
    snapshot = address.read_snapshot(_select_rank_keys)
    stores = [RegisteredStore(address, snapshot)]
    for url in _followed(worker_stores(snapshot).values(), address):
        # The job has ended, or its worker store is unreachable from here.
        with suppress(CommandError):
            workers = Address(url)
            read = workers.read_snapshot(_select_rank_keys)
            stores.append(RegisteredStore(workers, read))
    return stores


def _followed(urls: Iterable[str | None], address: Address) -> list[str]:
    others = {url for url in urls if url is not None and url != address.url}
    return sorted(others)[:_MAX_WORKER_STORES]


def _select_rank_keys(keys: Sequence[str]) -> list[str]:
    return [
        key for key in keys if prefix_of(key) is not None or is_worker_store_key(key)
    ]
