"""The views of the screen as rows: pure functions of the job's view."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tracedstore.common.ranges import fold, ranks_text
from tracedstore.common.text import duration, plural
from tracedstore.tools.job_view import (
    BarrierView,
    JobView,
    OperationRate,
    ProcessGroupView,
    RankState,
    RankView,
    RendezvousView,
)
from tracedstore.tools.top.fleet import GLYPHS, WAS_MISSING, bytes_text, legend
from tracedstore.tools.top.rows import (
    Span,
    TextRow,
    fit,
    pad,
    remaining,
    row,
    shorten,
    sparkline,
    state_style,
    styled,
    wrap,
)

VIEWS: Final = ("fleet", "barriers", "stragglers", "rendezvous", "store", "groups")
_LAST_BARRIERS = 8
NARROW = 70
# Rows; a headline has at most a thousand characters.
_WHOLE = 50
# More ranks than this have a line for each host in the arrivals at a barrier.
_MAX_RANKS = 48
_LABEL = 20
_TIME = 10
_WAITS, _PARTLY = "━", "─"

_KEYS: Final = (
    ("1 to 6, Tab", "fleet, barriers, stragglers, rendezvous, store, groups"),
    ("arrows, Page, Home, End", "select; a click does it too"),
    ("Enter", "show all of what is selected; show hosts that are folded"),
    ("Esc", "back; remove the filter"),
    ("/", "filter the fleet: a host, a rank, ranks 8-15, or a state"),
    ("s", "the stacks of the selected rank, asked through the store"),
    ("i", "the whole headline, its evidence and what could not be read"),
    ("e", "save the screen as text and as SVG, in this folder or the browser's"),
    ("r", "write a report (HTML) of what was seen so far, there too"),
    ("q, Ctrl-C", "quit"),
)
_REPLAY_KEYS: Final = (
    ("Space", "pause, go on"),
    (", and .", "one step back, one step on"),
    ("< and >", "slower, faster"),
    ("n and p", "the next time at which something went wrong, the one before"),
    ("0", "from the start"),
)
_STATE_TEXTS: Final = {
    RankState.GONE: "its process has ended",
    RankState.STOPPED: "its process is alive and does not run Python code",
    RankState.AWAITED: "the job waits for it",
    RankState.NOT_STARTED: "it has not registered in the store",
    RankState.NO_ANSWER: "its endpoint is silent; others of its host answer",
    RankState.WAITING: "it waits in a barrier or a Store call",
    RankState.RUNNING: "it has registered, and nothing else is known",
}


def headline_rows(job: JobView, width: int, limit: int) -> list[TextRow]:
    """Return the sentence about the job in at most `limit` rows."""
    marks = {"good": "OK ", "notable": "!  ", "bad": "!! "}
    text = marks[job.level] + job.headline
    rows = wrap(text, width, job.level, indent=3)
    if len(rows) > limit:
        rows = rows[:limit]
        last = shorten(rows[-1].text, width - 3)
        rows[-1] = row(Span(last + "...", job.level))
    return rows


def detail_of_headline(job: JobView, width: int) -> list[TextRow]:
    """Return the whole sentence, the evidence and what could not be read."""
    rows = [*headline_rows(job, width, _WHOLE), *_details(job, width)]
    for note in job.notes:
        rows += wrap(f"   {note}", width, "notable", indent=5)
    return rows


def _details(job: JobView, width: int) -> list[TextRow]:
    return [
        one
        for sentence in job.details
        for one in wrap(f"   {sentence}", width, indent=5)
    ]


def barrier_rows(job: JobView, width: int) -> list[TextRow]:
    """Return the barriers: those in progress first, then the newest ones."""
    name = max(12, width // 3 - 6)
    number = len(job.unfinished)
    rows = [_barrier_heading(f" in progress: {number}", name, "waits", "missing")]
    rows += [_in_progress(job, one, width) for one in reversed(job.unfinished)]
    total = len(job.finished) + job.more_finished
    shown = f", {len(job.finished)} shown" if job.more_finished else ""
    title = f" finished: {total:,}{shown}"
    rows.append(_barrier_heading(title, name, "spread", "last"))
    rows += [_finished(job, one, width) for one in reversed(job.finished)]
    return rows


def _barrier_heading(title: str, name: int, time: str, last: str) -> TextRow:
    columns = f"{fit(title, name + 2)} {'arrived':>11} {time:>11}  {last}"
    return row(styled(columns, "heading"))


def _in_progress(job: JobView, barrier: BarrierView, width: int) -> TextRow:
    of = "?" if barrier.world_size is None else f"{barrier.world_size:,}"
    age = "" if barrier.first is None else duration(job.time - barrier.first)
    missing = barrier.missing.removeprefix("missing ") or "unknown"
    if barrier.abandoned:
        missing = f"abandoned: {missing}"
    elif barrier.complete:
        missing = ""
    style = "dim" if barrier.abandoned else "awaited"
    return _barrier_row(
        barrier, f"{barrier.arrived:,}/{of}", age, missing, style, width
    )


def _finished(job: JobView, barrier: BarrierView, width: int) -> TextRow:
    spread = ""
    known = []
    if barrier.first is not None and barrier.last is not None:
        spread = duration(barrier.last - barrier.first)
    if barrier.last_rank is not None:
        host = f" on {barrier.last_host}" if barrier.last_host else ""
        known.append(f"rank {barrier.last_rank}{host}")
    if barrier.last is not None:
        known.append(f"{duration(job.time - barrier.last)} ago")
    text = ", ".join(known)
    return _barrier_row(barrier, f"{barrier.arrived:,}", spread, text, "", width)


def _barrier_row(
    barrier: BarrierView, arrived: str, time: str, text: str, style: str, width: int
) -> TextRow:
    name = max(12, width // 3 - 6)
    left = f"  {fit(barrier.prefix, name)} {arrived:>11} {time:>11}  "
    return row(
        Span(left),
        Span(shorten(text, max(8, width - name - 28)), style),
        target=("barrier", barrier.prefix),
    )


def straggler_rows(job: JobView, width: int) -> list[TextRow]:
    """Return the ranks that arrived last, the most costly first."""
    head = f" {'rank':>7}  {'host':<20} {'last':>5} {'worst':>10} {'cost':>10}"
    rows = [row(styled(head, "heading"))]
    groups = {rank.rank: rank.group for rank in job.ranks}
    for one in job.last_ranks():
        text = f" {one.rank:>7}  {fit(one.host, 20)} {one.times_last:>5}"
        text += f" {duration(one.worst):>10} {duration(one.cost):>10}"
        target = ("rank", (groups.get(one.rank, ""), one.rank))
        rows.append(row(Span(text), target=target))
    if len(rows) == 1:
        rows.append(row(styled("  no finished barrier has times", "dim")))
    number = len(job.finished)
    note = (
        f"last: of {number} barriers, how often it was the last one. worst, cost: how"
        " much later it came than half of the ranks, at most and in all"
    )
    return [*rows, row(), *wrap(f" {note}", width, "dim", indent=1)]


def rendezvous_rows(job: JobView, width: int) -> list[TextRow]:
    """Return the rendezvous with their nodes."""
    rows: list[TextRow] = []
    for one in job.rendezvous:
        rows += _rendezvous(one, width)
    if not rows:
        rows.append(row(styled(" no rendezvous of torchrun in this store", "dim")))
    return rows


def _rendezvous(one: RendezvousView, width: int) -> Iterator[TextRow]:
    if not one.readable:
        text = f" {one.run_id}: its state cannot be read"
        yield row(Span(shorten(text, width), "notable"))
        return
    state = "complete" if one.complete else "not complete"
    state += ", closed" if one.closed else ""
    text = f" {shorten(one.run_id, width // 2)}: round {one.round}, {state}"
    good = one.complete or one.closed
    yield row(Span(text, "heading" if good else "bad"))
    if one.worker_store:
        yield row(Span(shorten(f"   worker store: {one.worker_store}", width)))
    if one.problem:
        yield from wrap(f"   {one.problem}", width, "notable", indent=5)
    for joined, label in ((True, "joined"), (False, "wait for the next round")):
        nodes = one.joined(joined=joined)
        if nodes:
            yield row(styled(f"   {label}: {len(nodes):,}", "heading"))
        # The silent ones first.
        for node in sorted(nodes, key=lambda node: -(node.silent or 0.0)):
            silent = node.silent
            heard = "no heartbeat yet"
            if silent is not None:
                heard = f"heartbeat {duration(silent)} ago"
            late = node.is_silent and not one.closed
            yield row(
                Span(f"     {fit(node.name, max(20, width - 34))} "),
                styled(heard, "bad" if late else ""),
            )


def store_rows(job: JobView, width: int) -> list[TextRow]:
    """Return the Store calls by operation and by rank."""
    rates = job.rates
    if rates is None:
        return [row(styled(" reading the endpoints of the ranks ...", "dim"))]
    if not rates.serving:
        text = (
            "no rank serves an endpoint: TRACEDSTORE_HTTP_PORT makes ranks serve their"
            " metrics"
        )
        return wrap(f" {text}", width, "dim", indent=1)
    if not rates.ranks:
        text = f" {rates.serving:,} ranks: the second reading has the rates"
        return [row(styled(shorten(text, width), "dim"))]
    number = f"{len(rates.ranks):,} of {rates.serving:,} ranks with an endpoint"
    chart = max(8, width - 52)
    head = f" {'operation':<14} {'calls/s':>10} {'p50':>9} {'p99':>9}  {number}"
    rows = [row(Span(shorten(head, width), "heading"))]
    rows += [_operation(one, chart) for one in rates.operations]
    lost = f" {'CAS lost':<14} {rates.lost:>10,.1f} {'':>9} {'':>9}  "
    style = "notable" if rates.lost else ""
    rows.append(row(Span(lost), Span(sparkline(rates.lost_history, chart), style)))
    head = f" {'rank':>7}  {'host':<20} {'calls/s':>10} {'p99':>9} {'CAS lost/s':>11}"
    rows += [row(), row(styled(head, "heading"))]
    for one in rates.ranks:
        text = f" {one.rank:>7}  {fit(one.host, 20)} {one.per_second:>10,.1f}"
        text += f" {_quantile(one.p99):>9} {one.lost:>11,.1f}"
        rows.append(row(Span(text)))
    return rows


def _operation(one: OperationRate, chart: int) -> TextRow:
    text = f" {fit(one.operation, 14)} {one.per_second:>10,.1f}"
    text += f" {_quantile(one.p50):>9} {_quantile(one.p99):>9}  "
    return row(Span(text), Span(sparkline(one.history, chart), "chart"))


def _quantile(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def rank_rows(
    job: JobView, rank: RankView, width: int, stacks: Sequence[str] = ()
) -> list[TextRow]:
    """Return everything about one rank."""
    host = f" on {rank.host}" if rank.host else ""
    waited = "" if rank.waited is None else f" for {duration(rank.waited)}"
    title = f"rank {rank.rank}{host}: {rank.state.label}{waited}"
    rows = [row(Span(shorten(title, width), state_style(rank.state)))]
    if rank.doing:
        rows += wrap(f"  {rank.doing}", width, indent=4)
    if used := _usage(job, rank):
        rows += wrap(f"  {used}", width, indent=4)
    if rank.log:
        rows.append(row(Span(shorten(f"  last line logged: {rank.log}", width))))
    if not stacks and (step := next_step(job, rank)):
        rows.append(row(styled(f"  {step}", "notable")))
        if rank.state <= RankState.AWAITED:
            # How it is known that the job waits for it.
            rows += _details(job, width)
    if rank.registered is not None:
        rows += wrap(f"  {_registration(job, rank)}", width, "dim", indent=4)
    if rank.endpoint:
        rows.append(row(Span(shorten(f"  serves {rank.endpoint}", width), "dim")))
    for line in stacks:
        rows += wrap(f"  {line}", width, indent=6)
    rows += _last_barriers(job, rank, width)
    return rows


def _registration(job: JobView, rank: RankView) -> str:
    facts = [f"pid {rank.pid}"]
    if rank.local_rank is not None:
        facts.append(f"local rank {rank.local_rank}")
    if rank.attempt:
        facts.append(f"attempt {rank.attempt}")
    if rank.run_id:
        facts.append(f"run {rank.run_id}")
    facts.append(f"registered {duration(job.time - (rank.registered or 0.0))} ago")
    if rank.group:
        facts.append(f"under {rank.group}")
    return ", ".join(facts)


def _usage(job: JobView, rank: RankView) -> str:
    parts = []
    if rank.moved is not None:
        ago = duration(job.time - rank.moved)
        parts.append(f"last progress {ago} ago")
    if rank.cpu is not None:
        parts.append(f"{rank.cpu:.0%} of a core")
    if rank.memory is not None:
        parts.append(f"{bytes_text(rank.memory)} of memory")
    return ", ".join(parts)


def _last_barriers(job: JobView, rank: RankView, width: int) -> Iterator[TextRow]:
    barriers = [*job.finished, *job.unfinished]
    shown = [one for one in barriers if one.group == rank.group and one.times]
    lines = list(_barriers_of(reversed(shown), rank, width))[:_LAST_BARRIERS]
    if lines:
        yield row(styled("  last barriers:", "heading"))
        yield from lines


def _barriers_of(
    barriers: Iterable[BarrierView], rank: RankView, width: int
) -> Iterator[TextRow]:
    for one in barriers:
        name = fit(one.prefix, max(12, width // 3))
        if rank.rank in one.missing_ranks:
            yield row(Span(f"    {name} "), styled("missing", "awaited"))
            continue
        try:
            order = one.ranks.index(rank.rank)
        except ValueError:
            continue
        after = one.times[order] - (one.first or one.times[order])
        text = f"number {order + 1:,} of {one.arrived:,}"
        text += f", {duration(after)} after the first"
        if not one.complete:
            text += ", waits"
        style = "last" if one.complete and rank.rank == one.last_rank else ""
        yield row(Span(f"    {name} "), styled(text, style))


def view_rows(view: str, job: JobView, width: int) -> list[TextRow]:
    """Return the rows of a view other than the fleet."""
    make = {
        "barriers": barrier_rows,
        "stragglers": straggler_rows,
        "rendezvous": rendezvous_rows,
        "store": store_rows,
        "groups": group_rows,
    }[view]
    return make(job, width)


def group_rows(job: JobView, width: int) -> list[TextRow]:
    """Return the process groups in which a collective does not end."""
    if not job.process_groups:
        text = (
            "no collective is stuck. Ranks publish their numbers when one does not end;"
            " those of a job that moves differ from moment to moment"
        )
        return wrap(f" {text}", width, "dim", indent=1)
    name = max(12, width // 3 - 6)
    head = f" {fit('group', name)} {'ranks':>7} {'waits':>11}  behind"
    rows = [row(styled(head, "heading"))]
    for one in job.process_groups:
        waited = duration(max(0.0, job.time - one.started))
        left = f" {fit(_group_name(one), name)} {len(one.members):>7,} {waited:>11}  "
        behind = _behind(one) if one.behind else "no rank: all have called it"
        style = "awaited" if one.behind else ""
        rows.append(
            row(
                Span(left),
                Span(shorten(behind, remaining(left, width)), style),
                target=("group", one.name),
            )
        )
    return rows


def _group_name(one: ProcessGroupView) -> str:
    return f"{one.name} ({one.description})" if one.description else one.name


def _behind(one: ProcessGroupView) -> str:
    """Return ``rank 2 at 50``, the ranks with one number together."""
    by_number: dict[int | None, list[int]] = {}
    for rank in one.behind:
        by_number.setdefault(one.called.get(rank), []).append(rank)
    return "; ".join(
        f"{ranks_text(some)} at {'an unknown number' if number is None else number}"
        for number, some in by_number.items()
    )


def group_detail(job: JobView, name: str, width: int) -> list[TextRow]:
    """Return the members of a process group by the collective that they are in."""
    rows: list[TextRow] = []
    for one in job.process_groups:
        if one.name != name:
            continue
        title = f"group {_group_name(one)}: {plural(len(one.members), 'rank')}"
        text = f"{title}, {fold(one.members)}"
        rows.append(row(Span(shorten(text, width), "heading")))
        for (number, what), some in sorted(one.waiting.items()):
            operation, _, sizes = what.partition(" ")
            called = " ".join(filter(None, (operation, str(number or ""), sizes)))
            rows += wrap(f"  wait in {called}: {ranks_text(some)}", width, "waiting", 4)
        for place, some in one.places.items():
            rows += wrap(f"    called at {place}: {ranks_text(some)}", width, "dim", 6)
        if one.behind:
            rows += wrap(f"  behind: {_behind(one)}", width, "awaited", 4)
        rest = set(one.members) - set(one.behind)
        rest -= {rank for some in one.waiting.values() for rank in some}
        if rest:
            text = f"  not known to wait: {ranks_text(rest)}"
            rows += wrap(text, width, "dim", 4)
    return rows


def next_step(job: JobView, rank: RankView | None) -> str:
    """Return which key to press next; "" if nothing is wrong."""
    if job.level == "good" or job.loading:
        return ""
    if rank is not None and rank.state in (RankState.AWAITED, RankState.STOPPED):
        return f"next: s shows the stacks of rank {rank.rank}, i the whole verdict"
    return "next: i shows the whole verdict, r writes a report"


def barrier_detail(job: JobView, prefix: str, width: int) -> list[TextRow]:
    """Return the arrivals at a barrier."""
    for barrier in (*job.unfinished, *job.finished):
        if barrier.prefix == prefix:
            return waterfall(job, barrier, width)
    return []


def title_row(job: JobView, width: int, right: str) -> TextRow:
    """Return the first line: the store, the states of all ranks, and the time."""
    counts = legend(job.ranks)
    room = width - len(counts.text) - len(right) - 4
    name = fit(job.source, max(10, room))
    used = len(name) + len(counts.text) + len(right) + 2
    gap = " " * max(1, width - used)
    if width < NARROW:
        return row(Span(name, "title"), " ", *counts.spans)
    return row(Span(name, "title"), " ", *counts.spans, Span(gap + right, "dim"))


def waterfall(job: JobView, barrier: BarrierView, width: int) -> list[TextRow]:
    """Return a line for each rank, or for each host of a large job.

    A line begins when the rank arrived and lasts as long as it waits. Missing ranks
    are first, then the latest arrivals.
    """
    hosts = {rank.rank: rank for rank in job.ranks if rank.group == barrier.group}
    rows = _barrier_title(job, barrier, width)
    first, end = barrier.first, _barrier_end(job, barrier)
    if first is None or end is None:
        rows.append(row(styled("  no times: the store has no ledger", "dim")))
        return rows
    arrived = dict(zip(barrier.ranks, barrier.times, strict=False))
    if not arrived:
        rows.append(row(styled("  its arrivals are too many to be shown", "dim")))
        return rows
    scale = _Scale(first, end, max(10, width - _LABEL - _TIME - 3))
    if len(arrived) + len(barrier.missing_ranks) <= _MAX_RANKS:
        rows += _by_rank(barrier, arrived, hosts, scale)
    else:
        rows += _by_host(barrier, arrived, hosts, scale)
    return rows


class _Scale:
    """Times as columns."""

    def __init__(self, first: float, end: float, width: int) -> None:
        self.first = first
        self.width = width
        self._span = max(end - first, 1e-9)

    def column(self, time: float) -> int:
        share = (time - self.first) / self._span
        return min(self.width - 1, max(0, int(share * (self.width - 1))))

    def bar(self, first: float, last: float, style: str) -> Span:
        """Return a line from the first arrival, thicker from the last one on."""
        start, full = self.column(first), self.column(last)
        text = " " * start + _PARTLY * (full - start) + _WAITS * (self.width - full)
        return Span(text, style)


def _barrier_title(job: JobView, barrier: BarrierView, width: int) -> list[TextRow]:
    of = "" if barrier.world_size is None else f" of {barrier.world_size:,}"
    if barrier.complete:
        state = "complete"
    elif barrier.abandoned:
        state = "abandoned"
    else:
        state = "in progress"
    text = f"{shorten(barrier.prefix, width // 2)}: {barrier.arrived:,}{of} arrived"
    if barrier.first is not None and barrier.last is not None:
        text += f" within {duration(barrier.last - barrier.first)}"
        if not barrier.complete:
            text += f", the first {duration(job.time - barrier.first)} ago"
    return [row(styled(shorten(f"{text} ({state})", width), "heading"))]


def _barrier_end(job: JobView, barrier: BarrierView) -> float | None:
    if barrier.complete or barrier.abandoned or barrier.last is None:
        return barrier.last
    return max(job.time, barrier.last)


def _by_rank(
    barrier: BarrierView,
    arrived: Mapping[int, float],
    hosts: Mapping[int, RankView],
    scale: _Scale,
) -> list[TextRow]:
    rows = []
    for number in barrier.missing_ranks:
        label = _label(number, hosts)
        style = _style_of(number, hosts)
        rows.append(_line(label, Span(" " * scale.width), "missing", style))
    latest = sorted(arrived.items(), key=lambda one: (-one[1], one[0]))
    for number, time in latest:
        style = "last" if number == barrier.last_rank else "waiting"
        bar = scale.bar(time, time, style)
        rows.append(_line(_label(number, hosts), bar, _after(time, scale), style))
    return rows


def _by_host(
    barrier: BarrierView,
    arrived: Mapping[int, float],
    hosts: Mapping[int, RankView],
    scale: _Scale,
) -> list[TextRow]:
    missing: dict[str, list[int]] = {}
    for number in barrier.missing_ranks:
        missing.setdefault(_host(number, hosts), []).append(number)
    times: dict[str, list[float]] = {}
    for number, time in arrived.items():
        times.setdefault(_host(number, hosts), []).append(time)
    rows = []
    for host, ranks in sorted(missing.items(), key=lambda one: one[1][0]):
        text = f"{host} ({fold(ranks)})"
        style = _style_of(ranks[0], hosts)
        bar = Span(" " * scale.width)
        if host in times:
            bar = scale.bar(min(times[host]), scale.first + 1e18, "waiting")
        rows.append(_line(text, bar, f"{len(ranks):,} missing", style))
    last_host = _host(barrier.last_rank, hosts)
    for host in sorted(times.keys() - missing.keys(), key=lambda h: -max(times[h])):
        earliest, latest = min(times[host]), max(times[host])
        style = "last" if barrier.complete and host == last_host else "waiting"
        bar = scale.bar(earliest, latest, style)
        rows.append(_line(host, bar, _after(latest, scale), style))
    return rows


def _line(label: str, bar: Span, text: str, style: str) -> TextRow:
    return row(
        Span(" " + fit(label, _LABEL) + " "), bar, styled(pad(f" {text}", 0), style)
    )


def _after(time: float, scale: _Scale) -> str:
    return f"+{duration(time - scale.first)}"


def _host(number: int | None, hosts: Mapping[int, RankView]) -> str:
    rank = None if number is None else hosts.get(number)
    return rank.host if rank is not None and rank.host else "(unknown host)"


def _label(number: int, hosts: Mapping[int, RankView]) -> str:
    rank = hosts.get(number)
    return f"{number} {rank.host}" if rank is not None else f"{number}"


def _style_of(number: int, hosts: Mapping[int, RankView]) -> str:
    rank = hosts.get(number)
    bad = rank is not None and rank.state < RankState.AWAITED
    return rank.state.name.lower() if bad and rank is not None else "awaited"


def help_rows(width: int, *, replay: bool) -> list[TextRow]:
    """Return the keys and the states."""
    rows = [row(styled(" keys", "heading"))]
    for keys, text in (*_KEYS, *(_REPLAY_KEYS if replay else ())):
        rows += wrap(f"  {keys:<24}{text}", width, indent=26)
    rows += [row(), row(styled(" a character for each rank", "heading"))]
    for state, text in _STATE_TEXTS.items():
        rows.append(
            row(
                "  ",
                Span(GLYPHS[state], state_style(state)),
                f" {state.label:<13}{text}",
            )
        )
    if replay:
        text = "the job has waited for it before"
        rows.append(
            row("  ", Span(WAS_MISSING, "notable"), f" {'was missing':<13}{text}")
        )
    return rows
