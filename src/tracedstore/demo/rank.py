"""One rank of the demo: a process that uses a store as jobs do, and tells."""

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from tracedstore.coordination.barrier_timeout import BarrierTimeout
from tracedstore.demo.store_servers import connect
from tracedstore.elastic import barrier
from tracedstore.export.setup import configure
from tracedstore.store import wrap

RUN_ID = "demo"
# The barrier that some do not live to see.
CHECKPOINT = "checkpoint/1"
# A barrier that should complete gives up after this; the demo ends before.
_PATIENCE = 30.0


def simulated_host(rank: int) -> str:
    """Name a host for a rank, two on each; the name says that there is none."""
    return f"sim-node-{rank // 2 + 1}"


class Folder:
    """Where everything of one demo is written, a file a rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in ("logs", "traces", "metrics", "metrics/waiting", "errors"):
            (path / part).mkdir(parents=True)

    def log(self, rank: int) -> Path:
        """Where its events are."""
        return self.path / f"logs/rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """Where its spans are."""
        return self.path / f"traces/rank-{rank}.jsonl"

    def metrics(self, rank: int, *, waiting: bool = False) -> Path:
        """Where its metrics are: the last ones, or those while it waited."""
        return self.path / f"metrics{'/waiting' * waiting}/rank-{rank}.prom"

    def error(self, rank: int) -> Path:
        """Where the exception is that it got."""
        return self.path / f"errors/rank-{rank}.json"


def live(
    rank: int, world_size: int, seed: int, folder: Folder, channel: socket.socket
) -> None:
    """Be a rank until nobody wants anything any more; for a forked child."""
    # These are for whoever started this one, who ends it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        _set_up(rank, world_size, folder.trace(rank))
        with channel.makefile("rw", encoding="utf-8") as commands:
            _obey(_Rank(rank, world_size, seed, folder.error(rank)), commands)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(0)


def _set_up(rank: int, world_size: int, spans: Path) -> None:
    """Set the telemetry up, by what is here and not by what the user has set."""
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
    # At once and not in batches: a rank that is killed has told what it did.
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    configure(tracer_provider=provider, log_format="json", http_port=0)


def _obey(rank: "_Rank", commands: Any) -> None:
    acts: dict[str, Callable[..., None]] = {
        "join": rank.join,
        "steps": rank.steps,
        "contend": rank.contend,
        "checkpoint": rank.checkpoint,
    }
    for line in commands:
        act, given = json.loads(line)
        acts[act](**given)
        commands.write(json.dumps(act) + "\n")
        commands.flush()


class _Rank:
    """What a rank can do."""

    def __init__(self, rank: int, world_size: int, seed: int, error: Path) -> None:
        self._rank = rank
        self._world_size = world_size
        self._error = error
        self._random = random.Random(f"{seed}/{rank}")  # noqa: S311 - for the show
        self._store: Any = None
        self._kind = ""

    def join(self, kind: str, where: str) -> None:
        """Connect to the store, and wait for the others."""
        self._kind = kind
        self._store = wrap(connect(kind, where))
        self._meet("join", warn_after=0.0)

    def steps(
        self,
        first: int,
        count: int,
        seconds: float,
        warn_after: float,
        late_rank: int = -1,
        late: float = 0.0,
    ) -> None:
        """Work, tell a neighbour, hear of another, and wait for everybody."""
        store, neighbour = self._store, (self._rank + 1) % self._world_size
        for step in range(first, first + count):
            time.sleep(seconds * self._random.uniform(0.6, 1.0))
            store.set(f"loss/{step}/{self._rank}", f"{self._random.random():.3f}")
            store.get(f"loss/{step}/{neighbour}")
            store.add("seen", 1)
            if self._rank == late_rank:
                time.sleep(late)
            self._meet(f"step/{step}", warn_after=warn_after)

    def contend(self, seconds: float) -> None:
        """Fight with all others over one key."""
        until, held = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            time.sleep(self._random.uniform(0.0, 0.004))
            if self._kind == "etcd":
                # It has no compare_set, and makes its add of compare-and-sets.
                self._store.add("ticket", 1)
            else:
                wanted = str(int(held or 0) + 1)
                held = self._store.compare_set("ticket", held, wanted).decode()

    def checkpoint(self, seconds: float, timeout: float, warn_after: float) -> None:
        """Work, and wait for everybody, some of whom may not live any more."""
        time.sleep(seconds)
        try:
            self._meet(CHECKPOINT, timeout=timeout, warn_after=warn_after)
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

    def _meet(
        self, prefix: str, *, warn_after: float, timeout: float = _PATIENCE
    ) -> None:
        barrier(
            self._store,
            self._world_size,
            prefix,
            timeout,
            rank=self._rank,
            rank_tracing_decoder=simulated_host,
            warn_after=warn_after,
        )
