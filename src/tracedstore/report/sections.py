"""What else the page has: who is late, what calls took, clocks, and what was read."""

from collections.abc import Iterator, Sequence
from typing import Any

from tracedstore import names
from tracedstore.report.analysis import CLOCK_AGREES, Analysis
from tracedstore.report.formatting import duration, number, plural, safe
from tracedstore.report.reader import ReadStats
from tracedstore.report.records import Calls, Facts
from tracedstore.report.tables import MOST_ROWS, code, more, table


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
    yield table(
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
                # Of none it came to, nothing is known.
                duration(each.cost) if each.rounds else "",
                duration(each.late) if each.rounds else "",
                duration(each.worst) if each.worst_at else "",
                code(each.worst_at) if each.worst_at else "",
            ]
            for each in found[:MOST_ROWS]
        ],
        numbers=(0, 2, 3, 4, 5, 6, 7),
    )
    yield more(len(found), MOST_ROWS, "rank")


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
    yield table(
        "calls",
        [
            *("", "key family", "call", "store", "calls", "ranks", "longest"),
            *("its key", "errors"),
        ],
        [
            [
                *_who_called(key, each),
                duration(each.longest),
                code(each.key) if each.key else "",
                ", ".join(
                    f"{safe(error)} {number(count)}"
                    for error, count in each.errors.most_common(3)
                ),
            ]
            for key, each in found[:MOST_ROWS]
        ],
        numbers=(4, 5, 6),
    )
    yield more(len(found), MOST_ROWS, "kind")


def _who_called(key: tuple[str, str, str, str], calls: Calls) -> list[str]:
    """Write the columns that all tables of calls begin with."""
    kind, family, operation, store = key
    return [
        _HOW[kind],
        code(family) if family else "",
        safe(operation),
        safe(store),
        number(calls.count),
        number(len(calls.ranks)),
    ]


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
    yield table(
        "cas",
        ["", "key family", "call", "store", "calls", "ranks", "most in a row"],
        [
            [*_who_called(key, each), number(int(each.longest))]
            for key, each in found[:MOST_ROWS]
        ],
        numbers=(4, 5, 6),
    )
    yield more(len(found), MOST_ROWS, "kind")


def others(facts: Facts) -> Iterator[str]:
    """What else was told: rendezvous, keys that were used before, our own failures."""
    if facts.rendezvous:
        yield '</section><section><h2 id="rendezvous">Rendezvous</h2>'
        yield table(
            "rendezvous",
            ["event", "job", "cause", "said", "nodes"],
            [
                [code(event), code(run_id), safe(cause), safe(said), number(count)]
                for (event, run_id, cause, said), count in facts.rendezvous.most_common(
                    MOST_ROWS
                )
            ],
            numbers=(4,),
        )
        yield more(len(facts.rendezvous), MOST_ROWS, "kind")
    rest: list[tuple[str, Any, int]] = [
        (names.BARRIER_STALE_KEY, barrier.prefix, count)
        for barrier, count in facts.stale.most_common(MOST_ROWS)
    ]
    rest += [
        (names.TELEMETRY_DISABLED, " ".join(what), count)
        for what, count in facts.disabled.most_common(MOST_ROWS)
    ]
    if rest:
        yield '</section><section><h2 id="others">Also told</h2>'
        yield table(
            "others",
            ["event", "what", "times"],
            [[code(event), code(what), number(count)] for event, what, count in rest],
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
    if len(analysis.clocks) == 1:
        yield '<p class="good">All are on one host, and have one clock.</p>'
        return
    off = {host: by for host in analysis.clocks if (by := analysis.clock_off(host))}
    yield (
        '<p class="note">Compared by when ranks were let go from completed barriers,'
        " which is the same moment for all. Times on this page are as the hosts have"
        " them.</p>"
    )
    if not off:
        yield (
            f'<p class="good">The clocks of {plural(len(analysis.clocks), "host")}'
            f" agree to {duration(CLOCK_AGREES)}.</p>"
        )
        return
    worst = sorted(off.items(), key=lambda item: -abs(item[1]))
    yield table(
        "clocks",
        ["host", "ahead of most by"],
        [[safe(host), duration(by)] for host, by in worst[:MOST_ROWS]],
        numbers=(1,),
    )
    yield more(len(off), MOST_ROWS, "host")


def read(facts: Facts, stats: ReadStats) -> Iterator[str]:
    """How much of the input this is."""
    yield '<div class="pair">'
    yield table(
        "read",
        ["lines", "how many"],
        [
            ["all", number(stats.lines)],
            ["events", number(stats.events)],
            ["spans of barriers", number(stats.spans)],
            ["of others", number(stats.foreign)],
            ["cut off, or mixed with others", number(stats.broken)],
            ["events with fields that do not fit", number(stats.unfit)],
            ["too long", number(stats.long)],
        ],
        numbers=(1,),
    )
    yield table(
        "events",
        ["event", "how many"],
        [[code(event), number(count)] for event, count in facts.events.most_common()],
        numbers=(1,),
    )
    yield "</div>"
    if stats.damaged:
        shown = "".join(f"<li>{safe(each)}</li>" for each in stats.damaged[:MOST_ROWS])
        yield f'<p>Not read to the end:</p><ul id="damaged">{shown}</ul>'
        yield more(len(stats.damaged), MOST_ROWS, "file")
