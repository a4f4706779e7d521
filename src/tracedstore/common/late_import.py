"""Modules that are imported when they are first used, because most processes never do.

Every worker of a job imports this package at each start, and most of them end without a
stall, a failed connection or a page of metrics. Importing what only those need would
cost a worker about as much processor time as the rest of the package.

A module may be late if it is first used in a thread of the telemetry, a helper thread
of the main thread included. The main thread may wait for that one, and must not hold a
lock of an import that this one needs. So a late module is used in no other thread, and
imports only modules of this package that are late as well, and others that are imported
already. `tests/unit/test_late_import.py` holds that.
"""

import importlib
import os
import sys
import threading
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


_names: set[str] = set()


class _Late:
    """Stands for a module, or for a function or class in it."""

    __slots__ = ("_late_module", "_late_name")

    def __init__(self, module: str, name: str) -> None:
        self._late_module, self._late_name = module, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def _load(self) -> Any:
        module = importlib.import_module(self._late_module)
        return getattr(module, self._late_name) if self._late_name else module


def late_import(module: str, name: str = "") -> Any:
    """Return what stands for a module, or for a function or class of it.

    The module is imported when an attribute is read, or the function is called. For
    type checkers, and for the rules of the architecture, it is imported under
    ``TYPE_CHECKING``.
    """
    _names.add(module)
    return _Late(module, name)


def late_names() -> frozenset[str]:
    """Return the names of all late modules of the modules that are imported."""
    return frozenset(_names)


def _drop_unfinished() -> None:
    """Forget the imports of this package that another thread of the parent had begun.

    A forked child has no such thread, and would wait for the lock of its import without
    end.
    """
    locks = vars(vars(importlib).get("_bootstrap", object)).get("_module_locks", {})
    own = threading.get_ident()
    for name, reference in list(locks.items()):
        owner = getattr(reference(), "owner", None)
        if name.startswith(_PACKAGE) and owner not in (None, own):
            locks.pop(name, None)
            sys.modules.pop(name, None)


os.register_at_fork(after_in_child=_drop_unfinished)
