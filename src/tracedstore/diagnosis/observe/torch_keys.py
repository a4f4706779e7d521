"""What a store key of torch is for, and which ranks write it.

A key is as a TracedStore sees it: relative to that store, with the prefixes of
PrefixStores above it. Keys of a process group contain group ranks. `members_of` has the
global ranks of the groups that this process creates.

`ROWS` has torch's keys as data: one row per pattern of keys that torch waits for. The
keys are those of torch 2.13; an integration test compares the rows with the keys that
the installed torch uses. Rows that need hardware which that test does not have are
marked with ``observed=False``: they are from torch's source.

Some keys of torch have no row: an application may have keys of the same form. These are
the keys of ``elastic.utils.store.synchronize`` (``<prefix><rank>``), of the other calls
of ``_StoreCollectives`` (``<key>``, ``<key>/<rank>``), and of the barrier of
torch's checkpoints (``rank<rank>``). Others are never waited for: counters, UCC's
``ag_done``, ``exception_dump``.
"""

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tracedstore.common import ranges

# Device types under which torch nests the keys of a backend.
DEVICES: Final = (
    "cpu",
    "cuda",
    "hip",
    "hpu",
    "maia",
    "meta",
    "mps",
    "mtia",
    "musa",
    "npu",
    "privateuseone",
    "vulkan",
    "xla",
    "xpu",
)

