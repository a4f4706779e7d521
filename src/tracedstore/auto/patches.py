"""Where torch makes stores by itself, and how those places are taken and given back.

This module is loaded while Python starts, by ``tracedstore-run`` and
``opentelemetry-instrument``, in processes that may never use a store. So it imports
nothing but what is there already, and puts small shims in torch's places; the shims
load the rest of the package when one of them is called. That is never while torch is
still being imported, which nothing that imports torch would survive.

The shims stand where torch looks things up each time it needs them, so code that
imported ``init_process_group`` by name before is traced as well, and torch's public
functions stay the very same objects.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NamedTuple

_RENDEZVOUS: Final = "torch.distributed.rendezvous"
# The barrier's home, and a module that has a copy of it.
_BARRIER: Final = "torch.distributed.elastic.utils.store"
_BARRIERS_COPY: Final = "torch.distributed.elastic.utils.distributed"
_SCHEMES: Final = ("env", "tcp", "file")
# What an init method is called that is traced whether or not torch's own are.
_EXPLICIT: Final = "traced+"


class PatchTarget(NamedTuple):
    """A function of torch's that makes a store or is handed one.

    Attributes:
        module: In which module.
        owner: What of the module has it, a class or a dict, by its dotted name; ""
            for the module.
        name: Its name there.
        treatment: The function of `auto.replacements` that is called instead.
        otherwise: The one for a shim that is there, or was kept, while torch's own
            stores are not to be traced; "" for none.
    """

    module: str
    owner: str
    name: str
    treatment: str
    otherwise: str = ""


_ELASTIC: Final = "torch.distributed.elastic.rendezvous"
# Every process group is made here, the default one of a given store too.
_GROUPS: Final = PatchTarget(
    "torch.distributed.distributed_c10d",
    "",
    "_new_process_group_helper",
    "process_group",
    "watched_group",
)
PATCH_TARGETS: Final = (
    *(
        PatchTarget(_RENDEZVOUS, "_rendezvous_handlers", scheme, "rendezvous")
        for scheme in _SCHEMES
    ),
    _GROUPS,
    # How torchrun's agents meet; registered by the package when it is imported.
    *(
        PatchTarget(
            _ELASTIC, "rendezvous_handler_registry._registry", name, "agents_rendezvous"
        )
        for name in ("c10d", "etcd-v2")
    ),
    # What they meet through, and what they serve to their workers.
    PatchTarget(
        f"{_ELASTIC}.dynamic_rendezvous",
        "DynamicRendezvousHandler",
        "_create_tcp_store_server",
        "agents_store",
    ),
    PatchTarget(f"{_ELASTIC}.static_tcp_rendezvous", "", "TCPStore", "agents_store"),
    *(
        PatchTarget(f"{_ELASTIC}.c10d_rendezvous_backend", "", name, "agents_store")
        for name in ("_create_tcp_store", "_create_file_store")
    ),
)

_on = False
# What was swapped: where, its name there, torch's own, and ours.
_swapped: list[tuple[Any, str, Any, Any]] = []
# What else is to be done to give back everything.
_undo: list[Callable[[], None]] = []


def instrument() -> None:
    """Trace the stores that torch makes by itself, from now on.

    These are the stores behind ``env://``, ``tcp://`` and ``file://``, a ``store=``
    given to ``init_process_group``, those of torchrun's agents, and torch's own
    ``elastic.utils.store.barrier``. It does not matter whether torch.distributed has
    been imported; if not, nothing is until it is. Calling it twice is calling it
    once. Telemetry that cannot be set up is reported, and leaves stores bare.
    """
    global _on  # noqa: PLW0603 - torch's places are one a process
    if _on:
        return
    _on = True
    for target in PATCH_TARGETS:
        when_imported(target.module, functools.partial(_take, target))
    for module in (_BARRIER, _BARRIERS_COPY):
        when_imported(module, _replace_barrier)


def uninstrument() -> None:
    """Give torch its own functions back, the very same objects.

    Stores that are traced by then stay so, until their users let go of them.
    """
    global _on  # noqa: PLW0603 - likewise
    _on = False
    _finder.cancel()
    while _swapped:
        owner, name, original, ours = _swapped.pop()
        # What somebody else put there meanwhile is not ours to remove.
        if _get(owner, name) is ours:
            _set(owner, name, original)
    while _undo:
        _undo.pop()()


def watch_groups() -> None:
    """See the process groups that are made, though torch's own stores stay bare.

    Who asks for ``traced+env://`` by name has nobody else to close that store.
    """
    when_imported(_GROUPS.module, functools.partial(_take, _GROUPS))


def register_init_methods() -> None:
    """Let ``init_process_group`` know ``traced+env://`` and its likes."""
    when_imported(_RENDEZVOUS, _offer, for_good=True)


