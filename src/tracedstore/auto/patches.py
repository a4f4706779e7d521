"""Replaces the functions with which torch creates stores, and restores them.

``tracedstore-run`` and ``opentelemetry-instrument`` load this module at Python's
start-up, in processes that may never use a store. So it imports only what Python has
imported already, and installs small shims into torch. A shim loads the rest of the
package when it is first called. That is never during the import of torch, when
importing the rest, which imports torch, would fail.

The shims are installed where torch looks the functions up on each call. So code that
imported ``init_process_group`` by name before is traced too, and torch's public
functions remain the same objects.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

_RENDEZVOUS: Final = "torch.distributed.rendezvous"
# The module that defines torch's barrier, and a module that imports it by name.
_BARRIER: Final = "torch.distributed.elastic.utils.store"
_BARRIER_COPY: Final = "torch.distributed.elastic.utils.distributed"
# The module of torchrun's agent, which starts the workers.
_AGENT: Final = "torch.distributed.elastic.agent.server.local_elastic_agent"
_HANDLERS: Final = "_rendezvous_handlers"
_SCHEMES: Final = ("env", "tcp", "file")
# The prefix of init methods that are traced without `instrument` too.
_TRACED_PREFIX: Final = "traced+"


class PatchTarget(NamedTuple):
    """A function of torch that creates a store or receives one.

    Attributes:
        module: The name of the module.
        owner: The class or dict in the module that has the function, as a dotted name;
            "" for the module itself.
        name: The name of the function in its owner.
        replacement: The function of `auto.replacements` that is called instead.
        fallback: The function of `auto.replacements` that a shim calls while
            `instrument` is not in effect; "" for torch's original.
    """

    module: str
    owner: str
    name: str
    replacement: str
    fallback: str = ""


_ELASTIC: Final = "torch.distributed.elastic.rendezvous"
# Creates every process group, also the default one with a ``store=`` argument.
_PROCESS_GROUPS: Final = PatchTarget(
    "torch.distributed.distributed_c10d",
    "",
    "_new_process_group_helper",
    "process_group",
    "tracked_process_group",
)
# The barrier after the creation of a group, if TORCH_DIST_INIT_BARRIER is 1.
_GROUP_BARRIER: Final = PatchTarget(
    _PROCESS_GROUPS.module, "", "_store_based_barrier", "store_based_barrier"
)
PATCH_TARGETS: Final = (
    *(PatchTarget(_RENDEZVOUS, _HANDLERS, scheme, "rendezvous") for scheme in _SCHEMES),
    _PROCESS_GROUPS,
    _GROUP_BARRIER,
    # The rendezvous of torchrun's agents, which the package registers on its import.
    *(
        PatchTarget(
            _ELASTIC, "rendezvous_handler_registry._registry", name, "agent_rendezvous"
        )
        for name in ("c10d", "etcd-v2")
    ),
    # The stores of that rendezvous, and the store that an agent serves to its workers.
    PatchTarget(
        f"{_ELASTIC}.dynamic_rendezvous",
        "DynamicRendezvousHandler",
        "_create_tcp_store_server",
        "agent_store",
    ),
    PatchTarget(f"{_ELASTIC}.static_tcp_rendezvous", "", "TCPStore", "agent_store"),
    *(
        PatchTarget(f"{_ELASTIC}.c10d_rendezvous_backend", "", name, "agent_store")
        for name in ("_create_tcp_store", "_create_file_store")
    ),
)

# Frames from a fork hook to the function of multiprocessing that forks.
_MAX_FORK_FRAMES: Final = 8

_enabled = False
# The hook for forked workers is set.
_answers_in_children = False
# The installed shims: owner, name, torch's original, shim.
_installed: list[tuple[Any, str, Any, Any]] = []
# The names of torch that were logged as missing.
_missing: set[str] = set()
# What else `uninstrument` has to undo.
_undo: list[Callable[[], None]] = []


def instrument() -> None:
    """Trace the stores that torch creates from now on.

    These are the stores of ``env://``, ``tcp://`` and ``file://``, a ``store=`` that is
    passed to ``init_process_group``, and the stores of torchrun's agents. torch's
    ``elastic.utils.store.barrier`` is traced too. It can be called before or after the
    import of torch.distributed, and imports nothing itself. A second call has no
    effect. If the telemetry cannot be set up, that is logged and torch's stores remain
    untraced.
    """
    global _enabled  # noqa: PLW0603 - torch is patched once per process
    if _enabled:
        return
    _enabled = True
    for target in PATCH_TARGETS:
        when_imported(target.module, functools.partial(_install, target))
    for module in (_BARRIER, _BARRIER_COPY):
        when_imported(module, _replace_barrier)
    when_imported(_AGENT, _answer_for_workers)
    if "RANK" in os.environ:
        when_imported("torch.distributed", _answer_questions)
    else:
        when_imported("torch.distributed", _answer_in_children)


def uninstrument() -> None:
    """Restore torch's original functions, the same objects as before.

    A store that is traced already remains traced until torch frees it.
    """
    global _enabled  # noqa: PLW0603 - torch is patched once per process
    _enabled = False
    _import_hook.cancel()
    while _installed:
        owner, name, original, shim = _installed.pop()
        # Another library may have patched the same function since.
        if _get(owner, name) is shim:
            _set(owner, name, original)
    while _undo:
        _undo.pop()()


def track_process_groups() -> None:
    """Patch the creation of process groups only, without tracing torch's stores.

    The store of ``traced+env://`` is closed after its last process group, also without
    `instrument`.
    """
    when_imported(_PROCESS_GROUPS.module, functools.partial(_install, _PROCESS_GROUPS))


def register_init_methods() -> None:
    """Register ``traced+env://``, ``traced+tcp://`` and ``traced+file://`` in torch."""
    when_imported(_RENDEZVOUS, _register_traced_handlers, permanent=True)


