"""Measures the cost of tracing, on both recording bases, and of a span per call.

A round times a few calls of the bare store and then of a variant, so that other load on
the machine affects both: a round trip to a TCPStore takes 10 us or 80 us, depending on
whether its server was still awake. The cost of a variant is the median difference over
thousands of rounds. The variants are not measured in one rotation, because each leaves
the CPU's caches in another state for the next call. The TCPStore's server is another
process, as for every rank of a job but one.

Exits with 1 if a bar is missed. Needs the native base: `tracedstore build-native`.
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

import native_caller
import torch.distributed as dist
from harness import Bar, discarding_provider, finish, parser, tcp_server
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry
from torch.distributed import Store

import tracedstore
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.store_proxy import RECORDED

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
# On the native base, and on the Python base.
BASES = ("native", "python")
MAX_TRACED_TO_BARE = {"native": 1.03, "python": 1.10}
MAX_COST_TO_SPAN_PER_CALL = {"native": 0.02, "python": 0.10}
# Microseconds that the native base adds to a call: of a HashStore from Python, through
# a PrefixStore from C++, and on a thread that Python does not know.
MAX_HASH_STORE_COST, MAX_CPP_COST, MAX_CPP_THREAD_COST = 0.3, 0.2, 0.3
# Of each kind: those of Python's, and those that Python does not know.
THREADS, CALLS_EACH = 16, 10_000
_ROUND_NS = 20_000
# Calls of a round in C++, which is long enough to be timed and too short for a switch.
_CPP_CALLS = 200


class _SpanPerCallStore(Store):
    """A wrapper in the style of OpenTelemetry's contrib instrumentations.

    It makes one current span per call. tracedstore's cost is compared with its cost.
    """

    def __init__(self, inner: Store, tracer: trace.Tracer) -> None:
        super().__init__()
        self._inner = inner
        self._tracer = tracer


def _spanned(name: str) -> Callable[..., Any]:
    def method(self: _SpanPerCallStore, *args: Any) -> Any:
        attributes: dict[str, AttributeValue] = {
            "db.system.name": "pytorch.store",
            "db.operation.name": name,
            "server.address": "127.0.0.1",
            "tracedstore.key": str(args[0]) if args else "",
            "tracedstore.key.count": 1,
        }
        with self._tracer.start_as_current_span(
            name, kind=SpanKind.CLIENT, attributes=attributes
        ):
            return getattr(self._inner, name)(*args)

    return method


for _name in RECORDED:
    setattr(_SpanPerCallStore, _name, _spanned(_name))


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one operation on one store."""

    store: str
    operation: str
    bare_us: float
    native_ratio: float
    native_cost_us: float
    python_ratio: float
    python_cost_us: float
    span_per_call_ratio: float
    span_per_call_cost_us: float

    def ratio(self, base: str) -> float:
        """The duration of a call on a recording base over that of a bare one."""
        return self.native_ratio if base == "native" else self.python_ratio

    def cost_ratio(self, base: str) -> float:
        """The cost of a recording base over the cost of a span per call."""
        cost = self.native_cost_us if base == "native" else self.python_cost_us
        return cost / self.span_per_call_cost_us


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
    # In pairs: a span for every call keeps the SDK's exporter thread busy, and the next
    # variant would pay for that.
    cost: dict[str, float] = {}
    bare: dict[str, float] = {}
    for variant in (*BASES, "span per call"):
        bare[variant], cost[variant] = _cost(
            call, variants["bare"], variants[variant], rounds
        )
    return Row(
        store=name,
        operation=operation,
        bare_us=bare["native"] / 1e3,
        native_ratio=1 + cost["native"] / bare["native"],
        native_cost_us=cost["native"] / 1e3,
        python_ratio=1 + cost["python"] / bare["python"],
        python_cost_us=cost["python"] / 1e3,
        span_per_call_ratio=1 + cost["span per call"] / bare["span per call"],
        span_per_call_cost_us=cost["span per call"] / 1e3,
    )


def _cpp_cost(
    timed: Callable[[Store, str, int], int], bare: Store, traced: Store, rounds: int
) -> float:
    """Measure the microseconds that tracing adds to a call of C++."""
    differences = []
    for turn in range(rounds):
        pair = (bare, traced) if turn % 2 else (traced, bare)
        taken = {id(store): timed(store, "key", _CPP_CALLS) for store in pair}
        differences.append((taken[id(traced)] - taken[id(bare)]) / _CPP_CALLS)
    return statistics.median(differences) / 1e3


