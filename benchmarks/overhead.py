"""Measures the cost of tracing: bare, traced, and a span per call, in one run.

A round times a few calls of the bare store and then of a variant, so that other load on
the machine affects both: a round trip to a TCPStore takes 10 us or 80 us, depending on
whether its server was still awake. The cost of a variant is the median difference over
thousands of rounds. The TCPStore's server is another process, as for every rank of a
job but one.

Exits with 1 if a bar is missed.
"""

import itertools
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contrib_style import SpanPerCallStore
from harness import Bar, discarding_provider, finish, parser, tcp_server
from prometheus_client import CollectorRegistry
from torch.distributed import Store

import tracedstore

# compare_set swaps between two values: with equal expected and desired values it only
# reads the key, and is not counted as a compare-and-set.
_SWAPS = itertools.cycle((("a", "b"), ("b", "a")))

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("key"),
    "set": lambda store: store.set("key", "value"),
    "add": lambda store: store.add("counter", 1),
    "check": lambda store: store.check(["key"]),
    "compare_set": lambda store: store.compare_set("swapped", *next(_SWAPS)),
    "wait": lambda store: store.wait(["key"]),
    "multi_get": lambda store: store.multi_get(["key", "swapped"]),
}
# Calls of TCPStore that wait for the server's response.
BARRED_OPERATIONS = ("get", "add", "check", "compare_set", "wait")
MAX_TRACED_TO_BARE = 1.10
MAX_COST_TO_SPAN_PER_CALL = 0.10
THREADS, CALLS_EACH = 16, 10_000
_ROUND_NS = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one operation on one store."""

    store: str
    operation: str
    bare_us: float
    traced_ratio: float
    traced_cost_us: float
    span_per_call_ratio: float
    span_per_call_cost_us: float

    @property
    def cost_ratio(self) -> float:
        """The cost of tracing over the cost of a span per call."""
        return self.traced_cost_us / self.span_per_call_cost_us


def _stores(folder: Path, port: int) -> dict[str, Store]:
    return {
        "TCPStore": dist.TCPStore("127.0.0.1", port, None, is_master=False),
        "FileStore": dist.FileStore(str(folder / "store"), -1),
        "HashStore": dist.HashStore(),
    }


def _time(call: Callable[[Any], Any], store: Store, calls: int) -> float:
    started = time.perf_counter_ns()
    for _ in range(calls):
        call(store)
    return (time.perf_counter_ns() - started) / calls


def _cost(
    call: Callable[[Any], Any], bare: Store, variant: Store, rounds: int
) -> tuple[float, float]:
    """Measure the duration of a bare call and the cost of a variant, in ns."""
    # The smallest number of calls that is long enough to be timed well.
    warm_up = statistics.median(_time(call, variant, 1) for _ in range(200))
    calls = max(1, round(_ROUND_NS / warm_up))
    times: dict[int, list[float]] = {id(bare): [], id(variant): []}
    for turn in range(rounds):
        pair = (bare, variant) if turn % 2 else (variant, bare)
        for store in pair:
            times[id(store)].append(_time(call, store, calls))
    pairs = zip(times[id(variant)], times[id(bare)], strict=True)
    return (
        statistics.median(times[id(bare)]),
        statistics.median(taken - bare_taken for taken, bare_taken in pairs),
    )


def _measure(name: str, operation: str, variants: dict[str, Store], rounds: int) -> Row:
    call = OPERATIONS[operation]
    # In pairs, not all three in turn: a span for every call keeps the SDK's exporter
    # thread busy, and the next variant would pay for that.
    bare, traced = _cost(call, variants["bare"], variants["traced"], rounds)
    _, span_per_call = _cost(call, variants["bare"], variants["span per call"], rounds)
    return Row(
        store=name,
        operation=operation,
        bare_us=bare / 1e3,
        traced_ratio=1 + traced / bare,
        traced_cost_us=traced / 1e3,
        span_per_call_ratio=1 + span_per_call / bare,
        span_per_call_cost_us=span_per_call / 1e3,
    )


def _count_exactly() -> int:
    """Make calls from many threads, and return how many the metric counted."""
    registry = CollectorRegistry()
    tracedstore.configure(registry=registry, log_format="off")

    class CountedStore(dist.HashStore):
        """A separate store kind, so that no other call is counted with these."""

    store = tracedstore.wrap(CountedStore())
    store.set("key", "value")

    def work() -> None:
        for _ in range(CALLS_EACH):
            store.get("key")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = registry.get_sample_value(
        "tracedstore_operation_duration_seconds_count",
        {"store": "counted_store", "operation": "get", "error_type": ""},
    )
    return int(counted or 0)


def _print(rows: list[Row]) -> None:
    print(
        f"{'store':<24}{'operation':<13}{'bare':>9}{'traced':>9}{'adds':>9}"
        f"{'span/call':>11}{'adds':>9}{'cost':>7}"
    )
    for row in rows:
        print(
            f"{row.store:<24}{row.operation:<13}{row.bare_us:>7.2f}us"
            f"{row.traced_ratio:>8.3f}x{row.traced_cost_us:>7.2f}us"
            f"{row.span_per_call_ratio:>10.2f}x{row.span_per_call_cost_us:>7.2f}us"
            f"{row.cost_ratio:>7.3f}"
        )


def _bars(rows: list[Row], counted: int) -> list[Bar]:
    barred = [
        row
        for row in rows
        if row.store == "TCPStore" and row.operation in BARRED_OPERATIONS
    ]
    expected = THREADS * CALLS_EACH
    return [
        Bar.at_most(
            "TCPStore traced / bare, worst of " + ", ".join(BARRED_OPERATIONS),
            max(row.traced_ratio for row in barred),
            MAX_TRACED_TO_BARE,
        ),
        Bar.at_most(
            "cost added / cost a span per call adds, median",
            statistics.median(row.cost_ratio for row in rows),
            MAX_COST_TO_SPAN_PER_CALL,
        ),
        Bar(
            f"calls counted of {THREADS} threads x {CALLS_EACH}",
            counted,
            expected,
            counted == expected,
        ),
    ]


def main() -> int:
    """Run the benchmark, print the table, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=2000)
    options = arguments.parse_args()

    # A span per call fills the exporter's queue faster than it is emptied, and the SDK
    # warns of that. Dropped spans only make the span per call look cheaper.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    provider = discarding_provider()
    tracer = provider.get_tracer("contrib")
    tracedstore.configure(
        registry=CollectorRegistry(), tracer_provider=provider, log_format="off"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, tcp_server() as port:
        for name, bare in _stores(Path(folder), port).items():
            variants: dict[str, Store] = {
                "bare": bare,
                "traced": tracedstore.wrap(bare),
                "span per call": SpanPerCallStore(bare, tracer),
            }
            under_prefix: dict[str, Store] = {
                variant: dist.PrefixStore("prefix", store)
                for variant, store in variants.items()
            }
            for title, stores in (
                (name, variants),
                (f"PrefixStore({name})", under_prefix),
            ):
                for store in stores.values():
                    store.set("key", "value")
                    store.set("swapped", "a")
                rows += [
                    _measure(title, operation, stores, options.rounds)
                    for operation in OPERATIONS
                ]
    counted = _count_exactly()
    _print(rows)
    results = {"rows": [asdict(row) for row in rows]}
    return finish(_bars(rows, counted), results, options.output)


if __name__ == "__main__":
    sys.exit(main())
