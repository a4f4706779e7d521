"""What is done in torch's places: wrap the store, and say who this process is.

Each function here stands in for one of torch's, which it is given first. Whatever goes
wrong with the telemetry, torch gets the store it would have had.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import ProcessGroup, Store

from tracedstore import names
from tracedstore.auto import lifetime, patches
from tracedstore.coordination import rank_registry
from tracedstore.core.identity import bottom_of
from tracedstore.core.recorder import RECORDER
from tracedstore.export.setup import ensure_configured, set_identity
from tracedstore.store import TracedStore, wrap

RendezvousResult = tuple[Store, int, int]


def rendezvous(
    original: Callable[..., Iterator[RendezvousResult]], *args: Any, **kwargs: Any
) -> Iterator[RendezvousResult]:
    """Stand in for the handler of an init method."""
    for store, rank, world_size in original(*args, **kwargs):
        yield _of_rank(store, rank, world_size), rank, world_size


def explicit(
    original: Callable[..., Iterator[RendezvousResult]], *args: Any, **kwargs: Any
) -> Iterator[RendezvousResult]:
    """Handle ``traced+env://`` and its likes, with or without `instrument`."""
    patches.watch_groups()
    return rendezvous(original, *args, **kwargs)


def process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for what makes a process group of a store."""
    call = _bound(original, args, kwargs)
    if call is not None and _is_default_group(call):
        _trace_store_of(call)
    return _group(original, args, kwargs, call)


def watched_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for the same, and leave a store that is not traced as it is."""
    return _group(original, args, kwargs, _bound(original, args, kwargs))


def agents_rendezvous(original: Callable[..., Any], params: Any) -> Any:
    """Stand in for what makes the rendezvous of torchrun's agent."""
    try:
        ensure_configured()
        # Here, because workers have no use for it.
        from tracedstore.rendezvous import plugins  # noqa: PLC0415

        creator = plugins.CREATORS[params.backend]
    except Exception as error:
        RECORDER.failures.add(names.AUTO, error)
        creator = None
    return (creator if creator and RECORDER.on else original)(params)


def agents_store(original: Callable[..., Store], *args: Any, **kwargs: Any) -> Store:
    """Stand in for what makes a store of torchrun's agent."""
    made = original(*args, **kwargs)
    store = _traced(made)
    if isinstance(store, TracedStore) and store is not made:
        # The agent's rendezvous refers to it for as long as it is used, so it need
        # not outlive that; one that did would keep the state of a closed rendezvous.
        store.close()
    return store


def _bound(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    try:
        return inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return None  # torch's to say what is wrong with it


def _is_default_group(call: inspect.BoundArguments) -> bool:
    given = call.arguments
    return not (
        given.get("global_ranks_in_group")
        # MPI is given a Store that is none, and "fake" needs no other process.
        or type(given.get("store")) is Store
        or str(given.get("backend")) == "fake"
    )


def _trace_store_of(call: inspect.BoundArguments) -> None:
    """Trace the store that a group is to be made of, unless a handler has."""
    given = call.arguments
    try:
        if _traced_below(given["store"]) is None:
            given["store"] = _of_rank(
                given["store"], given["group_rank"], given["group_size"]
            )
    except Exception as error:
        RECORDER.failures.add(names.AUTO, error)


def _group(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: inspect.BoundArguments | None,
) -> Any:
    """Make the group, and let the store go with it, if it is ours to close."""
    if call is None:
        return original(*args, **kwargs)
    below = _traced_below(call.arguments.get("store"))
    try:
        made = original(*call.args, **call.kwargs)
    except BaseException:
        if below is not None:
            lifetime.close_if_unused(below)
        raise
    if below is not None:
        # The group and its PrefixStore; a process that is no member gets neither.
        lifetime.close_after(below, *(user for user in made if _is_torchs(user)))
    return made


def _is_torchs(user: Any) -> bool:
    return isinstance(user, (Store, ProcessGroup))


def _traced_below(store: Store | None) -> TracedStore | None:
    below = None if store is None else bottom_of(store)
    return below if isinstance(below, TracedStore) else None


def _of_rank(store: Store, rank: int, world_size: int) -> Store:
    """Trace a store that a rank was given, and let the rank register in it."""
    known = rank >= 0 and world_size > 0
    try:
        if known:
            set_identity(rank, world_size)
    except Exception as error:
        RECORDER.failures.add(names.AUTO, error)
    traced = _traced(store)
    if known and isinstance(traced, TracedStore):
        try:
            rank_registry.register(traced, rank, world_size)
        except Exception as error:
            RECORDER.failures.add(names.AUTO, error)
    return traced


def _traced(store: Store) -> Store:
    try:
        ensure_configured()
        if isinstance(store, TracedStore) or not RECORDER.on:
            return store
        traced = wrap(store)
        lifetime.adopt(traced)
    except Exception as error:
        RECORDER.failures.add(names.AUTO, error)
        return store
    return traced
