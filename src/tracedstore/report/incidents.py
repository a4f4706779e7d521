"""What went wrong: ranks that were missing, and what failed first."""

from collections.abc import Iterator, Sequence

from tracedstore.report.analysis import Analysis, Incident, Opinion
from tracedstore.report.barriers import Round
from tracedstore.report.formatting import duration, number, plural, ranks, safe
from tracedstore.report.records import (
    COMPLETED,
    FAILED,
    TIMEOUT,
    WAITING,
    Failure,
    Process,
)
from tracedstore.report.tables import MOST_ROWS, code, more, table
from tracedstore.report.values import NOBODY

_MOST_INCIDENTS = 30
_MOST_HOSTS = 16
_MOST_OPINIONS = 8
_ENDINGS = {
    WAITING: "no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}


def incidents(analysis: Analysis) -> Iterator[str]:
    """Barriers at which somebody was missed."""
    found = analysis.incidents
    if not found:
        yield '<p class="good">No barrier kept anybody waiting for long.</p>'
        return
    bad = [each for each in found if not each.round.completed]
    for incident in bad[:_MOST_INCIDENTS]:
        yield from _incident(analysis, incident)
    yield more(len(bad), _MOST_INCIDENTS, "incident")
    late = found[len(bad) :]
    if late:
        yield from _late(analysis, late)


def _late(analysis: Analysis, late: Sequence[Incident]) -> Iterator[str]:
    """Barriers that completed, after somebody had been missed: a line each."""
    yield '<article class="late"><h3>Late, but completed</h3>'
    yield table(
        "late",
        ["barrier", "came late", "missed by", "ranks", "completed (UTC)", "wait"],
        [
            [
                _barrier(analysis, incident),
                _places(analysis, incident.came) or "nobody knows who",
                _by(incident.opinions),
                number(len(incident.round.reports)),
                _completion(analysis, incident.round),
                duration(max(each.waited for each in incident.round.reports)),
            ]
            for incident in late[:MOST_ROWS]
        ],
        numbers=(3, 5),
        short=(4,),
    )
    if any(incident.round.seems_completed for incident in late):
        yield (
            '<p class="note">After: completed, as far as can be told. The end is not in'
            " the logs, but a process that waited came to another barrier later, and"
            " did not warn of this one again when that was due.</p>"
        )
    yield more(len(late), MOST_ROWS, "barrier") + "</article>"


def _completion(analysis: Analysis, seen: Round) -> str:
    if seen.kind == COMPLETED:
        return analysis.when(seen.end)
    return f"after {analysis.when(max(each.when for each in seen.reports))}"


def _barrier(analysis: Analysis, incident: Incident) -> str:
    barrier = incident.round.barrier
    several = len(analysis.jobs) > 1 and barrier.run_id
    job = f" of job {code(barrier.run_id)}" if several else ""
    return f"{code(barrier.prefix)}{job}"


def _by(opinions: Sequence[Opinion]) -> str:
    who = [
        report.rank
        for opinion in opinions
        for report in opinion.reports
        if report.rank != NOBODY
    ]
    return ranks(who) if who else "a rank without a name"


def _incident(analysis: Analysis, incident: Incident) -> Iterator[str]:
    seen = incident.round
    yield (
        f'<article data-barrier="{safe(seen.barrier.prefix)}">'
        f"<h3>{_barrier(analysis, incident)}: {_ENDINGS[seen.kind]}</h3>"
    )
    yield f"<p>{_who(analysis, incident)}</p>"
    yield (
        f'<p class="note">{analysis.when(seen.start)} to'
        f" {analysis.when(max(each.when for each in seen.reports))} UTC, for"
        f" {plural(seen.world_size, 'rank')}. {_agreement(incident)}</p>"
    )
    yield table(
        "opinions",
        ["said", "by", "ranks", "first (UTC)", "longest wait"],
        [_opinion(analysis, each) for each in incident.opinions[:_MOST_OPINIONS]],
        numbers=(2, 4),
        short=(3,),
    )
    yield more(len(incident.opinions), _MOST_OPINIONS, "opinion")
    if incident.missing:
        heard = _heard(analysis, incident.missing)
        yield f'<p class="note">Last word in the logs: {heard}.</p>'
    yield "</article>"


def _who(analysis: Analysis, incident: Incident) -> str:
    parts = []
    if incident.missing:
        places = _places(analysis, incident.missing)
        parts.append(f"{_missing(analysis, incident)}: {places}.")
    if incident.came:
        parts.append(f"Came after they were missed: {ranks(incident.came)}.")
    if not parts and incident.round.kind == FAILED:
        return "The store failed, so nobody knows who was missing."
    if not parts:
        parts.append("Nobody could say which ranks are missing.")
    if incident.round.kind == FAILED:
        parts.append("Then the store failed, and nobody could look again.")
    if incident.round.kind == WAITING:
        parts.append(
            "No end was seen: no rank told of a timeout, a failure or a completion, as"
            " when all of them are killed at once."
        )
    if incident.round.went_on:
        parts.append(
            "But a process that waited came to another barrier later, in the same"
            " thread or in another: this one may have completed."
        )
    return " ".join(parts)


def _places(analysis: Analysis, who: Sequence[int]) -> str:
    hosts: dict[str, list[int]] = {}
    for rank in who:
        hosts.setdefault(analysis.facts.name(rank), []).append(rank)
    places = [
        f"{ranks(group)} on {code(host)}" if host else ranks(group)
        for host, group in list(hosts.items())[:_MOST_HOSTS]
    ]
    if len(hosts) > len(places):
        places.append(f"{plural(len(hosts) - len(places), 'more host')}")
    return ", ".join(places)


def _missing(analysis: Analysis, incident: Incident) -> str:
    word = "<b class=bad>Missing</b>"
    if incident.round.kind == TIMEOUT:
        return word
    return f"{word} when last heard, at {analysis.when(incident.looked)} UTC"


def _agreement(incident: Incident) -> str:
    total = sum(len(each.reports) for each in incident.opinions)
    if total == 1:
        return "One rank said so."
    # Who did not warn before has not said anything else.
    warned = {each.warned for each in incident.opinions if each.warned.missing}
    if len({each.said for each in incident.opinions}) == 1 and len(warned) <= 1:
        return f"{number(total)} ranks said so, and they agree."
    return (
        f"{number(total)} ranks said so, and they do not agree:"
        f" {plural(len(incident.opinions), 'opinion')}."
    )


def _opinion(analysis: Analysis, opinion: Opinion) -> list[str]:
    said = safe(opinion.said.text) or "nothing"
    if opinion.warned.text:
        said += f"<br>before that: {safe(opinion.warned.text)}"
    return [
        said,
        _by([opinion]),
        number(len(opinion.reports)),
        analysis.when(min(report.when for report in opinion.reports)),
        duration(max(report.waited for report in opinion.reports)),
    ]


def _heard(analysis: Analysis, missing: Sequence[int]) -> str:
    """Say what was last heard of ranks, and when."""
    heard: dict[str, list[int]] = {}
    for rank in missing:
        _, event = analysis.facts.heard.get(rank, (0.0, ""))
        heard.setdefault(event, []).append(rank)
    said = []
    for event, who in heard.items():
        if not event:
            said.append(f"{ranks(who)}: none")
            continue
        times = [analysis.facts.heard[rank][0] for rank in who]
        first, last = (analysis.when(pick(times)) for pick in (min, max))
        until = f" to {last}" if last != first else ""
        said.append(f"{ranks(who)}: {code(event)} at {first}{until}")
    return "; ".join(said)


def failures(analysis: Analysis) -> Iterator[str]:
    """What failed first, and then."""
    found = analysis.failures
    if not found:
        yield '<p class="good">Nothing that was told of failed.</p>'
        return
    process, first = found[0]
    off = analysis.clock_off(analysis.facts.host(process.rank) or process.host)
    clock = f" (its clock is ahead of most by {duration(off)})" if off else ""
    yield (
        f'<p class="first" id="first-failure"><b>{_process(analysis, process)}</b> at'
        f" {analysis.when(first.when)} UTC{clock}: {code(first.event)}"
        f" {code(first.what)}<br>{safe(first.error)}</p>"
    )
    groups = _grouped(found)
    who = groups[0][1]
    if len(groups) == 1 and len(who) > 1:
        yield f"<p>The same failed in {_processes(analysis, who)}.</p>"
    yield (
        '<p class="note">The first failure of each process, by when the first of them'
        " had it, as their hosts' clocks have it. Only what passed through a store is"
        " known here: an exception elsewhere is in the job's own log.</p>"
    )
    if len(groups) == 1:
        return
    yield table(
        "failures",
        ["when (UTC)", "who", "event", "what", "error"],
        [
            [
                analysis.when(failure.when),
                _processes(analysis, who),
                code(failure.event),
                code(failure.what),
                safe(failure.error),
            ]
            for failure, who in groups[:MOST_ROWS]
        ],
        short=(0, 2),
    )
    yield more(len(groups), MOST_ROWS, "failure")


def _grouped(
    found: Sequence[tuple[Process, Failure]],
) -> list[tuple[Failure, list[Process]]]:
    """Put those together that failed in the same way, under the first of them."""
    alike: dict[tuple[str, str, str], tuple[Failure, list[Process]]] = {}
    for process, failure in found:
        key = failure.event, failure.what, failure.error
        alike.setdefault(key, (failure, []))[1].append(process)
    return list(alike.values())


def _processes(analysis: Analysis, who: Sequence[Process]) -> str:
    if len(who) == 1:
        return _process(analysis, who[0])
    named = [process.rank for process in who if process.rank != NOBODY]
    parts = [ranks(named)] if named else []
    if nameless := len(who) - len(named):
        parts.append(f"{number(nameless)} that are no rank")
    return f"{plural(len(who), 'process', 'es')}: {', '.join(parts)}"


def _process(analysis: Analysis, process: Process) -> str:
    if process.rank == NOBODY:
        return safe(f"pid {process.pid} on {process.host or 'some host'}")
    host = analysis.facts.host(process.rank)
    return safe(f"rank {process.rank}" + (f" on {host}" if host else ""))
