"""The functions that the shims of `patches` call instead of torch's.

They wrap the stores that torch creates and register the rank of this process. Each
function takes torch's original as its first argument. If the telemetry fails, torch
gets the store that it would have without tracedstore.

The job does not close a wrapper that it did not create. On the Python base a wrapper
stays alive until it is released, because torch's C++ does not keep its Python object.
One that stays alive does harm: its server keeps the port, and the next
``init_process_group`` at that port reads the keys of the previous one. So a wrapper
lives as long as the process groups on it, and the PrefixStores that these were created
with. The bare store would be freed at the same time. A native wrapper lives as long as
C++ refers to it, and needs none of this.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

from torch.distributed import ProcessGroup, Store

from tracedstore import names
from tracedstore.auto import patches
from tracedstore.common.identity import bottom_of
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.connection import addresses, connecting, group_creation
from tracedstore.diagnosis.observe import incarnations, torch_keys
from tracedstore.export.setup import ensure_configured, set_identity
from tracedstore.recording.recorder import RECORDER
from tracedstore.store import TracedStore, is_native, release, wrap

RendezvousResult = tuple[Store, int, int]

# Runs an optional step; on failure counts it and returns None.
_guarded = partial(RECORDER.failures.guarded, names.AUTO)

# The states of the stores that were wrapped here. A store that the job wrapped is the
# job's to close.
_owned: WeakTable[None] = WeakTable()
# What keeps an owned wrapper alive: the wrapper, and a weak reference to a process
# group or a PrefixStore that uses it. By a number.
_users: dict[int, tuple[TracedStore, ref[Any]]] = {}
_numbers = itertools.count()


def rendezvous(
    original: Callable[..., Iterator[RendezvousResult]], *args: Any, **kwargs: Any
) -> Iterator[RendezvousResult]:
    """Replace the rendezvous handler of an init method."""
    results = original(*args, **kwargs)
    # The constructor of the store may wait for other ranks, or fail.
    target = _guarded(_target_of_url, args[0], kwargs.get("timeout"))
    with connecting.watched(target):
        first = next(results, None)
    if first is None:
        return
    for store, rank, world_size in chain([first], results):
        yield _trace_and_register(store, rank, world_size), rank, world_size


def explicit_rendezvous(
    original: Callable[..., Iterator[RendezvousResult]], *args: Any, **kwargs: Any
) -> Iterator[RendezvousResult]:
    """Handle ``traced+env://`` and the like, with or without `instrument`."""
    patches.track_process_groups()
    return rendezvous(original, *args, **kwargs)


def process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace the creation of a process group; trace the default group's store."""
    call = _bind(original, args, kwargs)
    if call is not None and _is_default_group(call):
        _guarded(_trace_store_of, call)
    return _create_group(original, args, kwargs, call)