_ANY_DEVICE = "(?:" + "|".join(DEVICES) + ")"
# torch writes numbers without leading zeros. The length bounds them.
_NUMBER = "(?:0|[1-9][0-9]{0,8})"
_RANK = f"(?P<rank>{_NUMBER})"
_SEQUENCE = f"(?P<sequence>{_NUMBER})"
# The keys of a process group are under its name and two slashes.
_NAME = f"(?P<name>(?!{_ANY_DEVICE}//)[^/\\s]{{1,256}})"
# Prefixes of stores above the one that the key is relative to.
_ABOVE = "(?:.*/)?"
_GROUP = f"{_ABOVE}{_NAME}//"
_GROUP_HASH = f"{_ABOVE}(?P<name>[0-9a-f]{{40}})//"
_BACKEND = f"{_GROUP}{_ANY_DEVICE}//"
_CUDA = f"{_GROUP}cuda//"
_SYMMETRIC_MEMORY = (
    f"(?:{_GROUP}(?:cuda//)?(?:IntraNodeComm/|symmetric_memory-[0-9_]+/)?|.*/)?"
    f"(?P<kind>CUDASymmetricMemory|NVSHMEMSymmetricMemory|NCCLAllocation)/{_SEQUENCE}"
)
_ELASTIC = f"{_ABOVE}torchelastic"
_SHA1 = re.compile("[0-9a-f]{40}")
_RPC = f"{_ABOVE}rpc_prefix_{_NUMBER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What torch uses keys of one form for.

    Attributes:
        pattern: A regular expression for the whole key, without a leading slash. The
            group ``shared`` is the part that all ranks of one exchange share; ``rank``
            is the group rank whose key it is, ``name`` the name of a process group.
        protocol: A stable code for the protocol.
        phase: What a rank that waits for it executes: a format string of the groups
            of the pattern, and of ``creation``, the call that creates the group.
        writers: The group ranks that write it: ``rank`` and ``low`` are groups of the
            pattern; None if the key does not contain it.
        last_arrival: The last rank to arrive writes it.
        counter: The key that counts arrivals, as a format string.
        sibling: The key that each rank of the exchange writes, as a format string in
            which ``{{rank}}`` remains.
        agents: The ranks are those of torchrun's agents.
        ends_job: Agents that have finished wait for the others with it.
        example: A key of this form.
        observed: An integration test has torch wait for such a key.
    """

    pattern: str
    protocol: str
    phase: str
    writers: int | str | None = None
    last_arrival: bool = False
    counter: str | None = None
    sibling: str | None = None
    agents: bool = False
    ends_job: bool = False
    example: str
    observed: bool = True


# The first row that matches is used.
ROWS: Final = (
    # Process groups: gloo. Every rank writes its address, and reads all others.
    Row(
        pattern=f"(?P<shared>{_BACKEND}{_NUMBER})/{_RANK}",
        protocol="gloo",
        phase="{creation}",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="default_pg/0//1//cpu//0/3",
    ),
    Row(  # TORCH_DISTRIBUTED_DEBUG=DETAIL: a second gloo group for checks
        pattern=f"(?P<shared>{_BACKEND}pg_wrapper:(?P=name)/{_NUMBER})/{_RANK}",
        protocol="gloo",
        phase="{creation} (its group for TORCH_DISTRIBUTED_DEBUG=DETAIL)",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="default_pg/0//cpu//pg_wrapper:0/0/1",
    ),
    Row(  # a transport other than TCP
        pattern=f"(?P<shared>{_BACKEND}{_NUMBER})/rank_{_RANK}",
        protocol="gloo",
        phase="{creation}",
        writers="rank",
        sibling="{shared}/rank_{{rank}}",
        example="default_pg/0//cpu//0/rank_3",
        observed=False,
    ),
    Row(  # split_group: without a device; the name is always a SHA-1 hash
        pattern=f"(?P<shared>{_GROUP_HASH}{_NUMBER})/{_RANK}",
        protocol="gloo",
        phase="split_group {name}",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="default_pg/0//ad56679d2c95f00a464e146ac76c2deb475d8262//0/1",
    ),
    # Process groups: NCCL. The key of an id is the number of the communicator.
    Row(
        pattern=f"(?P<shared>{_CUDA}{_NUMBER})",
        protocol="nccl_unique_id",
        phase="NCCL unique id of group {name}",
        writers=0,
        example="default_pg/0//cuda//0",
        observed=False,
    ),
    Row(  # groups larger than TORCH_NCCL_RANKS_PER_ROOT
        pattern=f"(?P<shared>{_CUDA}UniqueNCCLID):(?P<root>{_NUMBER})",
        protocol="nccl_unique_id",
        phase="NCCL unique id of group {name}",
        example="default_pg/0//cuda//UniqueNCCLID:1",
        observed=False,
    ),
    Row(
        pattern=f"(?P<shared>{_CUDA}(?P<low>{_NUMBER}):(?P<high>{_NUMBER}))",
        protocol="nccl_p2p",
        phase="NCCL unique id of ranks {low} and {high} of group {name}",
        writers="low",
        example="default_pg/0//cuda//1:3",
        observed=False,
    ),
    Row(
        pattern=f"(?P<shared>{_CUDA}IntraNodeComm/handshake-{_NUMBER})-{_RANK}",
        protocol="intra_node_comm",
        phase="IntraNodeComm of group {name}",
        writers="rank",
        sibling="{shared}-{{rank}}",
        example="default_pg/0//cuda//IntraNodeComm/handshake-0-3",
        observed=False,
    ),
    Row(  # polled with check(), but an application may wait for it
        pattern=f"(?P<shared>{_BACKEND}teamr){_RANK}",
        protocol="ucc",
        phase="UCC team of group {name}",
        writers="rank",
        sibling="{shared}{{rank}}",
        example="default_pg/0//cuda//teamr2",
        observed=False,
    ),
    # Symmetric memory. Each process counts its exchanges.
    Row(
        pattern=f"(?P<shared>{_SYMMETRIC_MEMORY})/{_RANK}",
        protocol="symmetric_memory",
        phase="symmetric memory exchange {sequence}",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="default_pg/0//CUDASymmetricMemory/4/1",
        observed=False,
    ),
    Row(
        pattern=f"(?P<shared>{_SYMMETRIC_MEMORY})/last_member",
        protocol="symmetric_memory",
        phase="symmetric memory barrier {sequence}",
        last_arrival=True,
        counter="{shared}/num_members",
        example="default_pg/0//CUDASymmetricMemory/5/last_member",
        observed=False,
    ),
    # TORCH_DIST_INIT_BARRIER=1. All ranks call the barrier after new_group, under the
    # name of the default group; with use_local_synchronization only its members, under
    # its own name.
    Row(
        pattern=f"(?P<shared>(?:{_GROUP}|.*/)?store_based_barrier_key:"
        r"(?P<barrier>[^/\s]{1,256})):last_worker",
        protocol="store_based_barrier",
        phase="store-based barrier of group {barrier}",
        last_arrival=True,
        counter="{shared}",
        example="default_pg/0//store_based_barrier_key:1:last_worker",
    ),
    # torchrun's agents.
    Row(  # read and changed by all agents
        pattern=r"(?P<shared>(?:.*/)?torch\.rendezvous\.[^/]+)",
        protocol="rendezvous_state",
        phase="rendezvous of torchrun's agents",
        agents=True,
        example="torch.rendezvous.run",
    ),
    Row(
        pattern=f"(?P<shared>{_ELASTIC}/role_info)/{_RANK}",
        protocol="role_info",
        phase="rank assignment of torchrun's agents",
        writers="rank",
        sibling="{shared}/{{rank}}",
        agents=True,
        example="torch.rendezvous.run.0/torchelastic/role_info/2",
    ),
    Row(
        pattern=f"(?P<shared>{_ELASTIC}/assigned_ranks)/{_NUMBER}",
        protocol="assigned_ranks",
        phase="rank assignment of torchrun's agents",
        writers=0,
        agents=True,
        example="torch.rendezvous.run.0/torchelastic/assigned_ranks/1",
    ),
    # The traced rendezvous sees these keys without the prefix of the rendezvous.
    Row(
        pattern=r"(?:(?P<shared>(?:.*/)?torch\.rendezvous\..+\.[0-9]{1,9})/)?"
        "MASTER_(?:ADDR|PORT)",
        protocol="master_address",
        phase="MASTER_ADDR exchange of torchrun's agents",
        writers=0,
        agents=True,
        example="torch.rendezvous.run.0/MASTER_ADDR",
    ),
    Row(
        pattern=f"(?P<shared>{_ELASTIC}/agent/terminal_state)/last_member",
        protocol="elastic_barrier",
        phase="agents' exit barrier",
        last_arrival=True,
        counter="{shared}/num_members",
        agents=True,
        ends_job=True,
        example="torch.rendezvous.run.0/torchelastic/agent/terminal_state/last_member",
    ),
    # After the timeout of elastic.utils.store.barrier(rank=...). The prefix may end
    # with a digit, so the rank before /TRACE is not certain.
    Row(
        pattern="(?P<shared>.+)/TRACING_GATE",
        protocol="elastic_barrier",
        phase="missing ranks of barrier {shared}",
        writers=0,
        example="checkpoint/7/TRACING_GATE",
    ),
    Row(
        pattern="(?P<shared>.*[^0-9][0-9]{1,9})/TRACE",
        protocol="elastic_barrier",
        phase="missing ranks of a barrier",
        example="checkpoint/3/TRACE",
    ),
    # torch.distributed.rpc
    Row(
        pattern=f"(?P<shared>{_RPC}/{_NUMBER})/{_RANK}",
        protocol="rpc",
        phase="init_rpc",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="rpc_prefix_0/0/1",
    ),
    Row(
        pattern=f"(?P<shared>{_RPC}/names)/{_RANK}",
        protocol="rpc",
        phase="init_rpc",
        writers="rank",
        sibling="{shared}/{{rank}}",
        example="rpc_prefix_0/names/1",
    ),
    Row(
        pattern=f"(?P<shared>{_RPC}/addrs)/.+",
        protocol="rpc",
        phase="init_rpc",
        example="rpc_prefix_0/addrs/worker1",
    ),
    Row(
        pattern=f"(?P<shared>(?P<above>{_RPC}/shutdown)/READY_ID_{_SEQUENCE})",
        protocol="rpc",
        phase="rpc.shutdown",
        last_arrival=True,
        counter="{above}/PROCESS_COUNT_ID_{sequence}",
        example="rpc_prefix_0/shutdown/READY_ID_2",
    ),
    Row(  # a sum over all ranks
        pattern=f"(?P<shared>{_RPC}/shutdown)/ACTIVE_CALLS_ID_{_NUMBER}",
        protocol="rpc",
        phase="rpc.shutdown",
        example="rpc_prefix_0/shutdown/ACTIVE_CALLS_ID_2",
    ),
    Row(
        pattern=f"(?P<shared>{_RPC})/Token_for_.+_(?:join|leave)",
        protocol="rpc",
        phase="RPC group membership",
        example="rpc_prefix_0/Token_for_worker1_join",
        observed=False,
    ),
    Row(
        pattern=f"(?P<shared>{_ABOVE}debug_server)/rank{_RANK}",
        protocol="debug_server",
        phase="start of torch's debug server",
        writers="rank",
        sibling="{shared}/rank{{rank}}",
        example="debug_server/rank2",
        observed=False,
    ),
    # Barriers with a key of the caller: Store.barrier of a PrefixStore, elastic.utils.
    # store.barrier, get_all and synchronize, and the barrier of this package.
    Row(
        pattern="(?P<shared>.+)/last_member",
        protocol="store_barrier",
        phase="barrier {shared}",
        last_arrival=True,
        counter="{shared}/num_members",
        example="checkpoint/7/last_member",
    ),
    Row(  # of _StoreCollectives
        pattern="(?P<shared>.+)/last_members",
        protocol="store_collectives",
        phase="barrier {shared}",
        last_arrival=True,
        counter="{shared}/num_members",
        sibling="{shared}/{{rank}}",
        example="checkpoint/7/last_members",
    ),
)


_MAX_KEY_LENGTH: Final = 1024
# torch's default for TORCH_NCCL_RANKS_PER_ROOT.
_RANKS_PER_ROOT: Final = 128
# torch creates the default group first, and restarts the count when it is destroyed.
_DEFAULT_GROUP: Final = "0"


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], Row], ...]:
    # Not at the import: compiling them takes longer than everything else in it.
    return tuple((re.compile(row.pattern), row) for row in ROWS)


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
        ends_job: Agents that have finished wait for the others with it.
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
    ends_job: bool = False
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
    for pattern, row in _patterns():
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
        ends_job=row.ends_job,
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


# The latest groups are kept: a job creates a few dozen, each with a new name.
MAX_GROUPS: Final = 1024

_members: dict[str, tuple[int, ...]] = {}
_lock = threading.RLock()


def record_members(name: str, global_ranks: Sequence[int], world_size: int) -> None:
    """Record the members of a group, before torch creates it, which may block.

    Args:
        name: The name that torch has for the group.
        global_ranks: The global rank of each group rank; empty for the default group,
            which has all ranks.
        world_size: The number of members.

    A later group with the same name replaces the earlier one: torch reuses names after
    ``destroy_process_group``.
    """
    ranks = tuple(global_ranks) or tuple(range(world_size))
    if not ranks:
        return  # MPI assigns the ranks later
    with _lock:
        _members.pop(name, None)
        _members[name] = ranks
        if len(_members) > MAX_GROUPS:
            del _members[next(iter(_members))]


def members_of(name: str) -> tuple[int, ...] | None:
    """Return the global rank of each group rank; None if the group is unknown."""
    return _members.get(name)


def written_at_init(rank: int) -> tuple[str, ...]:
    """Return the keys of which a rank writes one when gloo connects the default group.

    torch adds the prefix to a store of its own, and not to one of the program.
    """
    return tuple(f"{prefix}0//cpu//0/{rank}" for prefix in ("", "default_pg/"))


def shown_phase(known: KeyMeaning) -> str:
    """Return what a rank executes, with the members of a group whose name is a hash."""
    return known.phase.replace(known.group_name, shown_group(known.group_name), 1)


def shown_group(name: str) -> str:
    """Return the name of a process group; ``of ranks 1,5`` for a hash of a known group.

    torch names a group by a SHA-1 sum if only its members create it.
    """
    members = members_of(name) if _SHA1.fullmatch(name) else None
    return name if members is None else f"of {ranges.ranks_text(members)}"


def forget_groups() -> None:
    """Forget all groups, as a forked child must."""
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it
    _lock = threading.RLock()
    _members.clear()
