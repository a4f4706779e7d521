"""The ranks of the demo: processes that use a store as a job does."""

import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from tracedstore.common.errors import CommandError
from tracedstore.common.identity import host_name
from tracedstore.common.ranges import fold
from tracedstore.coordination.barrier import BarrierTimeout
from tracedstore.elastic import barrier
from tracedstore.export.setup import configure
from tracedstore.store import wrap
from tracedstore.tools.attach.child_process import die_with_parent
from tracedstore.tools.demo.store_servers import connect_store

RUN_ID = "demo"
# The barrier at which the killed ranks are missing.
CHECKPOINT = "checkpoint/1"
# Seconds; longer than any barrier that completes takes.
_BARRIER_TIMEOUT = 30.0
# Of the collectives, of which one never completes.
_COLLECTIVE_TIMEOUT = 6.0
# Seconds after which a blocked call leads to a verdict; a straggler is late for less.
_STALL_AFTER = 2.0
# Seconds that a rank is busy if the demo does not end it.
_MAX_BUSY_SECONDS = 20.0


class OutputFolder:
    """The folder with the logs, traces, metrics and exceptions of one demo.

    Attributes:
        path: The folder, which is made with its subfolders.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in ("logs", "traces", "metrics", "metrics/waiting", "errors"):
            (path / part).mkdir(parents=True)

    def log(self, rank: int) -> Path:
        """Return the file of a rank's events."""
        return self.path / f"logs/rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """Return the file of a rank's spans."""
        return self.path / f"traces/rank-{rank}.jsonl"

    def metrics(self, rank: int, *, waiting: bool = False) -> Path:
        """Return the file of a rank's last scrape, or of its last while it waited."""
        return self.path / f"metrics{'/waiting' * waiting}/rank-{rank}.prom"

    def error(self, rank: int) -> Path:
        """Return the file of the exception that a rank caught."""
        return self.path / f"errors/rank-{rank}.json"


def run_rank(
    rank: int, world_size: int, seed: int, folder: OutputFolder, channel: socket.socket
) -> None:
    """Execute commands until the channel is closed, and exit; for a forked child."""
    # The parent handles these, and ends its ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        _configure(rank, world_size, folder.trace(rank))
        with channel.makefile("rw", encoding="utf-8") as commands:
            _execute(
                _Rank(rank, world_size, seed, folder.error(rank), channel), commands
            )
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(0)