def when_imported(
    name: str, then: Callable[[ModuleType], None], *, for_good: bool = False
) -> None:
    """Do something with a module: now, or when it has been imported.

    Args:
        name: The module.
        then: What to do; must not raise.
        for_good: `uninstrument` does not call it off.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        _finder.wait_for(name, then, for_good=for_good)


class _Finder:
    """Waits for modules to be imported; finds none itself."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Callable[[ModuleType], None], bool]]] = {}

    def wait_for(
        self, name: str, then: Callable[[ModuleType], None], *, for_good: bool
    ) -> None:
        self._waiting.setdefault(name, []).append((then, for_good))
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self, *names: str) -> None:
        """Wait for these no more, or for none; but for what is for good."""
        for name in names or list(self._waiting):
            waiting = self._waiting.pop(name, [])
            kept = [found for found in waiting if found[1]]
            if kept:
                self._waiting[name] = kept
        self._leave_if_done()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        spec = _found_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader)
            spec.loader = loader
        return spec

    def imported(self, module: ModuleType) -> None:
        """Do what was to be done with a module."""
        for then, _ in self._waiting.pop(module.__name__, []):
            then(module)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


def _found_by_others(
    finder: _Finder,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> ModuleSpec | None:
    for other in list(sys.meta_path):
        find_spec = getattr(other, "find_spec", None)
        if other is not finder and find_spec is not None:
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


class _Loader:
    """Loads a module with another loader, and says so to the finder."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader gets the one it always had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _finder.imported(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder: Final = _Finder()


def _take(target: PatchTarget, module: ModuleType) -> None:
    """Put our shim in a target of torch's; where torch has no such target, do not."""
    owner: Any = module
    for name in target.owner.split(".") if target.owner else ():
        owner = getattr(owner, name, None)
    original = _get(owner, target.name)
    if original is None or any(original is ours for *_, ours in _swapped):
        return

    # One of them is a class, whose __dict__ does not belong on a function.
    @functools.wraps(original, updated=())
    def shim(*args: Any, **kwargs: Any) -> Any:
        name = target.treatment if _on else target.otherwise
        treat = _treatment(name) if name else None
        if treat is None:
            return original(*args, **kwargs)
        return treat(original, *args, **kwargs)

    _set(owner, target.name, shim)
    _swapped.append((owner, target.name, original, shim))


def _treatment(name: str) -> Callable[..., Any] | None:
    """Load the rest of the package, and give one of the functions of `replacements`."""
    try:
        # Not at the top: see the module's docstring.
        from tracedstore.auto import replacements  # noqa: PLC0415

        treatment: Callable[..., Any] = getattr(replacements, name)
    except Exception as error:
        uninstrument()
        _report(error)
        return None
    return treatment


def _replace_barrier(module: ModuleType) -> None:
    if module.__name__ == _BARRIER and _BARRIERS_COPY in sys.modules:
        return  # it is being imported, and not complete: its turn comes
    _finder.cancel(_BARRIERS_COPY)  # replacing imports it
    try:
        # torch never imports these by itself, so torch is complete by now.
        from tracedstore import barrier_patch  # noqa: PLC0415 - see the docstring

        barrier_patch.replace()
        _undo.append(barrier_patch.restore)
    except Exception as error:
        _report(error)


def _offer(module: ModuleType) -> None:
    handlers = getattr(module, "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return
    for scheme in _SCHEMES:

        def explicit(url: str, *args: Any, scheme: str = scheme, **kwargs: Any) -> Any:
            from tracedstore.auto import replacements  # noqa: PLC0415 - likewise

            return replacements.explicit(
                handlers[scheme], url.removeprefix(_EXPLICIT), *args, **kwargs
            )

        handlers.setdefault(_EXPLICIT + scheme, explicit)


def _report(error: Exception) -> None:
    """Tell that something is not traced here; the job goes on as without us."""
    import logging  # noqa: PLC0415 - not while Python starts

    logging.getLogger("tracedstore").error(
        "telemetry.disabled: torch is left as it is, because of %r", error
    )


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name)
    # As it is written there, not as it looks from outside: a plain function.
    return vars(owner).get(name) if owner is not None else None


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
