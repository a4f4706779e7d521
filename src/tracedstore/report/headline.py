"""What went wrong, in one sentence, and what there is to say of it in another."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tracedstore import names
from tracedstore.report.analysis import Analysis, Incident
from tracedstore.report.formatting import duration, listed, number, plural, ranks
from tracedstore.report.records import FAILED, TIMEOUT, Failure, Process
from tracedstore.report.values import NOBODY

_MOST_RANKS = 4
_MOST_HOSTS = 3
_LONGEST_NAME = 60
_LONGEST_ERROR = 160
# Beyond so many ranks nobody looks for those that were never heard of.
_MOST_SILENT = 100_000


class Headline(NamedTuple):
    """Plain text, not yet safe for HTML."""

    text: str
    more: str = ""
    bad: bool = True


def headline(analysis: Analysis) -> Headline:
    """Say the most important thing that there is to say."""
    found = analysis.incidents
    bad = [each for each in found if not each.round.completed]
    if bad:
        return _not_completed(analysis, bad)
    if analysis.failures:
        return _failed(analysis, *analysis.failures[0])
    if not analysis.rounds and (stalled := _stalled(analysis)):
        return stalled
    total = len(analysis.rounds)
    completed = f"{_all(total)} completed" if total else "No barrier is in these logs"
    if guessed := sum(each.round.seems_completed for each in found):
        completed += ", as far as can be told"
    if found:
        worst = max(found, key=_longest)
        late = f"{_who(analysis, worst.came)} kept the others waiting at"
        text = f"{completed}, but {late} {_short(worst.round.barrier.prefix)}"
        least = " or longer" if worst.round.seems_completed else ""
        more = [f"For {duration(_longest(worst))}{least}."]
        if guessed:
            more.append(f"The end of {plural(guessed, 'barrier')} is not in the logs.")
        return Headline(text, " ".join(more), bad=False)
    return Headline(completed, "Nothing that was told of failed.", bad=False)


def _longest(incident: Incident) -> float:
    return max(each.waited for each in incident.round.reports)


def _all(total: int) -> str:
    return "The only barrier" if total == 1 else f"All {number(total)} barriers"


def _not_completed(analysis: Analysis, bad: Sequence[Incident]) -> Headline:
    incident = bad[0]
    seen, where = incident.round, _short(incident.round.barrier.prefix)
    missing = incident.missing
    who = _who(analysis, missing)
    if seen.kind == FAILED:
        text = f"The store failed at {where}"
        if missing:
            text += f" while {who} {'was' if len(missing) == 1 else 'were'} missing"
    elif not missing:
        text = f"{where} timed out" if seen.kind == TIMEOUT else f"{where} has no end"
        text += ", and nobody could say who was missing"
    elif seen.kind == TIMEOUT:
        text = f"{_capital(who)} never came to {where}"
    else:
        until = "at the last warning" if seen.went_on else "when the logs end"
        text = f"{_capital(who)} had not come to {where} {until}"
    more = [_end(analysis, incident)]
    rest = Counter(each.round.went_on for each in bad[1:])
    if rest[False]:
        more.append(f"{plural(rest[False], 'more barrier')} did not complete either.")
    if rest[True]:
        more.append(f"{plural(rest[True], 'more barrier')} may not have completed.")
    return Headline(text, " ".join(more))


def _end(analysis: Analysis, incident: Incident) -> str:
    seen = incident.round
    told = [each for each in seen.reports if each.kind == seen.kind]
    last = max(told, key=lambda each: each.when)
    waited = duration(max(each.waited for each in told))
    when = analysis.when(last.when)
    if seen.kind == FAILED:
        first = min(told, key=lambda each: each.when)
        return f"{_error(first.said.text)}, at {analysis.when(first.when)} UTC."
    if seen.kind == TIMEOUT:
        return (
            f"{plural(len(told), 'rank')} of {number(seen.world_size)} gave up after"
            f" {waited}, the last at {when} UTC."
        )
    but = ", but one came to another barrier later" if seen.went_on else ""
    return (
        f"{plural(len(told), 'rank')} had waited for up to {waited} when last heard, at"
        f" {when} UTC. No end was seen{but}."
    )


def _failed(analysis: Analysis, process: Process, failure: Failure) -> Headline:
    host = analysis.facts.host(process.rank) or process.host
    who = f"rank {process.rank}" if process.rank != NOBODY else f"pid {process.pid}"
    on = f" on {_short(host)}" if host else ""
    others = len(analysis.failures) - 1
    more = f"{_error(failure.error)}, at {analysis.when(failure.when)} UTC."
    if others:
        more += f" Something failed in {plural(others, 'more process', 'es')} too."
    return Headline(f"{_capital(who)}{on} failed: {_short(failure.what)}", more)


def _stalled(analysis: Analysis) -> Headline | None:
    """Say who was blocked for longest, and who was never heard of meanwhile."""
    facts = analysis.facts
    found = {
        key: calls
        for key, calls in facts.calls.items()
        if key[0] == names.OPERATION_STALLED and calls.ranks - {NOBODY}
    }
    if not found:
        return None
    (_, _, operation, _), calls = max(found.items(), key=lambda one: one[1].longest)
    blocked = sorted(calls.ranks - {NOBODY})
    who = _capital(_who(analysis, blocked))
    was = "was" if len(blocked) == 1 else "were"
    text = f"{who} {was} blocked in {operation} {_short(calls.key)}"
    more = f"For {duration(calls.longest)} or longer."
    silent = sorted(set(range(min(facts.world_size, _MOST_SILENT))) - set(facts.heard))
    if silent:
        more += f" Nothing was heard of {_who(analysis, silent)}."
    return Headline(text, more)


def _who(analysis: Analysis, who: Sequence[int]) -> str:
    """Write ``ranks 0 and 5 on node1 and node3``."""
    if not who:
        return "somebody"
    few = len(who) <= _MOST_RANKS
    said = (
        f"rank{'s' if len(who) > 1 else ''} {listed(list(map(str, who)))}"
        if few
        else ranks(who, 100)
    )
    hosts = dict.fromkeys(filter(None, map(analysis.facts.name, who)))
    if not hosts:
        return said
    if len(hosts) > _MOST_HOSTS:
        return f"{said} on {number(len(hosts))} hosts"
    return f"{said} on {listed(list(map(_short, hosts)))}"


def _short(text: str, longest: int = _LONGEST_NAME) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _error(text: str) -> str:
    # A comma comes after it.
    return _short(text.strip().rstrip("."), _LONGEST_ERROR)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
