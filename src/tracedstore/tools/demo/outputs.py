"""What the logs, traces, metrics and in-flight pages of the ranks of the demo show.

The demo shows only what is read here, so it shows no more than an operator can see.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tracedstore import names
from tracedstore.common.errors import CommandError
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.demo.rank import CHECKPOINT, OutputFolder
from tracedstore.tools.demo.store_servers import fetch

_WAITS, _CALLS = (f"{metric.name}_count" for metric in names.CALL_DURATIONS)
_BARRIER_CALLS = f"{names.BARRIER_DURATION.name}_count"
_CAS = names.CAS_ATTEMPTS.name
_LAST_ARRIVALS = names.BARRIER_LAST_ARRIVALS.name
_MISSING = names.BARRIER_RANK_MISSING.name
# A scrape has a hundred lines and more; only these are parsed.
_PARSED = tuple(
    f"{name}{{"
    for name in (_WAITS, _CALLS, _BARRIER_CALLS, _CAS, _LAST_ARRIVALS, _MISSING)
)
# Ranks scraped per poll: a scrape costs a rank ten milliseconds.
_SCRAPES_PER_POLL = 16
# Seconds for one page.
_FETCH_TIMEOUT = 5.0
_MAX_WAITS = 3
# The start of the phase in which a rank is busy elsewhere.
_NEW_GROUP = "new_group"

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSpan:
    """The parts of a span that the demo uses.

    Attributes:
        rank: The rank that exported it.
        name: The operation and the key, or ``barrier`` and its prefix.
        start: The start, in seconds since the epoch.
        seconds: The duration.
        trace_id: The trace.
        attributes: The attributes.
    """

    rank: int
    name: str
    start: float
    seconds: float
    trace_id: str
    attributes: dict[str, Any]

    @classmethod
    def parse(cls, rank: int, exported: dict[str, Any]) -> "ExportedSpan":
        """Parse a span of OpenTelemetry's console exporter."""
        start, end = (
            datetime.fromisoformat(exported[name]).timestamp()
            for name in ("start_time", "end_time")
        )
        attributes = exported["attributes"]
        prefix = attributes.get(names.BARRIER_PREFIX)
        return cls(
            rank=rank,
            name=f"barrier {prefix}" if prefix else exported["name"],
            start=start,
            seconds=end - start,
            trace_id=exported["context"]["trace_id"],
            attributes=attributes,
        )

    @property
    def prefix(self) -> str | None:
        """The key prefix of its barrier; None if it is of another call."""
        if names.BARRIER_ROOT in self.attributes:  # of no rank
            return None
        prefix: str | None = self.attributes.get(names.BARRIER_PREFIX)
        return prefix


class ScrapedMetrics:
    """The values of one scrape of a rank.

    Attributes:
        calls: The number of Store calls.
        failed: The number of failed calls by error type.
        cas: The number of compare-and-sets by result.
        barriers: The number of barrier calls by result.
        last_arrivals: How often the rank was the last to arrive.
        missing: The missing ranks and their hosts, by barrier family.
    """

    def __init__(self, page: bytes = b"") -> None:
        # By error type, operation and store.
        self._ended: dict[tuple[str, str, str], int] = {}
        self.failed: Counter[str] = Counter()
        self.cas: Counter[str] = Counter()
        self.barriers: Counter[str] = Counter()
        self.last_arrivals = 0
        self.missing: defaultdict[str, dict[int, str]] = defaultdict(dict)
        lines = page.decode().splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith(_PARSED))
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._add(sample.name, sample.labels, int(sample.value))
        self.calls = sum(self._ended.values())
        for (error_type, _, _), number in self._ended.items():
            if error_type and number:
                self.failed[error_type] += number

    def _add(self, name: str, labels: dict[str, str], value: int) -> None:
        if name in (_WAITS, _CALLS):
            call = (labels["error_type"], labels["operation"], labels["store"])
            if name == _WAITS or call not in self._ended:
                self._ended[call] = value
        elif name == _CAS:
            self.cas[labels["result"]] += value
        elif name == _BARRIER_CALLS:
            self.barriers[labels["result"]] += value
        elif name == _LAST_ARRIVALS:
            self.last_arrivals += value
        elif name == _MISSING:
            missing = self.missing[labels["barrier"]]
            missing[int(labels["missing_rank"])] = labels["missing_host"]