def when_imported(
    name: str, action: Callable[[ModuleType], None], *, permanent: bool = False
) -> None:
    """Call an action with a module: now, or after its import.

    Args:
        name: The name of the module.
        action: The action; must not raise.
        permanent: `uninstrument` does not cancel it.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        _import_hook.add(name, action, permanent=permanent)


class _ImportHook:
    """A meta path finder that runs actions after the import of modules.

    It is on ``sys.meta_path`` only while an action is pending.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[tuple[Callable[[ModuleType], None], bool]]] = {}

    def add(
        self, name: str, action: Callable[[ModuleType], None], *, permanent: bool
    ) -> None:
        self._pending.setdefault(name, []).append((action, permanent))
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self, *names: str) -> None:
        """Cancel the actions for these modules, or all; permanent ones remain."""
        for name in names or list(self._pending):
            pending = self._pending.pop(name, [])
            kept = [entry for entry in pending if entry[1]]
            if kept:
                self._pending[name] = kept
        self._remove_if_idle()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in self._pending:
            return None
        spec = _find_spec_elsewhere(self, name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _HookLoader(spec.loader)
            spec.loader = loader
        return spec

    def run(self, module: ModuleType) -> None:
        """Run the actions for a module."""
        for action, _ in self._pending.pop(module.__name__, []):
            action(module)
        self._remove_if_idle()

    def _remove_if_idle(self) -> None:
        if not self._pending and self in sys.meta_path:
            sys.meta_path.remove(self)


def _find_spec_elsewhere(
    hook: _ImportHook,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> ModuleSpec | None:
    """Find a module through the other finders on ``sys.meta_path``."""
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        if finder is not hook and find_spec is not None:
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


class _HookLoader:
    """Loads a module with its own loader, then runs the import hook's actions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        # Code that inspects the module sees its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _import_hook.run(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_import_hook: Final = _ImportHook()


def _install(target: PatchTarget, module: ModuleType) -> None:
    """Replace a function of torch with a shim; log it if torch has none."""
    owner: Any = module
    for name in target.owner.split(".") if target.owner else ():
        owner = getattr(owner, name, None)
    original = _get(owner, target.name)
    if original is None:
        name = target.name if owner is not None else ""
        _log_missing(target.module, target.owner, name)
        return
    if any(original is shim for *_, shim in _installed):
        return

    # One original is a class, whose __dict__ must not be copied to a function.
    @functools.wraps(original, updated=())
    def shim(*args: Any, **kwargs: Any) -> Any:
        name = target.replacement if _enabled else target.fallback
        replacement = _load_replacement(name) if name else None
        if replacement is None:
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    _set(owner, target.name, shim)
    _installed.append((owner, target.name, original, shim))


def _raise_if_from_handler(error: Exception) -> None:
    """Raise an exception again that is a signal handler's.

    What is imported here is imported in this thread: it holds locks of imports, for
    which another one would wait.
    """
    from tracedstore.common.signal_safety import raised_by_handler  # noqa: PLC0415 - see the docstring of the module

    if raised_by_handler(error):
        raise error


def _load_replacement(name: str) -> Callable[..., Any] | None:
    """Load the rest of the package and return a function of `replacements`.

    If that fails, log it, restore torch and return None.
    """
    try:
        # Not at the top: see the docstring of the module.
        from tracedstore.auto import replacements  # noqa: PLC0415

        replacement: Callable[..., Any] = getattr(replacements, name)
    except Exception as error:
        _raise_if_from_handler(error)
        uninstrument()
        _log_disabled(error)
        return None
    return replacement


def _replace_barrier(module: ModuleType) -> None:
    if module.__name__ == _BARRIER and _BARRIER_COPY in sys.modules:
        return  # the other module is still being imported; this runs again after it
    _import_hook.cancel(_BARRIER_COPY)  # replace_torch_barrier() imports it
    try:
        # torch does not import these modules itself, so its import is complete.
        from tracedstore import elastic  # noqa: PLC0415 - see the docstring

        elastic.replace_torch_barrier()
        _undo.append(elastic.restore_torch_barrier)
    except Exception as error:
        _raise_if_from_handler(error)
        _log("torch's barrier is not replaced: %s", error)


def _answer_for_workers(_module: ModuleType) -> None:
    """Let torchrun's agent answer for its workers."""
    try:
        # torchrun imports the module of its agent after torch.
        from tracedstore.rendezvous import handlers  # noqa: PLC0415 - see the docstring

        handlers.replace_start_of_workers()
        _undo.append(handlers.restore_start_of_workers)
    except Exception as error:
        _raise_if_from_handler(error)
        _log_disabled(error)


def _answer_questions(_module: ModuleType) -> None:
    try:
        answer_before_registration()
    except Exception as error:
        _raise_if_from_handler(error)
        _log_disabled(error)


def answer_before_registration() -> None:
    """Let a rank answer questions from the import of torch on, before it has a store.

    A rank that is late, because it reads data before it creates its store, is what the
    others wait for. It has not registered, so only its own host can find it.
    """
    # torch's import is not complete, and these modules do not import torch.
    from tracedstore import names  # noqa: PLC0415 - see the docstring of the module
    from tracedstore.common.errors import ConfigurationError  # noqa: PLC0415
    from tracedstore.export.settings import Settings  # noqa: PLC0415
    from tracedstore.local.sockets import LOCAL_SOCKET  # noqa: PLC0415
    from tracedstore.recording.recorder import RECORDER  # noqa: PLC0415

    try:
        settings = Settings.load({})
    except ConfigurationError:
        return  # reported when the telemetry is set up
    LOCAL_SOCKET.enable(on=settings.answers and not settings.disabled)
    # A process that a rank started, such as a data loader's worker, has the RANK of its
    # parent. Where multiprocessing starts the ranks themselves, they listen when they
    # register.
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        RECORDER.failures.guarded(names.DIAGNOSIS, LOCAL_SOCKET.start)


def _answer_in_children(_module: ModuleType) -> None:
    """Let workers that multiprocessing forks answer before they register.

    They get their rank after the fork, so it is not known here which of them are ranks.
    The answer to a question has the rank of the moment at which it is asked.
    """
    global _answers_in_children  # noqa: PLW0603 - a hook cannot be removed
    if _answers_in_children:
        return
    _answers_in_children = True
    try:
        # Imported before the fork: another thread may hold the lock of an import then.
        from tracedstore.local.sockets import LOCAL_SOCKET  # noqa: F401, PLC0415

        os.register_at_fork(after_in_child=_after_fork)
    except Exception as error:
        _raise_if_from_handler(error)
        _log_disabled(error)


def _after_fork() -> None:
    # The workers of a rank's data loader are no ranks.
    if _enabled and "RANK" not in os.environ and _is_forked_worker():
        try:
            answer_before_registration()
        except Exception as error:
            _raise_if_from_handler(error)
            _log_disabled(error)


def _is_forked_worker() -> bool:
    """Return whether multiprocessing forks this process."""
    module = sys.modules.get("multiprocessing.popen_fork")
    file = getattr(module, "__file__", None)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way
    for _ in range(_MAX_FORK_FRAMES):
        if frame is None or file is None:
            return False
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _register_traced_handlers(module: ModuleType) -> None:
    handlers = getattr(module, _HANDLERS, None)
    if not isinstance(handlers, dict):
        _log_missing(_RENDEZVOUS, _HANDLERS)
        return
    for scheme in _SCHEMES:

        def handler(url: str, *args: Any, scheme: str = scheme, **kwargs: Any) -> Any:
            from tracedstore.auto import replacements  # noqa: PLC0415 - see the module docstring

            return replacements.explicit_rendezvous(
                handlers[scheme], url.removeprefix(_TRACED_PREFIX), *args, **kwargs
            )

        handlers.setdefault(_TRACED_PREFIX + scheme, handler)


def _log_disabled(error: Exception) -> None:
    """Log that torch is not instrumented; the job continues untraced."""
    _log("torch is not instrumented: %r", error)


def _log_missing(*parts: str) -> None:
    """Log that torch lacks a name to patch, once; its stores remain untraced."""
    name = ".".join(filter(None, parts))
    if name not in _missing:
        _missing.add(name)
        version = getattr(sys.modules.get("torch"), "__version__", "")
        _log("torch %s has no %s: its stores are not traced", version, name)


def _log(message: str, *args: object) -> None:
    import logging  # noqa: PLC0415 - not at Python's start-up

    logging.getLogger("tracedstore").error(f"telemetry.disabled: {message}", *args)  # noqa: G004 - a constant prefix


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name)
    # From the __dict__, because getattr() of a class may bind the function.
    return vars(owner).get(name) if owner is not None else None


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
