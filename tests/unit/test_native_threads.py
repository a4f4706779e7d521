"""Threads and signal handlers that wrap the first stores of a process at once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

import tracedstore
from support.fork_server import run_python
from tracedstore.common.identity import StoreIdentity
from tracedstore.native.calls import NativeRecording
from tracedstore.recording.recorder import RECORDER

COUNTS = """
from prometheus_client import REGISTRY
for kind in ("hash_store", "file_store"):
    labels = {"store": kind, "operation": "set", "error_type": ""}
    name = "tracedstore_operation_duration_seconds_count"
    print(kind, REGISTRY.get_sample_value(name, labels))
"""

THREADS = """
import sys, threading
import tracedstore
from torch.distributed import FileStore, HashStore

tracedstore.configure(log_format="off")
stores = [
    HashStore() if number % 2 else FileStore(f"{sys.argv[1]}/{number}", 1)
    for number in range(8)
]
together = threading.Barrier(len(stores))

def use(number):
    together.wait()
    store = tracedstore.wrap(stores[number])
    for _ in range(3 if number % 2 else 5):
        store.set("key", "value")

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=use, args=(one,)) for one in range(len(stores))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

SIGNAL = """
import signal
import tracedstore
from torch.distributed import HashStore
from tracedstore import store as store_module

tracedstore.configure(log_format="off")
wrapped = []
load = store_module.load

def on_signal(_signal, _frame):
    wrapped.append(tracedstore.wrap(HashStore()))

def load_and_raise():
    module = load()
    signal.raise_signal(signal.SIGUSR1)
    return module

signal.signal(signal.SIGUSR1, on_signal)
store_module.load = load_and_raise
wrapped.append(tracedstore.wrap(HashStore()))
wrapped.append(tracedstore.wrap(HashStore()))
for store in wrapped:
    store.set("key", "value")
print([type(store) is tracedstore.TracedStore for store in wrapped])
"""


def run(script: str, folder: Path) -> list[str]:
    """Run a script in a new process, where nothing is loaded; return its lines."""
    source = str(Path(tracedstore.__file__).parents[1])
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": source}
    done = run_python("-c", script + COUNTS, folder, env=env)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_first_stores_of_threads(tmp_path: Path) -> None:
    """Every call is counted once, for the kind of its store."""
    assert run(THREADS, tmp_path) == ["hash_store 12", "file_store 20"]


def test_signal_handler(tmp_path: Path) -> None:
    """A handler that wraps a store while the base is loaded waits for that."""
    lines = run(SIGNAL, tmp_path)

    assert lines == ["[False, False, False]", "hash_store 3", "file_store None"]


class Module:
    """What `NativeRecording.wrap` uses of the extension."""

    METHODS = ()
    TracedStore = object

    def __init__(self) -> None:
        self.wrapped: list[tuple[int, str]] = []
        # Called once, in the middle of a wrap.
        self.meanwhile: Callable[[], object] = int

    @property
    def MAX_KINDS(self) -> int:  # noqa: N802 - the name in the extension
        """The number of kinds; other threads run before it is known."""
        meanwhile, self.meanwhile = self.meanwhile, int
        meanwhile()
        return 3

    def wrap(self, _inner: Any, kind: int, identity: StoreIdentity) -> Any:
        """Note the number of a kind."""
        self.wrapped.append((kind, identity.kind))
        return SimpleNamespace(_traced=None)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments: None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("c", [(0, "a"), (1, "b"), (2, "c"), (2, "c")]),
        # One too many: it gets the Python base.
        ("d", [(0, "a"), (1, "b"), (2, "d")]),
    ],
)
def test_kinds_of_stores(other: str, expected: list[tuple[int, str]]) -> None:
    """A kind has one number, and no more numbers are used than there are."""
    module = Module()
    recording = NativeRecording(module, RECORDER)

    def wrap(kind: str) -> None:
        recording.wrap(HashStore(), StoreIdentity(kind=kind, system="test"))

    wrap("a")
    wrap("b")
    module.meanwhile = lambda: wrap(other)
    wrap("c")
    wrap("e")

    assert module.wrapped == expected