def _configure(rank: int, world_size: int, spans: Path) -> None:
    """Set up the telemetry, independent of the user's settings."""
    for name in [*os.environ]:
        if name.startswith(("TRACEDSTORE_", "OTEL_")):
            del os.environ[name]
    os.environ |= {
        "TRACEDSTORE_RUN_ID": RUN_ID,
        "OTEL_SERVICE_NAME": "tracedstore-demo",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    provider = TracerProvider()
    exporter = ConsoleSpanExporter(
        out=spans.open("a", encoding="utf-8", buffering=1),
        formatter=lambda span: str(span.to_json(indent=None)) + "\n",
    )
    # Not in batches, which a rank that is killed would lose.
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    configure(
        tracer_provider=provider,
        log_format="json",
        http_port=0,
        stall_after=_STALL_AFTER,
    )


def _execute(rank: "_Rank", commands: Any) -> None:
    methods: dict[str, Callable[..., None]] = {
        "join": rank.join,
        "steps": rank.steps,
        "contend": rank.contend,
        "train": rank.train,
        "create_group": rank.create_group,
        "checkpoint": rank.checkpoint,
    }
    for line in commands:
        if not line.strip():
            continue  # it was for load_dataset
        command, arguments = json.loads(line)
        methods[command](**arguments)
        commands.write(json.dumps(command) + "\n")
        commands.flush()


def load_dataset(channel: socket.socket) -> None:
    """Be busy until the demo sends something; at most 20 s."""
    # One system call, so that this function is the innermost frame.
    select.select([channel], [], [], _MAX_BUSY_SECONDS)


class _Rank:
    """The commands of a rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        seed: int,
        error: Path,
        channel: socket.socket,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._error = error
        self._channel = channel
        self._random = random.Random(f"{seed}/{rank}")  # noqa: S311 - no secret
        self._store: Any = None
        self._kind = ""

    def join(self, kind: str, location: str) -> None:
        """Connect to the store, and wait at a barrier for all ranks."""
        self._kind = kind
        self._store = wrap(connect_store(kind, location))
        self._wait_for_all("join", warn_after=0.0)

    def steps(
        self,
        first: int,
        count: int,
        seconds: float,
        warn_after: float,
        late_rank: int = -1,
        late: float = 0.0,
    ) -> None:
        """Sleep, write a key, read that of a neighbour, and wait at a barrier."""
        store, neighbour = self._store, (self._rank + 1) % self._world_size
        for step in range(first, first + count):
            time.sleep(seconds * self._random.uniform(0.6, 1.0))
            store.set(f"loss/{step}/{self._rank}", f"{self._random.random():.3f}")
            store.get(f"loss/{step}/{neighbour}")
            store.add("seen", 1)
            if self._rank == late_rank:
                time.sleep(late)
            self._wait_for_all(f"step/{step}", warn_after=warn_after)

    def contend(self, seconds: float) -> None:
        """Update one key by compare-and-set, as all other ranks do."""
        until, held = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            time.sleep(self._random.uniform(0.0, 0.004))
            if self._kind == "etcd-v2":
                # EtcdStore has no compare_set; its add is a compare-and-set loop.
                self._store.add("ticket", 1)
            else:
                desired = str(int(held or 0) + 1)
                held = self._store.compare_set("ticket", held, desired).decode()

    def train(self, steps: int, skipping_rank: int) -> None:
        """Call two collectives a step; one rank leaves one of them out at the end."""
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=_BARRIER_TIMEOUT),
        )
        group = dist.new_group(
            timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT), group_desc="training"
        )
        gradients = torch.ones(10)
        # The last step ends with a timeout on all ranks.
        with suppress(RuntimeError):
            for step in range(1, steps + 1):
                if step < steps or self._rank != skipping_rank:
                    dist.all_reduce(gradients, group=group)
                dist.barrier(group)

    def create_group(self, busy_rank: int) -> None:
        """Create a process group; one rank is busy before it does."""
        if self._rank == busy_rank:
            load_dataset(self._channel)
        dist.new_group()
        # torch's new_group does not wait until all ranks have connected.
        self._wait_for_all("group", warn_after=0.0)
        dist.destroy_process_group()

    def checkpoint(self, seconds: float, timeout: float, warn_after: float) -> None:
        """Sleep, and wait at a barrier at which killed ranks are missing."""
        time.sleep(seconds)
        try:
            self._wait_for_all(CHECKPOINT, timeout=timeout, warn_after=warn_after)
        except BarrierTimeout as error:
            self._error.write_text(
                json.dumps(
                    {
                        "type": type(error).__name__,
                        "message": str(error),
                        "rank": error.rank,
                        "missing_ranks": error.missing_ranks,
                        "missing_names": error.missing_names,
                        "waited_seconds": error.waited,
                    }
                )
                + "\n",
                encoding="utf-8",
            )

    def _wait_for_all(
        self, prefix: str, *, warn_after: float, timeout: float = _BARRIER_TIMEOUT
    ) -> None:
        barrier(
            self._store,
            self._world_size,
            prefix,
            timeout,
            rank=self._rank,
            rank_tracing_decoder=lambda _: host_name(),
            warn_after=warn_after,
        )


class RankProcesses:
    """Ranks as forked processes; at the end of a ``with`` block none is left.

    They are forked because importing torch takes seconds. The parent has imported it
    and has no store yet, so no thread of a store is lost in the fork.

    Attributes:
        living: The ranks that were not killed, in order.
    """

    def __init__(self, count: int, seed: int, folder: OutputFolder) -> None:
        self.living = list(range(count))
        self._folder = folder
        self._pids: dict[int, int] = {}
        self._channels: dict[int, socket.socket] = {}
        try:
            for rank in self.living:
                self._start(rank, count, seed)
        except OSError as error:
            self.close()
            raise CommandError(
                f"{count} processes cannot be started here: {error.strerror}; try fewer"
                " with --ranks"
            ) from None
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, count: int, seed: int) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            die_with_parent(parent)
            # A rank ends when no process has the other end of its channel open.
            for channel in (ours, *self._channels.values()):
                channel.close()
            run_rank(rank, count, seed, self._folder, theirs)
        theirs.close()
        ours.setblocking(False)
        self._pids[rank], self._channels[rank] = pid, ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command to all living ranks."""
        message = json.dumps([command, arguments]).encode() + b"\n"
        for rank in self.living:
            # A rank that has died is reported by wait().
            with suppress(OSError):
                self._channels[rank].sendall(message)

    def end_load(self, rank: int) -> None:
        """End `load_dataset` of a rank; otherwise a rank ignores it."""
        with suppress(OSError):
            self._channels[rank].sendall(b"\n")

    def wait(
        self, scenario: str, timeout: float, meanwhile: Callable[[], None]
    ) -> None:
        """Wait until all living ranks have finished the last command.

        Args:
            scenario: Its name, for errors.
            timeout: Seconds that it may take.
            meanwhile: Is called again and again.

        Raises:
            CommandError: A rank has ended, or the timeout has passed.
        """
        deadline = time.monotonic() + timeout
        busy = set(self.living)
        while busy:
            meanwhile()
            busy = {rank for rank in busy if not self._is_done(rank, scenario)}
            if busy and time.monotonic() > deadline:
                raise CommandError(
                    f"ranks {fold(busy)} have not finished {scenario} after"
                    f" {timeout:g} s: this machine may be too busy; their logs are in"
                    f" {self._folder.path / 'logs'}"
                )

    def _is_done(self, rank: int, scenario: str) -> bool:
        try:
            received = self._channels[rank].recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            raise CommandError(
                f"rank {rank} ended unexpectedly during {scenario}; see"
                f" {self._folder.log(rank)}"
            )
        return received.endswith(b"\n")

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks with SIGKILL."""
        for rank in ranks:
            self.living.remove(rank)
            self._end(rank)

    def close(self) -> None:
        """Kill all ranks that are left."""
        for rank in [*self._pids]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        pid = self._pids[rank]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        # Removed last, so that close() can repeat this after an interrupt.
        self._channels.pop(rank).close()
        del self._pids[rank]
