"""A process that is signalled while it uses a store, and counts what became of that.

The next signal comes only after the last one is settled: its exception reached the
program, or the program went on without it.
"""

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from faults.processes import Channel

BASES = ("bare", "python", "native")
SETTINGS = ("default", "spans")
LOOPS = ("hash", "tcp", "wait", "barrier", "constructor", "instrument", "group")
HANDLERS = ("exception", "timeout", "runtime", "store", "fork")
_SHORT = timedelta(milliseconds=50)
_LONG = timedelta(seconds=30)
# Calls between two looks at whether an exception was lost.
_CALLS = 20


class Interruption(Exception):  # noqa: N818 - no error
    """What a handler raises."""


class TimeoutInterruption(Interruption, TimeoutError):  # noqa: N818 - as above
    """The same as a TimeoutError."""


class RuntimeInterruption(Interruption, RuntimeError):  # noqa: N818 - as above
    """The same as a RuntimeError, as which torch raises its own."""


_RAISED = {
    "exception": Interruption,
    "timeout": TimeoutInterruption,
    "runtime": RuntimeInterruption,
}


class Child:
    """One child.

    Args:
        base: ``bare``, ``python`` or ``native``.
        setting: ``default`` or ``spans``: every call is slow and gets a span.
        loop: What it does while it is signalled.
        handler: What its signal handler does.
        signals: How many signals it gets.
        channel: The pipes to the parent.
    """

    def __init__(
        self,
        base: str,
        setting: str,
        loop: str,
        handler: str,
        signals: int,
        channel: Channel,
    ) -> None:
        self._traced = base != "bare"
        self._base = base
        self._setting = setting
        self._loop = loop
        self._handler = handler
        self._signals = signals
        self._channel = channel
        self._registry = CollectorRegistry()
        self._runs = 0
        self._settled = 0
        self._caught: Exception | None = None
        self._ready = False
        self._counts: Counter[str] = Counter()
        self._seen: Counter[int] = Counter()
        self._numbers = count()

    def run(self) -> NoReturn:
        """Work until all signals are settled; report, and end."""
        if self._traced:
            self._configure()
        self._store = self._make_store()
        if self._loop in ("instrument", "group") and self._traced:
            tracedstore.instrument()
        body = getattr(self, f"_do_{self._loop}")
        body()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        self._serve(body)
        self._channel.send(
            "result", runs=self._runs, **self._counts, **self._telemetry()
        )
        os._exit(0)

    def _serve(self, body: Callable[[], None]) -> None:
        """Run the loop until all signals are settled.

        The first signal may come as soon as the line is written, before `send` returns.
        No signal is under way while an interruption is settled, but one may come while
        this catches another error. The second loop is for that.
        """
        try:
            self._channel.send("ready")
        except Interruption as error:
            self._caught = error
        while True:
            try:
                self._catch(body)
            except Interruption as error:
                self._caught = error
            else:
                return

    def _catch(self, body: Callable[[], None]) -> None:
        while True:
            try:
                if not self._ready:
                    # The first signal may come before this has returned.
                    self._ready = True
                    self._channel.send("ready")
                self._take_caught()
                while self._settled < self._signals:
                    body()
                    if self._runs > self._settled:
                        self._settle(None)
            except Exception as error:
                self._caught = error
            else:
                return

    def _take_caught(self) -> None:
        """Settle the exception that the program got."""
        error, self._caught = self._caught, None
        if error is None:
            return
        if not isinstance(error, Interruption):
            self._channel.send("error", text=repr(error))
        if isinstance(error, Interruption) or self._runs > self._settled:
            self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        """Count what became of the handler's run, and ask for the next signal."""
        raises = self._handler in _RAISED
        if isinstance(error, Interruption):
            number = int(error.args[0])
            self._seen[number] += 1
            if self._seen[number] > 1:
                self._counts["doubled"] += 1
                if self._settled == self._runs:
                    return
            else:
                self._counts["reached"] += 1
        elif raises:
            self._counts["lost"] += 1
        self._settled += 1
        self._channel.send("settled", number=self._settled)

    def _handle(self, _number: int, _frame: Any) -> None:
        self._runs += 1
        if self._handler in _RAISED:
            raise _RAISED[self._handler](self._runs)
        if self._handler == "store":
            self._use_store()
            return
        pid = os.fork()
        if pid == 0:
            status = 1
            with suppress(BaseException):
                signal.alarm(30)
                self._use_store()
                status = 0
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status:
            self._counts["failed children"] += 1
            ended = os.waitstatus_to_exitcode(status)
            self._channel.send("error", text=f"a forked child ended with {ended}")

    def _use_store(self) -> None:
        # Not from the shared counter, which the interrupted code may be using.
        self._store.set("handler", str(self._runs))
        if self._store.get("handler") != str(self._runs).encode():
            raise AssertionError("the store lost what a handler wrote")

    def _configure(self) -> None:
        settings: dict[str, Any] = {}
        if self._setting == "spans":
            settings = {
                "slow_after": 0,
                "spans": "all",
                "tracer_provider": TracerProvider(),
            }
        tracedstore.configure(
            registry=self._registry, core=self._base, log_format="off", **settings
        )

    def _make_store(self) -> Any:
        if self._loop in ("hash", "constructor", "instrument", "group"):
            return self._wrapped(dist.HashStore())
        return self._wrapped(self._tcp_store())

    def _wrapped(self, store: Any) -> Any:
        return tracedstore.wrap(store) if self._traced else store

    def _tcp_store(self) -> Any:
        return dist.TCPStore(
            "127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=_LONG
        )

    # The loops.

    def _do_hash(self) -> None:
        for _ in range(_CALLS):
            self._store.set("key", "value")
            self._store.get("key")
            self._store.add("count", 1)

    def _do_tcp(self) -> None:
        self._do_hash()

    def _do_wait(self) -> None:
        with suppress(dist.DistStoreError):
            self._store.wait(["absent"], _SHORT)

    def _do_barrier(self) -> None:
        call: Any = tracedstore.barrier if self._traced else torch_store.barrier
        for world_size in (1, 1, 1, 2):
            prefix = f"barrier/{next(self._numbers)}"
            with suppress(dist.DistStoreError):
                call(
                    *(self._store, world_size, prefix),
                    barrier_timeout=0.05,
                    trace_timeout=0.05,
                    rank=0,
                )

    def _do_constructor(self) -> None:
        store = self._wrapped(self._tcp_store())
        store.set("key", "value")
        _close(store)

    def _do_instrument(self) -> None:
        for store, _, _ in dist.rendezvous(_url(), 0, 1, timeout=_LONG):
            store.set("key", "value")
            _close(store)
            break

    def _do_group(self) -> None:
        with _group():
            dist.init_process_group("gloo", _url(), rank=0, world_size=1, timeout=_LONG)

    def _telemetry(self) -> dict[str, Any]:
        """Return whether calls are still counted, and how often telemetry failed."""
        if not self._traced:
            return {"recording": True, "failures": 0}
        before = self._sum("tracedstore_operation_duration_seconds_count")
        self._store.set("last", "1")
        after = self._sum("tracedstore_operation_duration_seconds_count")
        return {
            # A helper thread may still make a call of an interrupted step.
            "recording": after > before,
            "failures": self._sum("tracedstore_telemetry_failures_total"),
        }

    def _sum(self, name: str) -> float:
        return sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == name
        )


@contextmanager
def _group() -> Iterator[None]:
    """Destroy the group afterwards, also one that an interruption left behind."""
    try:
        yield
    finally:
        # An interruption may come in here as well; it is tried at the next group then.
        if dist.is_initialized():
            dist.destroy_process_group()


def _close(store: Any) -> None:
    # It is bare where the telemetry is off.
    if isinstance(store, tracedstore.TracedStore):
        store.close()


def _url() -> str:
    # Not `socket.create_server`, which catches an OSError of a handler, such as a
    # TimeoutError, and raises another one in its place.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def wait_before_signal(loop: str, draw: Callable[[float, float], float]) -> None:
    """Wait as long as the next signal is late: at any moment of what the child does."""
    time.sleep(draw(0.01, 0.2) if loop in ("wait", "barrier") else draw(0.0, 0.004))
