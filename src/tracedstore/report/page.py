"""The page: one HTML file that needs nothing else, and runs nothing."""

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from tracedstore._version import __version__
from tracedstore.report import incidents, plots, sections
from tracedstore.report.analysis import Analysis, outcomes
from tracedstore.report.formatting import moment, number, plural, safe
from tracedstore.report.headline import headline
from tracedstore.report.reader import ReadStats
from tracedstore.report.records import COMPLETED, FAILED, TIMEOUT, WAITING
from tracedstore.report.tables import code

# Nothing is fetched and nothing runs, even if something slipped through the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(analysis: Analysis, stats: ReadStats) -> str:
    """Write it."""
    return "".join(_parts(analysis, stats))


def _parts(analysis: Analysis, stats: ReadStats) -> Iterator[str]:
    facts = analysis.facts
    css = (files("tracedstore.report") / "page.css").read_text("utf-8")
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<link rel="icon" href="data:,">'
    said = headline(analysis)
    yield f"<title>{safe(said.text)} - tracedstore report</title>"
    yield f"<style>{css}</style></head><body><header>"
    yield f'<h1 id="headline"{" class=bad" if said.bad else ""}>{safe(said.text)}</h1>'
    yield f'<p id="lead">{safe(said.more)}</p>'
    yield (
        f'<p class="note">{moment(facts.first)} to {analysis.when(facts.last)} UTC'
        f"{_jobs(analysis.jobs)}, from {plural(stats.files, 'file')}</p></header>"
    )
    yield _tiles(analysis)
    yield '<section><h2 id="incidents">Missing ranks</h2>'
    yield from incidents.incidents(analysis)
    yield '</section><section><h2 id="failures">First failure</h2>'
    yield from incidents.failures(analysis)
    yield '</section><section><h2 id="barriers">Barriers</h2>'
    yield from _plots(analysis)
    yield '</section><section><h2 id="late">Stragglers</h2>'
    yield from sections.stragglers(analysis)
    yield '</section><section><h2 id="calls">Slow, stalled and failed calls</h2>'
    yield from sections.calls(facts)
    yield '</section><section><h2 id="cas">Contention</h2>'
    yield from sections.contention(facts)
    yield from sections.others(facts)
    yield '</section><section><h2 id="clocks">Clocks</h2>'
    yield from sections.clocks(analysis)
    yield '</section><section><h2 id="read">What was read</h2>'
    yield from sections.read(facts, stats)
    yield f"</section><footer>tracedstore {safe(__version__)}</footer></body></html>\n"


def _jobs(jobs: Sequence[str]) -> str:
    if not jobs:
        return ""
    shown = ", ".join(map(code, jobs[:5]))
    return f", {'job' if len(jobs) == 1 else plural(len(jobs), 'job')} {shown}"


def _tiles(analysis: Analysis) -> str:
    ended = outcomes(analysis.rounds)
    facts = analysis.facts
    heard = number(len(analysis.ranks))
    if facts.world_size:
        heard += f" of {number(facts.world_size)}"
    tiles = [
        ("ranks", "Ranks heard of", heard, False),
        ("hosts", "Hosts", number(len(set(facts.hosts.values()))), False),
        ("completed", "Barriers completed", number(ended[COMPLETED]), False),
        *_guessed(analysis),
        ("timeouts", "Timed out", number(ended[TIMEOUT]), ended[TIMEOUT] > 0),
        ("failed", "Failed", number(ended[FAILED]), ended[FAILED] > 0),
        ("open", "No end in the logs", number(ended[WAITING]), ended[WAITING] > 0),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div{' class=bad' if bad else ''}><dt>{label}</dt>"
            f'<dd id="n-{name}">{value}</dd></div>'
            for name, label, value, bad in tiles
        )
        + "</dl>"
    )


def _guessed(analysis: Analysis) -> Iterator[tuple[str, str, str, bool]]:
    if count := sum(each.seems_completed for each in analysis.rounds):
        yield "guessed", "Completed, as far as can be told", number(count), False


def _plots(analysis: Analysis) -> Iterable[str]:
    if not any(each.ranks for each in analysis.rounds):
        yield (
            '<p class="good">No arrival is in the logs. Completed barriers are logged'
            " where the application has configured structlog, at debug level; their"
            " spans, given with <code>--traces</code>, say the same.</p>"
        )
        return
    only = len(analysis.rounds) == 1
    barrier = code(analysis.rounds[0].barrier.prefix) if only else "each barrier"
    yield (
        f"<p>When each rank came to {barrier}, in seconds after the first one; the"
        " scale is in powers of ten.</p>"
    )
    yield plots.arrivals(analysis)
    yield (
        '<p class="note">At a completed barrier all are let go at the same moment, so'
        " how long each rank waited, by its own clock, tells when it came: clocks of"
        " hosts are not compared. At barriers that did not complete, and along the"
        " time axis, they are, and they may differ: see <a href=#clocks>below</a>.</p>"
    )
    if only:
        return
    yield (
        "<p>Who was behind the others: a row a rank, a column a barrier."
        f" {plots.described(analysis)}</p>"
    )
    yield plots.heat_map(analysis)
