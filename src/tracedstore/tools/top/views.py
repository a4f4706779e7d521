"""The views of the screen as rows: pure functions of the model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tracedstore.common.text import duration
from tracedstore.tools.top.fleet_grid import legend
from tracedstore.tools.top.model import Barrier, Model, OperationRate, Rank, Rendezvous
from tracedstore.tools.top.rows import (
    Row,
    Span,
    fit,
    row,
    shorten,
    sparkline,
    state_style,
    styled,
    wrap,
)
from tracedstore.tools.top.waterfall import waterfall

VIEWS: Final = ("fleet", "barriers", "stragglers", "rendezvous", "store")
# Seconds without a heartbeat after which `status` reports a node.
_SILENT_AFTER = 10.0
_LAST_BARRIERS = 8
_NARROW = 70
# Rows; a headline has at most a thousand characters.
_WHOLE = 50


def headline_rows(model: Model, width: int, limit: int) -> list[Row]:
    """Return the sentence about the job in at most `limit` rows."""
    marks = {"good": "OK ", "notable": "!  ", "bad": "!! "}
    text = marks[model.level] + model.headline
    rows = wrap(text, width, model.level, indent=3)
    if len(rows) > limit:
        rows = rows[:limit]
        last = shorten(rows[-1].text, width - 3)
        rows[-1] = row(Span(last + "...", model.level))
    return rows


def detail_of_headline(model: Model, width: int) -> list[Row]:
    """Return the whole sentence, the evidence and what could not be read."""
    rows = headline_rows(model, width, _WHOLE)
    for sentence in model.details:
        rows += wrap(f"   {sentence}", width, indent=5)
    for note in model.notes:
        rows += wrap(f"   {note}", width, "notable", indent=5)
    return rows


def barrier_rows(model: Model, width: int) -> list[Row]:
    """Return the barriers: those in progress first, then the newest ones."""
    name = max(12, width // 3 - 6)
    number = len(model.in_progress)
    rows = [_barrier_heading(f" in progress: {number}", name, "waits", "missing")]
    rows += [_in_progress(model, one, width) for one in reversed(model.in_progress)]
    total = len(model.finished) + model.more_finished
    shown = f", {len(model.finished)} shown" if model.more_finished else ""
    title = f" finished: {total:,}{shown}"
    rows.append(_barrier_heading(title, name, "spread", "last"))
    rows += [_finished(model, one, width) for one in reversed(model.finished)]
    return rows


def _barrier_heading(title: str, name: int, time: str, last: str) -> Row:
    columns = f"{fit(title, name + 2)} {'arrived':>11} {time:>11}  {last}"
    return row(styled(columns, "heading"))


def _in_progress(model: Model, barrier: Barrier, width: int) -> Row:
    of = "?" if barrier.world_size is None else f"{barrier.world_size:,}"
    age = "" if barrier.first is None else duration(model.time - barrier.first)
    missing = barrier.missing.removeprefix("missing ") or "unknown"
    if barrier.abandoned:
        missing = f"abandoned: {missing}"
    elif barrier.complete:
        missing = ""
    style = "dim" if barrier.abandoned else "awaited"
    return _barrier_row(
        barrier, f"{barrier.arrived:,}/{of}", age, missing, style, width
    )


def _finished(model: Model, barrier: Barrier, width: int) -> Row:
    spread = ""
    known = []
    if barrier.first is not None and barrier.last is not None:
        spread = duration(barrier.last - barrier.first)
    if barrier.last_rank is not None:
        host = f" on {barrier.last_host}" if barrier.last_host else ""
        known.append(f"rank {barrier.last_rank}{host}")
    if barrier.last is not None:
        known.append(f"{duration(model.time - barrier.last)} ago")
    text = ", ".join(known)
    return _barrier_row(barrier, f"{barrier.arrived:,}", spread, text, "", width)


def _barrier_row(
    barrier: Barrier, arrived: str, time: str, text: str, style: str, width: int
) -> Row:
    name = max(12, width // 3 - 6)
    left = f"  {fit(barrier.prefix, name)} {arrived:>11} {time:>11}  "
    return row(
        Span(left),
        Span(shorten(text, max(8, width - name - 28)), style),
        target=("barrier", barrier.prefix),
    )


def straggler_rows(model: Model, width: int) -> list[Row]:
    """Return the ranks that arrived last, the most costly first."""
    head = f" {'rank':>7}  {'host':<20} {'last':>5} {'worst':>10} {'cost':>10}"
    rows = [row(styled(head, "heading"))]
    groups = {rank.rank: rank.group for rank in model.ranks}
    for one in model.stragglers():
        text = f" {one.rank:>7}  {fit(one.host, 20)} {one.times_last:>5}"
        text += f" {duration(one.worst):>10} {duration(one.cost):>10}"
        target = ("rank", (groups.get(one.rank, ""), one.rank))
        rows.append(row(Span(text), target=target))
    if len(rows) == 1:
        rows.append(row(styled("  no finished barrier has times", "dim")))
    number = len(model.finished)
    note = (
        f"last: of {number} barriers, how often it was the last one. worst, cost: how"
        " much later it came than half of the ranks, at most and in all"
    )
    return [*rows, row(), *wrap(f" {note}", width, "dim", indent=1)]


def rendezvous_rows(model: Model, width: int) -> list[Row]:
    """Return the rendezvous with their nodes."""
    rows: list[Row] = []
    for one in model.rendezvous:
        rows += _rendezvous(one, width)
    if not rows:
        rows.append(row(styled(" no rendezvous of torchrun in this store", "dim")))
    return rows


def _rendezvous(one: Rendezvous, width: int) -> Iterator[Row]:
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
        nodes = [node for node in one.nodes if node.joined is joined]
        if nodes:
            yield row(styled(f"   {label}: {len(nodes):,}", "heading"))
        # The silent ones first.
        for node in sorted(nodes, key=lambda node: -(node.silent or 0.0)):
            silent = node.silent
            heard = "no heartbeat yet"
            if silent is not None:
                heard = f"heartbeat {duration(silent)} ago"
            late = silent is not None and silent > _SILENT_AFTER and not one.closed
            yield row(
                Span(f"     {fit(node.name, max(20, width - 34))} "),
                styled(heard, "bad" if late else ""),
            )


def store_rows(model: Model, width: int) -> list[Row]:
    """Return the Store calls by operation and by rank."""
    rates = model.rates
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


def _operation(one: OperationRate, chart: int) -> Row:
    text = f" {fit(one.operation, 14)} {one.per_second:>10,.1f}"
    text += f" {_quantile(one.p50):>9} {_quantile(one.p99):>9}  "
    return row(Span(text), Span(sparkline(one.history, chart), "chart"))


def _quantile(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def rank_rows(
    model: Model, rank: Rank, width: int, stacks: Sequence[str] = ()
) -> list[Row]:
    """Return everything about one rank."""
    host = f" on {rank.host}" if rank.host else ""
    waited = "" if rank.waited is None else f" for {duration(rank.waited)}"
    title = f"rank {rank.rank}{host}: {rank.state.label}{waited}"
    rows = [row(Span(shorten(title, width), state_style(rank.state)))]
    if rank.doing:
        rows += wrap(f"  {rank.doing}", width, indent=4)
    if rank.registered is not None:
        facts = [f"pid {rank.pid}"]
        if rank.local_rank is not None:
            facts.append(f"local rank {rank.local_rank}")
        if rank.attempt:
            facts.append(f"attempt {rank.attempt}")
        if rank.run_id:
            facts.append(f"run {rank.run_id}")
        facts.append(f"registered {duration(model.time - rank.registered)} ago")
        if rank.group:
            facts.append(f"under {rank.group}")
        rows += wrap(f"  {', '.join(facts)}", width, "dim", indent=4)
    if rank.endpoint:
        rows.append(row(Span(shorten(f"  serves {rank.endpoint}", width), "dim")))
    for line in stacks:
        rows += wrap(f"  {line}", width, indent=6)
    rows += _last_barriers(model, rank, width)
    return rows


def _last_barriers(model: Model, rank: Rank, width: int) -> Iterator[Row]:
    barriers = [*model.finished, *model.in_progress]
    shown = [one for one in barriers if one.group == rank.group and one.ranks]
    lines = list(_barriers_of(reversed(shown), rank, width))[:_LAST_BARRIERS]
    if lines:
        yield row(styled("  last barriers:", "heading"))
        yield from lines


def _barriers_of(barriers: Iterable[Barrier], rank: Rank, width: int) -> Iterator[Row]:
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


def view_rows(view: str, model: Model, width: int) -> list[Row]:
    """Return the rows of a view other than the fleet."""
    make = {
        "barriers": barrier_rows,
        "stragglers": straggler_rows,
        "rendezvous": rendezvous_rows,
        "store": store_rows,
    }[view]
    return make(model, width)


def barrier_detail(model: Model, prefix: str, width: int) -> list[Row]:
    """Return the arrivals at a barrier."""
    for barrier in (*model.in_progress, *model.finished):
        if barrier.prefix == prefix:
            return waterfall(model, barrier, width)
    return []


def title_row(model: Model, width: int, right: str) -> Row:
    """Return the first line: the store, the states of all ranks, and the time."""
    counts = legend(model.ranks)
    room = width - len(counts.text) - len(right) - 4
    name = fit(model.source, max(10, room))
    used = len(name) + len(counts.text) + len(right) + 2
    gap = " " * max(1, width - used)
    if width < _NARROW:
        return row(Span(name, "title"), " ", *counts.spans)
    return row(Span(name, "title"), " ", *counts.spans, Span(gap + right, "dim"))