def tracked_process_group(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replace the creation of a process group, without tracing its store."""
    return _create_group(original, args, kwargs, _bind(original, args, kwargs))


def store_based_barrier(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace torch's barrier after the creation of a process group.

    torch calls it with the store that the program gave to ``init_process_group``, and
    raises an exception of its own for a wait that times out.
    """
    call = _bind(original, args, kwargs)
    if call is None:
        return original(*args, **kwargs)
    _guarded(_use_wrapper, call)
    try:
        return original(*call.args, **call.kwargs)
    except Exception as error:
        _guarded(_copy_notes, error)
        raise


def agent_rendezvous(original: Callable[..., Any], params: Any) -> Any:
    """Replace the creation of the rendezvous handler of torchrun's agent."""
    creator = _guarded(_traced_creator, params)
    return (creator if creator and RECORDER.on else original)(params)


def _traced_creator(params: Any) -> Callable[..., Any]:
    ensure_configured()
    # Imported here, because workers do not need it.
    from tracedstore.rendezvous import plugins  # noqa: PLC0415

    creator: Callable[..., Any] = plugins.CREATORS[params.backend]
    return creator


def agent_store(original: Callable[..., Store], *args: Any, **kwargs: Any) -> Store:
    """Replace the creation of a store of torchrun's agent."""
    with connecting.watched(_guarded(_target_of_agent, original, args, kwargs)):
        bare = original(*args, **kwargs)
    store = _trace(bare)
    if isinstance(store, TracedStore) and store is not bare:
        # The agent's rendezvous references the store while it is in use, so the wrapper
        # need not be kept alive. If it were, it would keep the state of a rendezvous
        # that is closed.
        store.close()
    return store


def _target_of_url(url: str, timeout: Any) -> addresses.ConnectTarget | None:
    ensure_configured()
    target = addresses.from_url(url, timeout)
    if target is not None and target.rank is not None and target.world_size:
        # Before the first event: a URL may have the rank, and no variable.
        set_identity(target.rank, target.world_size)
    return target


def _target_of_agent(
    original: Callable[..., Store], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> addresses.ConnectTarget | None:
    """Return what a store of torchrun's agent connects to, if that is diagnosed here.

    The TCPStore of a static rendezvous waits for all agents. The store for the workers
    connects to the address that the agent publishes. `rendezvous` reports failures of
    the others.
    """
    ensure_configured()
    if isinstance(original, type):
        return addresses.of_agent(*args, **kwargs)
    if original.__name__ == "_create_tcp_store_server":
        return addresses.of_worker_store(*args[-2:])
    return None


def _bind(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    bound: inspect.BoundArguments | None = off_main_thread(
        _bind_signature, original, args, kwargs
    )
    return bound


def _bind_signature(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        return inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return None  # torch raises its own error for the arguments


def _is_default_group(call: inspect.BoundArguments) -> bool:
    arguments = call.arguments
    return not (
        arguments.get("global_ranks_in_group")
        # MPI gets an instance of the base class; "fake" needs no other process.
        or type(arguments.get("store")) is Store
        or str(arguments.get("backend")) == "fake"
    )


def _trace_store_of(call: inspect.BoundArguments) -> None:
    """Trace the store argument of a new group, and register the rank in it.

    A store that the program has traced itself is used as it is.
    """
    arguments = call.arguments
    rank, world_size = arguments["group_rank"], arguments["group_size"]
    traced = _traced_bottom(arguments["store"])
    if traced is None:
        arguments["store"] = _trace_and_register(arguments["store"], rank, world_size)
    elif not rank_registry.is_registered(traced, rank):
        _register(traced, rank, world_size)


def _use_wrapper(call: inspect.BoundArguments) -> None:
    """Let a call use the wrapper of its store argument, if that is wrapped."""
    wrapper = wrapper_of(call.arguments["store"])
    if wrapper is not None:
        call.arguments["store"] = wrapper


def _copy_notes(error: Exception) -> None:
    """Copy our notes from the exception in place of which another one was raised."""
    if getattr(error, "__notes__", ()):
        return  # the exception of a store, with a verdict of its own
    for note in getattr(error.__context__, "__notes__", ()):
        if note.startswith("tracedstore:"):
            error.add_note(note)


def _create_group(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: inspect.BoundArguments | None,
) -> Any:
    """Create the group; an owned store is closed after its last group."""
    if call is None:
        return original(*args, **kwargs)
    _guarded(_record_members, call.arguments)
    traced = _traced_bottom(call.arguments.get("store"))
    try:
        with _watch_creation(call):
            created = original(*call.args, **call.kwargs)
    except BaseException:
        if traced is not None and _is_owned(traced) and not _is_used(traced):
            traced.close()
        raise
    if traced is not None:
        _guarded(_release_after, traced, created)
    return created


def _record_members(arguments: dict[str, Any]) -> None:
    """Record the members of a group, before its creation can block.

    A process outside the group records it too: it takes part in the barrier after it.
    """
    torch_keys.record_members(
        str(arguments["group_name"]),
        arguments["global_ranks_in_group"],
        arguments["group_size"],
    )


def _watch_creation(call: inspect.BoundArguments) -> AbstractContextManager[None]:
    """Diagnose the creation of a group of this process; not one of other ranks."""
    creation = _guarded(_creation_of, call.arguments)
    return nullcontext() if creation is None else group_creation.watched(creation)


def _creation_of(arguments: dict[str, Any]) -> group_creation.GroupCreation | None:
    ranks = tuple(arguments.get("global_ranks_in_group") or ())
    # torch passes None to a process outside the group, which creates nothing.
    outside = arguments["group_rank"] is None
    if outside or _traced_bottom(arguments.get("store")) is None:
        return None
    return group_creation.GroupCreation(
        store=arguments["store"],
        name=str(arguments["group_name"]),
        size=len(ranks) or arguments["group_size"],
        rank=arguments["group_rank"],
        ranks=ranks,
    )


def own(store: TracedStore) -> None:
    """Take over releasing a store."""
    _owned.set(store._traced, None)  # noqa: SLF001 - of this package


def wrapper_of(store: Store) -> TracedStore | None:
    """Return the open wrapper of a bare store that was wrapped here."""
    for state, _ in _owned.items():  # noqa: PERF102 - no dictionary
        if state.inner is store:
            wrapper: TracedStore | None = state.wrapper()
            return wrapper
    return None


def _is_owned(store: TracedStore) -> bool:
    return store._traced in _owned  # noqa: SLF001 - of this package


def _is_used(store: TracedStore) -> bool:
    return any(used is store for used, _ in _users.values())


def _release_after(traced: TracedStore, created: Any) -> None:
    """Release an owned store when a new group and all its other users are gone."""
    if not _is_owned(traced) or is_native(traced):
        return
    # The group and its PrefixStore; a process outside the group gets neither.
    users = [part for part in created if isinstance(part, (Store, ProcessGroup))]
    for user in users:
        number = next(_numbers)
        # No Python code runs when a user is gone, and so no signal handler, whose
        # exception would be lost there: the callback is a function of C, which takes
        # the reference for the default of ``dict.pop``.
        _users[number] = traced, ref(user, partial(_users.pop, number))
    if users:
        release(traced)


def _traced_bottom(store: Store | None) -> TracedStore | None:
    """Return the traced store below all PrefixStores, if it is traced."""
    bottom = None if store is None else bottom_of(store)
    return bottom if isinstance(bottom, TracedStore) else None


def _trace_and_register(store: Store, rank: int, world_size: int) -> Store:
    """Trace the store of a rank, and register the rank in it."""
    if rank >= 0 and world_size > 0:
        # Before the first event of the store.
        _guarded(set_identity, rank, world_size)
    traced = _trace(store)
    if isinstance(traced, TracedStore):
        _register(traced, rank, world_size)
    return traced


def _register(traced: TracedStore, rank: int, world_size: int) -> None:
    """Register a rank in its store, unless it is unknown."""
    if rank >= 0 and world_size > 0:
        _guarded(_check_and_register, traced, rank, world_size)


def _check_and_register(traced: TracedStore, rank: int, world_size: int) -> None:
    set_identity(rank, world_size)
    rank_registry.register(traced, rank, world_size, check=_check_earlier)


def _check_earlier(traced: TracedStore, rank: int, world_size: int) -> None:
    with RECORDER.unrecorded():
        incarnations.check_earlier(traced, rank, world_size)


def _trace(store: Store) -> Store:
    """Wrap a store; return it unchanged if the telemetry is off or fails."""
    traced: TracedStore | None = _guarded(_wrap_and_own, store)
    return store if traced is None else traced


def _wrap_and_own(store: Store) -> TracedStore | None:
    ensure_configured()
    if isinstance(store, TracedStore) or not RECORDER.on:
        return None
    traced = wrap(store)
    own(traced)
    return traced
