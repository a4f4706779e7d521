"""What the ranks of the demo tell: read from their logs, traces, metrics and pages.

The demo shows only what is read here, as somebody would who did not start the job.
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
from tracedstore.demo.fetch import fetch
from tracedstore.demo.rank import Folder
from tracedstore.export.process_status import ProcessStatus

_CALLS = f"{names.OPERATION_DURATION.name}_count"
_VISITS = f"{names.BARRIER_DURATION.name}_count"
_CAS = names.CAS_ATTEMPTS.name
_LAST = names.BARRIER_LAST_ARRIVALS.name
_MISSING = names.BARRIER_RANK_MISSING.name
# A page has a thousand lines; these are the ones to parse.
_READ = tuple(f"{name}{{" for name in (_CALLS, _VISITS, _CAS, _LAST, _MISSING))
# Of so many ranks at a time: a page takes a rank ten milliseconds to write.
_AT_ONCE = 16
# Seconds that a rank gets to answer.
_WITHIN = 5.0

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSpan:
    """A span, as far as it is shown.

    Attributes:
        rank: Whose.
        name: The operation and the key, or the barrier's prefix.
        start: When it began, in seconds since the epoch.
        seconds: How long it took.
        trace_id: Which trace it is in.
        attributes: What else is known.
    """

    rank: int
    name: str
    start: float
    seconds: float
    trace_id: str
    attributes: dict[str, Any]

    @classmethod
    def read(cls, rank: int, written: dict[str, Any]) -> "ExportedSpan":
        """Read what OpenTelemetry's console exporter writes."""
        start, end = (
            datetime.fromisoformat(written[name]).timestamp()
            for name in ("start_time", "end_time")
        )
        attributes = written["attributes"]
        prefix = attributes.get(names.BARRIER_PREFIX)
        return cls(
            rank=rank,
            name=f"barrier {prefix}" if prefix else written["name"],
            start=start,
            seconds=end - start,
            trace_id=written["context"]["trace_id"],
            attributes=attributes,
        )


class ScrapedMetrics:
    """What a rank's metrics said when they were last read."""

    def __init__(self, page: bytes = b"") -> None:
        self.calls = 0
        self.failed: Counter[str] = Counter()
        self.cas: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.record_last_arrival = 0
        self.missing: defaultdict[str, dict[int, str]] = defaultdict(dict)
        lines = page.decode().splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith(_READ))
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._add(sample.name, sample.labels, int(sample.value))

    def _add(self, name: str, labels: dict[str, str], value: int) -> None:
        if name == _CALLS:
            self.calls += value
            if labels["error_type"] and value:
                self.failed[labels["error_type"]] += value
        elif name == _CAS:
            self.cas[labels["result"]] += value
        elif name == _VISITS:
            self.visits[labels["result"]] += value
        elif name == _LAST:
            self.record_last_arrival += value
        elif name == _MISSING:
            missing = self.missing[labels["barrier"]]
            missing[int(labels["missing_rank"])] = labels["missing_host"]


class Signals:
    """Everything that the ranks told so far.

    Attributes:
        events: What they logged, as it was read.
        spans: Their spans, likewise.
        metrics: What each one's metrics said last.
        answers: What each one is doing now; None for one that does not answer.
        waiting: By barrier and rank that waited at it: who was missing, and on which
            host, as that rank's metrics said.
    """

    def __init__(self, folder: Folder, ranks: Iterable[int]) -> None:
        self._folder = folder
        self.events: list[Event] = []
        self.spans: list[ExportedSpan] = []
        self.metrics = {rank: ScrapedMetrics() for rank in ranks}
        self.answers: dict[int, ProcessStatus | None] = dict.fromkeys(self.metrics)
        self.waiting: defaultdict[str, dict[int, dict[int, str]]] = defaultdict(dict)
        self._urls: dict[int, str] = {}
        self._turns = cycle(self.metrics)
        self._read: defaultdict[Path, int] = defaultdict(int)

    def poll(self, *, whole: bool = False) -> list[Event]:
        """Read what is new; give the new events, in their order.

        Args:
            whole: Read the metrics of every rank, and not of some in turn, which is
                enough while something goes on.
        """
        new: list[Event] = []
        for rank in self.metrics:
            new += self._lines(self._folder.log(rank))
            for line in self._lines(self._folder.trace(rank)):
                self.spans.append(ExportedSpan.read(rank, line))
        new.sort(key=lambda event: str(event["timestamp"]))
        self.events += new
        for event in new:
            if event["event"] == names.TELEMETRY_SERVING:
                self._urls[event["rank"]] = event["url"]
        turn = {next(self._turns) for _ in range(_AT_ONCE)}
        for rank, url in self._urls.items():
            self._ask(rank, url, metrics=whole or rank in turn)
        return new

    def has_started(self, rank: int) -> bool:
        """Tell whether it has said where it can be asked."""
        return rank in self._urls

    def url_of(self, rank: int, page: str) -> str:
        """Give the address of one of a rank's pages."""
        return self._urls[rank].removesuffix("/metrics") + page

    def _ask(self, rank: int, url: str, *, metrics: bool) -> None:
        try:
            inflight = fetch(self.url_of(rank, "/inflight"), _WITHIN)
            answer = self.answers[rank] = ProcessStatus.from_bytes(inflight)
            # Who is missing is in the metrics only while somebody waits.
            page = fetch(url, _WITHIN) if metrics or answer.barriers else None
        except (OSError, HTTPException, ValueError):
            self.answers[rank] = None
            return
        if page is not None:
            self._read_metrics(rank, page)

    def _read_metrics(self, rank: int, page: bytes) -> None:
        metrics = self.metrics[rank] = ScrapedMetrics(page)
        self._folder.metrics(rank).write_bytes(page)
        for family, missing in metrics.missing.items():
            self.waiting[family][rank] = missing
            self._folder.metrics(rank, waiting=True).write_bytes(page)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Read the lines that were added, whole ones only."""
        try:
            with path.open("rb") as file:
                file.seek(self._read[path])
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read[path] += len(whole)
        for line in whole.splitlines():
            # torch's own words are in the log too.
            if line.startswith(b"{"):
                yield json.loads(line)
