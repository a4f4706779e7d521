"""Stores below the traced one that announce each step of a barrier and count calls."""

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import etcd
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from tracedstore.coordination.arrivals import BarrierKeys
from tracedstore.coordination.rank_registry import REGISTRY
from tracedstore.recording.counters import UNRECORDED
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.store_proxy import RECORDED

# Longer than a case: nothing waits for it unless a fault makes it.
_STORE_TIMEOUT = timedelta(seconds=60)
# Seconds. An agent waits so long for the address that the agent of rank 0 writes.
RENDEZVOUS_STORE_TIMEOUT = 3

# Called at a step, with its name.
Announce = Callable[[str], None]


class Script:
    """Maps Store calls to steps, and counts the calls.

    Args:
        announce: Called at each step, once, before or after the call.
        prefix: The key prefix of the barrier, or the run id of a rendezvous.
        rank: The rank.

    Attributes:
        calls: The number of calls by method.
    """

    def __init__(self, announce: Announce, prefix: str, rank: int) -> None:
        keys = BarrierKeys(prefix)
        self.calls: Counter[str] = Counter()
        self._announce = announce
        self._announced: set[str] = set()
        self._lock = threading.Lock()
        self._state_calls: Counter[str] = Counter()
        self._state_key = f"torch.rendezvous.{prefix}"
        self._steps = {
            ("set", f"{REGISTRY}/{rank}"): ("", "registered"),
            ("append", keys.ledger): ("", "recorded"),
            ("add", keys.trace(rank)): ("", "recorded"),
            ("add", keys.num_members): ("counting", "counted"),
            ("wait", keys.last_member): ("waiting", "released"),
            ("append", keys.confirmations): ("", "confirmed"),
            ("set", keys.counted(rank)): ("", "confirmed"),
            ("set", keys.missing_report): ("publishing", "published"),
            ("set", keys.last_member): ("completing", "completed"),
        }

    def run(self, method: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Make a call, count it and announce its steps."""
        counters = RECORDER.counters.get(threading.get_ident())
        # The telemetry's own calls, which its threads make, are not recorded.
        if counters is None or counters.call is not UNRECORDED:
            with self._lock:
                self.calls[method] += 1
        before, after = self._steps_of(method, args)
        self.announce(before)
        try:
            result = call()
        except Exception:
            if before == "waiting":
                self.announce("timed_out")
            raise
        if method == "compare_set" and after and result == _bytes(args[2]):
            self.announce("joined")
        self.announce(after)
        return result

    def announce(self, step: str) -> None:
        """Announce a step, once."""
        with self._lock:
            if not step or step in self._announced:
                return
            self._announced.add(step)
        self._announce(step)

    def _steps_of(self, method: str, args: tuple[Any, ...]) -> tuple[str, str]:
        key = args[0] if args else ""
        if isinstance(key, list):
            key = key[0] if len(key) == 1 else ""
        # The first compare_set of a backend creates the key.
        if key == self._state_key and not (method == "compare_set" and not args[1]):
            self._state_calls[method] += 1
            number = self._state_calls[method]
            return f"{method}:{number}", f"{method} returned:{number}"
        if method == "add" and args[1] == 0:  # reads the count
            return "", ""
        return self._steps.get((method, key), ("", ""))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _hooked(name: str, script: Script) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(super(type(self), self), name)
        return script.run(name, args, lambda: inner(*args, **kwargs))

    return call


def _scripted(base: Any, script: Script) -> Any:
    """Return a subclass whose calls go through a script.

    It has the name of its base: tracedstore treats stores by their class's name.
    """
    # An EtcdStore inherits methods from C++, which call an override of themselves.
    own = RECORDED if base is not EtcdStore else vars(base).keys() & RECORDED
    methods = {
        name: _hooked(name, script)
        for name in own
        if hasattr(base, name) and name != "clone"
    }
    return type(base.__name__, (base,), {"__module__": base.__module__, **methods})


def connect(kind: str, address: str, script: Script) -> Any:
    """Connect one rank to the store of its case."""
    if kind == "tcp":
        host, port = address.split(":")
        tcp = _scripted(dist.TCPStore, script)

        def open_tcp() -> Any:
            return tcp(host, int(port), None, False, _STORE_TIMEOUT)

        # As C++ clones: another connection to the same server.
        tcp.clone = lambda _self: script.run("clone", (), open_tcp)
        return open_tcp()
    if kind == "file":
        store = _scripted(dist.FileStore, script)(address, -1)
    else:
        port, prefix = address.split(",")
        client = etcd.Client(host="127.0.0.1", port=int(port), read_timeout=60)
        store = _scripted(EtcdStore, script)(client, prefix)
    store.set_timeout(_STORE_TIMEOUT)
    return store
