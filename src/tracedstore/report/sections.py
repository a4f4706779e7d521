"""The tables of the page."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tracedstore.report.analysis import Analysis, Incident, Opinion
from tracedstore.report.facts import (
    COMPLETED,
    FAILED,
    TIMEOUT,
    WAITING,
    Calls,
    Facts,
    Process,
)
from tracedstore.report.reading import Tally
from tracedstore.report.values import NOBODY
from tracedstore.report.words import duration, moment, number, plural, ranks, safe
from tracedstore.signals import names

_MOST_ROWS = 50
_MOST_INCIDENTS = 30
_MOST_OPINIONS = 8
_MOST_HEARD = 8
# Seconds; below, a difference is how long the store took to let a rank go.
_CLOCK_AGREES = 0.05
_ENDINGS = {
    COMPLETED: "late, but completed",
    WAITING: "no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}


def _table(
    name: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
) -> str:
    """Write a table; cells are HTML. The columns with numbers are set to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}{' class=n' if column in numbers else ''}>{cell}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="wide"><table id="t-{name}"><thead>{row(head, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _more(total: int, shown: int, thing: str) -> str:
    rest = total - shown
    return (
        f'<p class="note">and {plural(rest, f"more {thing}")}</p>' if rest > 0 else ""
    )


def _code(text: object) -> str:
    return f"<code>{safe(text)}</code>"


def incidents(analysis: Analysis) -> Iterator[str]:
    """Barriers at which somebody was missed."""
    found = analysis.incidents
    if not found:
        yield '<p class="good">No barrier kept anybody waiting for long.</p>'
        return
    for incident in found[:_MOST_INCIDENTS]:
        yield from _incident(analysis, incident)
    yield _more(len(found), _MOST_INCIDENTS, "incident")


def _incident(analysis: Analysis, incident: Incident) -> Iterator[str]:
    seen = incident.round
    kind = ' class="late"' if seen.kind == COMPLETED else ""
    job = f" of job {_code(seen.barrier.run_id)}" if seen.barrier.run_id else ""
    yield (
        f'<article{kind} data-barrier="{safe(seen.barrier.prefix)}">'
        f"<h3>{_code(seen.barrier.prefix)}{job}: {_ENDINGS[seen.kind]}</h3>"
    )
    yield f"<p>{_who(analysis, incident)}</p>"
    yield (
        f'<p class="note">{moment(seen.start)} to'
        f" {moment(max(each.when for each in seen.reports))} UTC, for"
        f" {plural(seen.world_size, 'rank')}. {_agreement(incident)}</p>"
    )
    yield _table(
        "opinions",
        ["said", "by", "ranks", "first", "longest wait"],
        [_opinion(opinion) for opinion in incident.opinions[:_MOST_OPINIONS]],
        numbers=(2, 4),
    )
    yield _more(len(incident.opinions), _MOST_OPINIONS, "opinion")
    if incident.missing:
        heard = "; ".join(
            f"rank {rank} {_heard(analysis.facts, rank)}"
            for rank in incident.missing[:_MOST_HEARD]
        )
        yield f'<p class="note">Last word in the logs: {heard}.</p>'
    yield "</article>"


def _who(analysis: Analysis, incident: Incident) -> str:
    parts = []
    if incident.missing:
        hosts: dict[str, list[int]] = {}
        for rank in incident.missing:
            hosts.setdefault(analysis.facts.host(rank), []).append(rank)
        places = [
            f"{ranks(group)} on {_code(host)}" if host else ranks(group)
            for host, group in list(hosts.items())[:16]
        ]
        if len(hosts) > len(places):
            places.append(f"{plural(len(hosts) - len(places), 'more host')}")
        parts.append(f"<b class=bad>Missing</b>: {', '.join(places)}.")
    if incident.came:
        how = "late" if incident.round.kind == COMPLETED else "after they were missed"
        parts.append(f"Came {how}: {ranks(incident.came)}.")
    return " ".join(parts) or "Nobody could say which ranks are missing."


def _agreement(incident: Incident) -> str:
    total = sum(len(each.reports) for each in incident.opinions)
    if total == 1:
        return "One rank said so."
    if len(incident.opinions) == 1:
        return f"{number(total)} ranks said so, and they agree."
    return (
        f"{number(total)} ranks said so, and they do not agree:"
        f" {plural(len(incident.opinions), 'opinion')}."
    )


def _opinion(opinion: Opinion) -> list[str]:
    who = [report.rank for report in opinion.reports if report.rank != NOBODY]
    return [
        safe(opinion.said.text) or "nothing",
        ranks(who) if who else "a rank without a name",
        number(len(opinion.reports)),
        moment(min(report.when for report in opinion.reports)),
        duration(max(report.waited for report in opinion.reports)),
    ]


def _heard(facts: Facts, rank: int) -> str:
    if rank not in facts.heard:
        return "none"
    when, event = facts.heard[rank]
    return f"{_code(event)} at {moment(when)}"


def failures(analysis: Analysis) -> Iterator[str]:
    """What failed first, and then."""
    found = analysis.failures
    if not found:
        yield '<p class="good">Nothing that was told of failed.</p>'
        return
    process, first = found[0]
    yield (
        f'<p class="first" id="first-failure"><b>{_process(analysis, process)}</b> at'
        f" {moment(first.when)} UTC: {_code(first.event)} {_code(first.what)}<br>"
        f"{safe(first.error)}</p>"
    )
    yield (
        '<p class="note">The first failure of each process, in order of time as their'
        " hosts' clocks have it. Only what passed through a store is known here: an"
        " exception elsewhere is in the job's own log.</p>"
    )
    yield _table(
        "failures",
        ["when (UTC)", "who", "event", "what", "error"],
        [
            [
                moment(failure.when),
                _process(analysis, process),
                _code(failure.event),
                _code(failure.what),
                safe(failure.error),
            ]
            for process, failure in found[:_MOST_ROWS]
        ],
    )
    yield _more(len(found), _MOST_ROWS, "process")


def _process(analysis: Analysis, process: Process) -> str:
    if process.rank == NOBODY:
        return safe(f"pid {process.pid} on {process.host or 'some host'}")
    host = analysis.facts.host(process.rank)
    return safe(f"rank {process.rank}" + (f" on {host}" if host else ""))


def stragglers(analysis: Analysis) -> Iterator[str]:
    """Who the others waited for."""
    found = analysis.stragglers
    if not found:
        yield '<p class="good">Of no barrier it is known who came last.</p>'
        return
    yield (
        '<p class="note">Those that never came, then those that cost most. Behind is'
        " how much later than half of the ranks, at completed barriers; cost is the"
        " sum of it over those to which the rank came last.</p>"
    )
    yield _table(
        "stragglers",
        [
            *("rank", "host", "missing at", "last at", "of", "cost"),
            *("behind (median)", "at worst", "there"),
        ],
        [
            [
                str(each.rank),
                safe(analysis.facts.host(each.rank)),
                number(each.missing),
                number(each.last),
                number(each.rounds),
                duration(each.cost),
                duration(each.late),
                duration(each.worst),
                _code(each.worst_at) if each.worst_at else "",
            ]
            for each in found[:_MOST_ROWS]
        ],
        numbers=(0, 2, 3, 4, 5, 6, 7),
    )
    yield _more(len(found), _MOST_ROWS, "rank")


_HOW = {
    names.OPERATION_FAILED: "failed",
    names.OPERATION_STALLED: "stalled",
    names.OPERATION_SLOW: "slow",
    names.CAS_CONTENDED: "lost compare-and-sets",
    names.RENDEZVOUS_CONFLICT: "lost writes of the rendezvous",
}


def calls(facts: Facts) -> Iterator[str]:
    """What took long or failed, by key family."""
    kinds = (names.OPERATION_FAILED, names.OPERATION_STALLED, names.OPERATION_SLOW)
    found = _sorted_calls(facts, kinds)
    if not found:
        yield '<p class="good">No call was slow, stalled or failed.</p>'
        return
    yield (
        '<p class="note">Calls that were not told, because the same trouble was told'
        " less than 10 s before, are counted where a later line said so; a stalled"
        " call is told again each time its wait has doubled.</p>"
    )
    yield _table(
        "calls",
        [
            *("", "key family", "call", "store", "calls", "ranks", "longest"),
            *("its key", "errors"),
        ],
        [
            [
                _HOW[kind],
                _code(family) if family else "",
                safe(operation),
                safe(store),
                number(each.count),
                number(len(each.ranks)),
                duration(each.longest),
                _code(each.key) if each.key else "",
                ", ".join(
                    f"{safe(error)} {number(count)}"
                    for error, count in each.errors.most_common(3)
                ),
            ]
            for (kind, family, operation, store), each in found[:_MOST_ROWS]
        ],
        numbers=(4, 5, 6),
    )
    yield _more(len(found), _MOST_ROWS, "kind")


def _sorted_calls(
    facts: Facts, kinds: Sequence[str]
) -> list[tuple[tuple[str, str, str, str], Calls]]:
    return sorted(
        ((key, each) for key, each in facts.calls.items() if key[0] in kinds),
        key=lambda item: (kinds.index(item[0][0]), -item[1].longest, item[0]),
    )


def contention(facts: Facts) -> Iterator[str]:
    """Writes that were lost to other writers, by key family."""
    found = _sorted_calls(facts, (names.CAS_CONTENDED, names.RENDEZVOUS_CONFLICT))
    if not found:
        yield '<p class="good">Nobody kept losing a compare-and-set.</p>'
        return
    yield _table(
        "cas",
        ["", "key family", "call", "store", "calls", "ranks", "most in a row"],
        [
            [
                _HOW[kind],
                _code(family) if family else "",
                safe(operation),
                safe(store),
                number(each.count),
                number(len(each.ranks)),
                number(int(each.longest)),
            ]
            for (kind, family, operation, store), each in found[:_MOST_ROWS]
        ],
        numbers=(4, 5, 6),
    )
    yield _more(len(found), _MOST_ROWS, "kind")


def others(facts: Facts) -> Iterator[str]:
    """What else was told: rendezvous, keys that were used before, our own failures."""
    if facts.rendezvous:
        yield '</section><section><h2 id="rendezvous">Rendezvous</h2>'
        yield _table(
            "rendezvous",
            ["event", "job", "cause", "said", "nodes"],
            [
                [_code(event), _code(run_id), safe(cause), safe(said), number(count)]
                for (event, run_id, cause, said), count in facts.rendezvous.most_common(
                    _MOST_ROWS
                )
            ],
            numbers=(4,),
        )
        yield _more(len(facts.rendezvous), _MOST_ROWS, "kind")
    rest: list[tuple[str, Any, int]] = [
        (names.BARRIER_STALE_KEY, barrier.prefix, count)
        for barrier, count in facts.stale.most_common(_MOST_ROWS)
    ]
    rest += [
        (names.TELEMETRY_DISABLED, " ".join(what), count)
        for what, count in facts.disabled.most_common(_MOST_ROWS)
    ]
    if rest:
        yield '</section><section><h2 id="others">Also told</h2>'
        yield _table(
            "others",
            ["event", "what", "times"],
            [[_code(event), _code(what), number(count)] for event, what, count in rest],
            numbers=(2,),
        )


def clocks(analysis: Analysis) -> Iterator[str]:
    """Whose clock is off."""
    if not analysis.clocks:
        yield (
            '<p class="note">Hosts have clocks of their own, and the logs say too'
            " little to compare them: an order of events on different hosts may be"
            " wrong by as much as these differ.</p>"
        )
        return
    off = {h: by for h, by in analysis.clocks.items() if abs(by) > _CLOCK_AGREES}
    yield (
        '<p class="note">Compared by when ranks were let go from completed barriers,'
        " which is the same moment for all. Times on this page are as the hosts have"
        " them.</p>"
    )
    if not off:
        yield (
            f'<p class="good">The clocks of {plural(len(analysis.clocks), "host")}'
            f" agree to {duration(_CLOCK_AGREES)}.</p>"
        )
        return
    worst = sorted(off.items(), key=lambda item: -abs(item[1]))
    yield _table(
        "clocks",
        ["host", "ahead of most by"],
        [[safe(host), duration(by)] for host, by in worst[:_MOST_ROWS]],
        numbers=(1,),
    )
    yield _more(len(off), _MOST_ROWS, "host")


def read(facts: Facts, tally: Tally) -> Iterator[str]:
    """How much of the input this is."""
    yield _table(
        "read",
        ["lines", "how many"],
        [
            ["all", number(tally.lines)],
            ["events", number(tally.events)],
            ["spans of barriers", number(tally.spans)],
            ["of others", number(tally.foreign)],
            ["cut off, or mixed with others", number(tally.broken)],
            ["events with fields that do not fit", number(tally.unfit)],
            ["too long", number(tally.long)],
        ],
        numbers=(1,),
    )
    yield _table(
        "events",
        ["event", "how many"],
        [[_code(event), number(count)] for event, count in facts.events.most_common()],
        numbers=(1,),
    )
    if tally.damaged:
        shown = "".join(f"<li>{safe(each)}</li>" for each in tally.damaged[:_MOST_ROWS])
        yield f'<p>Not read to the end:</p><ul id="damaged">{shown}</ul>'
        yield _more(len(tally.damaged), _MOST_ROWS, "file")
