"""Reads the logs, traces, metrics and in-flight pages of the ranks of the demo.

The demo shows only what is read here, so it shows no more than an operator can see.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from itertools import cycle
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tracedstore import names
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.demo.fetch import fetch
from tracedstore.tools.demo.output_folder import OutputFolder

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