def _costs_from_cpp(rounds: int) -> dict[str, float]:
    """Measure what the native base adds to `get` of a HashStore, called by C++."""
    caller = native_caller.load()
    bare = dist.HashStore()
    traced = _traced(bare, "native")
    bare.set("key", "value")
    bare.set("prefix/key", "value")
    above = (dist.PrefixStore("prefix", bare), dist.PrefixStore("prefix", traced))

    def on_new_thread(store: Store, key: str, calls: int) -> int:
        return int(caller.call_from_threads(store, key, calls, 1))

    return {
        "prefix_store_us": _cpp_cost(caller.call, *above, rounds),
        "unknown_thread_us": _cpp_cost(on_new_thread, bare, traced, rounds),
    }


def _traced(bare: Store, base: str) -> tracedstore.TracedStore:
    """Wrap a store, with one of the recording bases."""
    RECORDER.core = base
    traced = tracedstore.wrap(bare)
    assert (type(traced) is tracedstore.TracedStore) == (base == "python")
    return traced


def _count_exactly() -> int:
    """Make calls from many threads, and return how many the metric counted."""
    registry = CollectorRegistry()
    tracedstore.configure(registry=registry, log_format="off")
    RECORDER.reset()
    store = _traced(dist.HashStore(), "native")
    store.set("key", "value")

    def work() -> None:
        for _ in range(CALLS_EACH):
            store.get("key")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    native_caller.load().call_from_threads(store, "key", CALLS_EACH, THREADS)
    for thread in threads:
        thread.join()
    counted = registry.get_sample_value(
        "tracedstore_wait_duration_seconds_count",
        {"store": "hash_store", "operation": "get", "error_type": ""},
    )
    return int(counted or 0)


def _print(rows: list[Row]) -> None:
    print(
        f"{'store':<24}{'operation':<13}{'bare':>9}{'native':>9}{'adds':>9}"
        f"{'python':>9}{'adds':>9}{'span/call':>11}{'adds':>9}"
    )
    for row in rows:
        print(
            f"{row.store:<24}{row.operation:<13}{row.bare_us:>7.2f}us"
            f"{row.native_ratio:>8.3f}x{row.native_cost_us:>7.2f}us"
            f"{row.python_ratio:>8.3f}x{row.python_cost_us:>7.2f}us"
            f"{row.span_per_call_ratio:>10.2f}x{row.span_per_call_cost_us:>7.2f}us"
        )


def _bars(rows: list[Row], from_cpp: dict[str, float], counted: int) -> list[Bar]:
    barred = [
        row
        for row in rows
        if row.store == "TCPStore" and row.operation in BARRED_OPERATIONS
    ]
    expected = 2 * THREADS * CALLS_EACH
    bars = []
    for base in BASES:
        bars += [
            Bar.at_most(
                f"{base}: TCPStore traced / bare, worst of "
                + ", ".join(BARRED_OPERATIONS),
                max(row.ratio(base) for row in barred),
                MAX_TRACED_TO_BARE[base],
            ),
            Bar.at_most(
                f"{base}: cost added / cost a span per call adds, median",
                statistics.median(row.cost_ratio(base) for row in rows),
                MAX_COST_TO_SPAN_PER_CALL[base],
            ),
        ]
    return [
        *bars,
        Bar.at_most(
            "native: us added to a HashStore call, median",
            statistics.median(
                row.native_cost_us for row in rows if row.store == "HashStore"
            ),
            MAX_HASH_STORE_COST,
        ),
        Bar.at_most(
            "native: us added to a call from C++ through a PrefixStore, median",
            from_cpp["prefix_store_us"],
            MAX_CPP_COST,
        ),
        Bar.at_most(
            "native: us added to a call of a thread unknown to Python, median",
            from_cpp["unknown_thread_us"],
            MAX_CPP_THREAD_COST,
        ),
        Bar(
            f"native: calls counted of {THREADS} threads of Python's and as many of"
            f" C++'s x {CALLS_EACH}",
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
                **{base: _traced(bare, base) for base in BASES},
                "span per call": _SpanPerCallStore(bare, tracer),
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
    from_cpp = _costs_from_cpp(options.rounds)
    counted = _count_exactly()
    _print(rows)
    results = {"rows": [asdict(row) for row in rows], "from_cpp": from_cpp}
    return finish(_bars(rows, from_cpp, counted), results, options.output)


if __name__ == "__main__":
    sys.exit(main())