class RankOutputs:
    """Everything that was read from the ranks.

    Attributes:
        events: Their events, in the order in which they were read.
        spans: Their spans, in the same order.
        metrics: The last scrape of each rank.
        statuses: What each rank is doing; None for a rank that does not answer.
        missing: The missing ranks and their hosts in the metrics of a waiting rank, by
            barrier family and waiting rank.
    """

    def __init__(self, folder: OutputFolder, ranks: Iterable[int]) -> None:
        self._folder = folder
        self.events: list[Event] = []
        self.spans: list[ExportedSpan] = []
        self.metrics = {rank: ScrapedMetrics() for rank in ranks}
        self.statuses: dict[int, ProcessFacts | None] = dict.fromkeys(self.metrics)
        self.missing: defaultdict[str, dict[int, dict[int, str]]] = defaultdict(dict)
        self._urls: dict[int, str] = {}
        self._turns = cycle(self.metrics)
        self._offsets: defaultdict[Path, int] = defaultdict(int)

    def poll(self, *, scrape_all: bool = False) -> list[Event]:
        """Read what is new, and return the new events by time.

        Args:
            scrape_all: Scrape every rank. Otherwise 16 ranks are scraped in turn, which
                is enough while a scenario runs.
        """
        new: list[Event] = []
        for rank in self.metrics:
            new += self._new_lines(self._folder.log(rank))
            for line in self._new_lines(self._folder.trace(rank)):
                self.spans.append(ExportedSpan.parse(rank, line))
        new.sort(key=lambda event: str(event["timestamp"]))
        self.events += new
        for event in new:
            if event["event"] == names.TELEMETRY_SERVING:
                self._urls[event["rank"]] = event["url"]
        turn = {next(self._turns) for _ in range(_SCRAPES_PER_POLL)}
        for rank, url in self._urls.items():
            self._query(rank, url, scrape=scrape_all or rank in turn)
        return new

    def url_of(self, rank: int, page: str) -> str:
        """Return the URL of one of a rank's pages."""
        return self._urls[rank].removesuffix("/metrics") + page

    def _query(self, rank: int, url: str, *, scrape: bool) -> None:
        try:
            in_flight = fetch(self.url_of(rank, "/inflight"), _FETCH_TIMEOUT)
            status = self.statuses[rank] = ProcessFacts.from_page(in_flight)
            # Missing ranks are in the metrics only while a rank waits.
            page = fetch(url, _FETCH_TIMEOUT) if scrape or status.barriers else None
        except (OSError, HTTPException, ValueError):
            self.statuses[rank] = None
            return
        if page is not None:
            self._store_metrics(rank, page)

    def _store_metrics(self, rank: int, page: bytes) -> None:
        metrics = self.metrics[rank] = ScrapedMetrics(page)
        self._folder.metrics(rank).write_bytes(page)
        for family, missing in metrics.missing.items():
            self.missing[family][rank] = missing
            self._folder.metrics(rank, waiting=True).write_bytes(page)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Parse the complete lines that were added to a file."""
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                added = file.read()
        except FileNotFoundError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        self._offsets[path] += len(complete)
        for line in complete.splitlines():
            # torch's own log lines are in the same file.
            if line.startswith(b"{"):
                yield json.loads(line)

    def totals(self) -> dict[str, Any]:
        """Return the sums of the metrics of all ranks."""
        every = self.metrics.values()
        failed, cas, barriers = Counter[str](), Counter[str](), Counter[str]()
        for metrics in every:
            failed += metrics.failed
            cas += metrics.cas
            barriers += metrics.barriers
        return {
            "calls": sum(metrics.calls for metrics in every),
            "failed_calls": dict(failed),
            "cas_won": cas[names.WON],
            "cas_lost": cas[names.LOST],
            "barrier_calls": dict(barriers),
            "last_arrivals": {
                rank: metrics.last_arrivals
                for rank, metrics in self.metrics.items()
                if metrics.last_arrivals
            },
        }

    def slowest_waits(self) -> list[dict[str, Any]]:
        """Return the three slowest calls and barriers, each by its slowest rank."""
        by_name: dict[str, ExportedSpan] = {}
        for span in sorted(self.spans, key=lambda span: span.seconds):
            by_name[span.name] = span
        slowest = sorted(by_name.values(), key=lambda span: -span.seconds)[:_MAX_WAITS]
        return [
            {
                "what": span.name,
                "rank": span.rank,
                "seconds": round(span.seconds, 3),
                "result": span.attributes.get(names.BARRIER_RESULT, ""),
            }
            for span in slowest
        ]

    def find_straggler(self, prefixes: Sequence[str]) -> dict[str, Any]:
        """Return the rank that was last most often at some barriers, and its delay.

        The source are the spans: a barrier is one trace, in which the span of each rank
        starts at its arrival.

        Raises:
            CommandError: No barrier has spans of its last rank and of another one.
        """
        delays: dict[int, list[float]] = {}
        for prefix in prefixes:
            spans = [span for span in self.spans if span.prefix == prefix]
            last = [
                span
                for span in spans
                if span.attributes.get(names.BARRIER_LAST_RANK) == span.rank
            ]
            others = [span.start for span in spans if span not in last]
            if last and others:
                delay = last[0].start - max(others)
                delays.setdefault(last[0].rank, []).append(delay)
        if not delays:
            raise CommandError("the traces have no barrier at which all ranks arrived")
        rank = max(delays, key=lambda rank: len(delays[rank]))
        return {
            "rank": rank,
            "host": self._hosts().get(rank, f"rank {rank}"),
            "times": len(delays[rank]),
            "of": len(prefixes),
            "late_seconds": round(median(delays[rank]), 3),
        }

    def _hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks that events reported as missing."""
        by_rank: dict[int, str] = {}
        for event in self.events:
            pairs = zip(
                event.get("missing_ranks", ()),
                event.get("missing_names", ()),
                strict=True,
            )
            by_rank |= dict(pairs)
        return by_rank

    def find_stall(
        self, phase: str = _NEW_GROUP, *, resumes: bool = True
    ) -> dict[str, Any]:
        """Return whom the ranks waited for in some phase, from the events.

        ``agree`` is true if every rank that reported the stall named the same ranks and
        the same cause, and reported its end.

        Args:
            phase: The start of the phase.
            resumes: The stall ends, and not by a failure.
        """
        events = [e for e in self.events if e.get("phase", "").startswith(phase)]
        reports = [e for e in events if e["event"] == names.JOB_STALLED]
        resumed = {e["rank"] for e in events if e["event"] == names.JOB_RESUMED}
        verdicts = {(tuple(e["awaited_ranks"]), e["cause"]) for e in reports}
        first = reports[0] if reports else {}
        reporters = sorted({e["rank"] for e in reports})
        return {
            "ranks": first.get("awaited_ranks", []),
            "cause": first.get("cause", ""),
            "awaited": first.get("awaited", ""),
            "phase": first.get("phase", ""),
            "waiting_ranks": first.get("waiting_ranks", ""),
            "waited_seconds": first.get("waited_seconds"),
            "reported_by": reporters,
            "agree": len(verdicts) == 1
            and (not resumes or sorted(resumed) == reporters),
        }

    def find_missing(self) -> dict[str, Any]:
        """Compare the missing ranks of the checkpoint in all sources.

        ``agree`` is true if every source has the same ranks, and the log, exception and
        trace of every survivor has them.
        """
        survivors = [rank for rank, status in self.statuses.items() if status]
        events = [e for e in self.events if e.get("barrier") == CHECKPOINT]
        warnings = [e for e in events if e["event"] == names.BARRIER_WAITING]
        family = events[0]["barrier_family"] if events else ""
        by_source: dict[str, dict[int, list[int]]] = {
            "warning": {e["rank"]: e["missing_ranks"] for e in warnings},
            "log": {
                e["rank"]: e["missing_ranks"]
                for e in events
                if e["event"] == names.BARRIER_TIMEOUT
            },
            "exception": {
                rank: json.loads(self._folder.error(rank).read_text("utf-8"))[
                    "missing_ranks"
                ]
                for rank in survivors
                if self._folder.error(rank).exists()
            },
            "metric": {
                rank: sorted(hosts_by_rank)
                for rank, hosts_by_rank in self.missing.get(family, {}).items()
            },
            "trace": {
                span.rank: list(span.attributes.get(names.BARRIER_MISSING_RANKS, ()))
                for span in self.spans
                if span.prefix == CHECKPOINT
            },
        }
        lists = {
            tuple(ranks) for source in by_source.values() for ranks in source.values()
        }
        complete = all(
            sorted(by_source[source]) == survivors
            for source in ("log", "exception", "trace")
        )
        ranks = list(lists.pop()) if len(lists) == 1 else []
        known_hosts = self._hosts()
        traces = {s.trace_id for s in self.spans if s.prefix == CHECKPOINT}
        return {
            "ranks": ranks,
            "hosts": [known_hosts[rank] for rank in ranks],
            "survivors": survivors,
            "warned_after_seconds": min(
                (round(e["waited_seconds"], 3) for e in warnings), default=None
            ),
            "missing_by_source": by_source,
            "agree": bool(ranks) and complete and all(by_source.values()),
            "traces": len(traces),
        }
