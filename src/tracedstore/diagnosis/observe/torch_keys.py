"""What a store key of torch is for, and which ranks write it.

A key is as a TracedStore sees it: relative to that store, with the prefixes of
PrefixStores above it. `torch_key_table` has the patterns.
"""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tracedstore.common import ranges
from tracedstore.diagnosis.observe.torch_key_table import ROWS, Row

_MAX_KEY_LENGTH: Final = 1024
# torch's default for TORCH_NCCL_RANKS_PER_ROOT.
_RANKS_PER_ROOT: Final = 128
# torch creates the default group first, and restarts the count when it is destroyed.
_DEFAULT_GROUP: Final = "0"

_PATTERNS: Final = tuple((re.compile(row.pattern), row) for row in ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMeaning:
    """What torch uses a key for.

    Attributes:
        phase: What a rank that waits for it executes: ``init_process_group``,
            ``new_group 1``, ``NCCL unique id of group 0``.
        protocol: A stable code: ``gloo``, ``nccl_unique_id``, ``store_barrier``.
        group: The key prefix that all ranks of this one exchange share, without a
            leading slash. Ranks that meet in one exchange have equal prefixes.
        group_name: The name of the process group whose ranks take part, as torch calls
            it; "" without one. The store-based barrier after ``new_group`` has all
            ranks of the default group, so it has that group's name.
        writers: The group ranks, or ranks of agents, that write the key; None if they
            are unknown, or if it is the last one to arrive.
        last_arrival: The last rank to arrive writes it.
        counter: The key that counts arrivals.
        agents: The writers are torchrun's agents, not workers.
        sibling: A format string with ``{rank}``: the key that each rank writes in this
            exchange; None if ranks have no key each.
        root: The index of the root that writes an NCCL unique id, where a group has
            several roots; `writers_in` returns its rank.
        observed: The table was compared with the keys of a running torch, not only with
            torch's source.
    """

    phase: str
    protocol: str
    group: str
    group_name: str
    writers: tuple[int, ...] | None
    last_arrival: bool = False
    counter: str | None = None
    agents: bool = False
    sibling: str | None = None
    root: int | None = None
    observed: bool = True

    def writers_in(self, group_size: int) -> tuple[int, ...] | None:
        """Return the writers in a group of this size; None if they are unknown.

        That is `writers`, but for a group with several NCCL roots, whose ranks follow
        from its size and from ``TORCH_NCCL_RANKS_PER_ROOT`` of this process.
        """
        if self.root is None:
            return self.writers
        roots = nccl_roots(group_size, _ranks_per_root())
        return (roots[self.root],) if self.root < len(roots) else None


def meaning(key: str) -> KeyMeaning | None:
    """Return what torch uses a key for; None for a key that is not torch's.

    The time is linear in the length of the key, which may be hostile. A key of more
    than 1024 characters has no meaning.
    """
    if len(key) > _MAX_KEY_LENGTH:
        return None
    return _meaning(key)


def nccl_roots(
    group_size: int, ranks_per_root: int = _RANKS_PER_ROOT
) -> tuple[int, ...]:
    """Return the group ranks that write ``UniqueNCCLID:0``, ``UniqueNCCLID:1``, ...

    torch distributes the ranks evenly over the roots; the first roots have one rank
    more. A root is the first of its ranks.
    """
    if ranks_per_root < 1 or group_size < 1:
        return ()
    count = -(-group_size // ranks_per_root)
    share, larger = divmod(group_size, count)
    return tuple(root * share + min(root, larger) for root in range(count))


@lru_cache(maxsize=256)
def _meaning(key: str) -> KeyMeaning | None:
    relative = key.removeprefix("/")
    for pattern, row in _PATTERNS:
        match = pattern.fullmatch(relative)
        if match is not None:
            slash = "/" if relative != key else ""
            return _describe(row, match.groupdict(), slash)
    return None


def _describe(row: Row, found: dict[str, str | None], slash: str) -> KeyMeaning | None:
    """Fill in a row; None if a number in the key cannot be a rank."""
    writers: tuple[int, ...] | None = None
    if isinstance(row.writers, int):
        writers = (row.writers,)
    elif row.writers is not None:
        writers = (int(found[row.writers] or 0),)
    if writers is not None and writers[0] >= ranges.MAX_RANKS:
        return None
    shared = found["shared"] or ""
    name = found.get("name") or found.get("barrier") or ""
    texts = {
        **found,
        "creation": "init_process_group"
        if name == _DEFAULT_GROUP
        else f"new_group {name}",
    }
    root = found.get("root")
    return KeyMeaning(
        phase=row.phase.format_map(texts),
        protocol=row.protocol,
        group=shared,
        group_name=name,
        writers=writers,
        last_arrival=row.last_arrival,
        counter=None if row.counter is None else slash + row.counter.format_map(texts),
        agents=row.agents,
        sibling=None
        if row.sibling is None
        # The result is a format string itself.
        else slash + row.sibling.format_map({**texts, "shared": _escaped(shared)}),
        root=None if root is None else int(root),
        observed=row.observed,
    )


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _ranks_per_root() -> int:
    value = os.environ.get("TORCH_NCCL_RANKS_PER_ROOT", "")
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else _RANKS_PER_ROOT
