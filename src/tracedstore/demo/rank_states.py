"""The live view: which act it is, how far it got, and what each rank is in."""

from dataclasses import dataclass

from tracedstore import names
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.coordination.ranges import fold
from tracedstore.demo.outputs import Signals
from tracedstore.demo.rank import simulated_host
from tracedstore.demo.screen import Line

_BAR = 24
_LAST = BarrierKeys("").last_member
# Seconds: a shorter call is work, and would only flicker; a longer wait is remarkable.
_CALL, _LONG = 0.1, 1.0
_STATE = 30


@dataclass(frozen=True, slots=True)
class _State:
    # In what, the same for all that are in it; and for one of them, with how long.
    what: str
    style: str = "dim"
    own: str = ""


def head(number: int, acts: int, title: str, part: float, seconds: float) -> str:
    """Say which act it is, and how far all of it got."""
    done = int(_BAR * (max(0, number - 1) + part) / acts) if number else 0
    where = f"Act {number} of {acts}: {title}" if number else title
    return f"[{'#' * done:.<{_BAR}}] {where}, {seconds:.0f} s"


def rows(signals: Signals, room: int) -> list[Line]:
    """Say what each rank is in; where there is no room for a line each, by that."""
    states = {rank: _state(signals, rank) for rank in signals.metrics}
    if len(states) < room:
        return _each(signals, states)
    together: dict[tuple[str, str], list[int]] = {}
    for rank, state in states.items():
        together.setdefault((state.what, state.style), []).append(rank)
    alike = sorted(together.items(), key=lambda found: (len(found[1]), found[1]))
    return [
        Line(f"ranks  {'now':{_STATE}}  which"),
        *(
            Line(f"{len(ranks):5}  {what:{_STATE}.{_STATE}}  {fold(ranks)}", style)
            for (what, style), ranks in alike
        ),
    ]


def _each(signals: Signals, states: dict[int, _State]) -> list[Line]:
    lines = [
        Line(f"rank  host         {'now':{_STATE}}  calls  CAS lost  came last"),
    ]
    for rank, state in states.items():
        metrics, now = signals.metrics[rank], state.own or state.what
        lines.append(
            Line(
                f"{rank:4}  {simulated_host(rank):11}  {now:{_STATE}.{_STATE}}"
                f"  {metrics.calls:5}  {metrics.cas[names.LOST]:8}"
                f"  {metrics.record_last_arrival:9}",
                state.style,
            )
        )
    return lines


def _state(signals: Signals, rank: int) -> _State:
    answer = signals.answers[rank]
    if answer is None:
        known = signals.has_started(rank)
        return _State("no answer", "red") if known else _State("starting")
    # Of one thread: the demo's ranks have no other that calls.
    call = answer.calls[0] if answer.calls else None
    if call is None or call.waited_seconds < _CALL:
        return _State("working")
    seconds = f"{call.waited_seconds:.1f} s"
    style = "dim" if call.waited_seconds < _LONG else "yellow"
    if call.operation == "wait" and call.key.endswith(_LAST):
        where = f"at {call.key.removesuffix(_LAST)}"
        return _State(f"waiting {where}", style, f"waiting {seconds} {where}")
    return _State(f"in {call.operation}", style, f"in {call.operation} for {seconds}")
