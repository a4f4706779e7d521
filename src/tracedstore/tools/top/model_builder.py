"""Makes the model of the screen from one reading of a running job."""

from array import array
from collections.abc import Iterator

from tracedstore.common.text import duration, plural
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.tools.attach.job_state import BarrierState
from tracedstore.tools.attach.job_status import Status
from tracedstore.tools.attach.status_text import problem_lines
from tracedstore.tools.top.fleet_states import FleetStates
from tracedstore.tools.top.model import (
    Barrier,
    Level,
    Model,
    Rank,
    Rates,
    Rendezvous,
    RendezvousNode,
)

# Barriers whose arrivals are shown; the newest ones.
_MAX_IN_PROGRESS = 16
_MAX_FINISHED = 64
# Arrivals of all barriers that are sent to the screen: 12 bytes each.
_MAX_ARRIVALS = 1_000_000


def build_model(
    status: Status, *, rates: Rates | None = None, seconds: float = 0.0
) -> Model:
    """Return the model.

    Args:
        status: The reading.
        rates: The Store calls of the ranks, if they were requested.
        seconds: How long the reading took.
    """
    job = status.job
    fleet = FleetStates(status)
    ranks = fleet.ranks()
    level, headline, details = _headline(status, ranks)
    budget = _Budget(_MAX_ARRIVALS)
    shown = job.in_progress[-_MAX_IN_PROGRESS:]
    # The newest first, as long as the budget lasts.
    progress = [_barrier(one, fleet, budget) for one in reversed(shown)]
    abandoned = [
        _barrier(one, fleet, budget, abandoned=True)
        for one in reversed(job.abandoned[-_MAX_IN_PROGRESS:])
    ]
    finished = [
        _barrier(one, fleet, budget) for one in reversed(job.finished[-_MAX_FINISHED:])
    ]
    return Model(
        source=status.store,
        time=status.now,
        level=level,
        headline=headline,
        details=tuple(details),
        notes=tuple(line.text for line in problem_lines(status)),
        ranks=ranks,
        in_progress=(*reversed(abandoned), *reversed(progress)),
        finished=tuple(reversed(finished)),
        more_finished=job.unread_finished + len(job.finished) - len(finished),
        rendezvous=tuple(_rendezvous(status)),
        rates=rates,
        stalls=tuple(
            verdict.event_fields() | {"time": verdict.time}
            for verdict, _ in status.fresh_stalls()
        ),
        seconds=seconds,
    )


class _Budget:
    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, number: int) -> bool:
        """Take a number of arrivals; return whether there are as many."""
        if number > self.left:
            return False
        self.left -= number
        return True


def _barrier(
    state: BarrierState, fleet: FleetStates, budget: _Budget, *, abandoned: bool = False
) -> Barrier:
    ranks, times = array("I"), array("d")
    if budget.take(len(state.ledger.entries) // 12):
        ranks = array("I", state.ledger.ranks())
        times = array("d", state.ledger.times())
    report = state.missing_report if state.awaits_ranks else None
    return Barrier(
        prefix=state.prefix,
        group=fleet.group_of(state.group),
        complete=state.complete,
        abandoned=abandoned,
        arrived=state.arrived,
        world_size=state.world_size,
        missing="" if report is None else report.describe(),
        missing_ranks=() if report is None else report.missing_ranks,
        ranks=ranks,
        times=times,
        first=state.first_arrival,
        last=state.last_arrival,
        last_rank=state.last_rank,
        last_host=state.last_host,
    )


def _rendezvous(status: Status) -> Iterator[Rendezvous]:
    for run_id, state in status.job.rendezvous.items():
        url = status.job.worker_stores.get(run_id)
        problem = status.job.unreadable_stores.get(url or "", "")
        if state is None:
            yield Rendezvous(run_id=run_id, readable=False)
            continue
        yield Rendezvous(
            run_id=run_id,
            round=state.round,
            complete=state.complete,
            closed=state.closed,
            worker_store=url,
            problem=problem,
            nodes=tuple(
                RendezvousNode(
                    name=str(node),
                    joined=node in state.participants,
                    silent=state.silent_seconds(node, status.now),
                )
                for node in sorted(state.present)
            ),
        )


def _headline(
    status: Status, ranks: tuple[Rank, ...]
) -> tuple[Level, str, tuple[str, ...]]:
    """Return how bad it is, the sentence, and further sentences."""
    stalls = status.fresh_stalls()
    bad = [
        *(_stalled(status, verdict) for verdict, one in stalls if one.still_waiting()),
        *_waiting(status),
    ]
    if bad:
        details = [*bad[0][1:], *(sentence for sentence, *_ in bad[1:])]
        return "bad", bad[0][0], tuple(details)
    if missing := status.missing():
        ended = [_stalled(status, verdict) for verdict, _ in stalls]
        known = [sentence for one in ended for sentence in one]
        return "bad", f"missing: {', '.join(missing)}", tuple(known)
    return *_nothing_missing(status, ranks), ()


def _nothing_missing(status: Status, ranks: tuple[Rank, ...]) -> tuple[Level, str]:
    job = status.job
    if job.unreadable_stores or job.unread_ledgers:
        return "notable", "nothing is missing, as far as can be read from here"
    if not (ranks or job.in_progress or job.finished or job.rendezvous):
        text = "nothing is known: the store has no rank, no barrier and no rendezvous"
        return "notable", text
    if not ranks:
        return "notable", "no rank has registered yet; nothing else is missing"
    started = [rank for rank in ranks if rank.registered is not None]
    if len(started) < len(ranks):
        return "notable", f"{len(started)} of {len(ranks)} ranks have registered"
    hosts = plural(len({rank.host for rank in ranks}), "host")
    return "good", f"healthy: {plural(len(ranks), 'rank')} on {hosts}, none is missing"


def _stalled(status: Status, verdict: Verdict) -> list[str]:
    """Return the sentence about a stall, and the evidence."""
    waited = verdict.waited_seconds + max(0.0, status.now - verdict.time)
    awaited = verdict.describe_awaited()
    if verdict.awaited_ranks:
        awaited = f"waiting for {awaited}"
    sentences = [
        f"stalled in {verdict.phase} for {duration(waited)}: {awaited}",
        f"cause: {verdict.cause}",
        *verdict.evidence,
    ]
    return [*sentences, f"remedy: {verdict.remedy}"] if verdict.remedy else sentences


def _waiting(status: Status) -> Iterator[list[str]]:
    """Yield what the job waits for: barriers first, the longest wait first."""
    late = [one for one in status.job.in_progress if status.is_late(one)]
    for one in sorted(late, key=lambda barrier: barrier.first_arrival or 0.0):
        ended = len(one.timed_out) >= one.arrived
        text = f"barrier {one.prefix} {'timed out' if ended else 'waits'}"
        if one.first_arrival is not None:
            since = duration(status.now - one.first_arrival)
            text += f", it began {since} ago" if ended else f" for {since}"
        if one.missing_report is not None:
            yield [f"{text}: {one.missing_report.describe()}"]
        else:
            yield [f"{text}: {plural(one.arrived, 'rank')} arrived"]
    for run_id, state in status.job.rendezvous.items():
        if state is None or state.closed:
            continue
        if not state.complete:
            joined = f"not complete, nodes joined: {len(state.participants)}"
            yield [f"rendezvous {run_id} waits in round {state.round}: {joined}"]
        for node, age in status.silent_nodes(state).items():
            yield [f"rendezvous {run_id}: {node} sent no heartbeat for {duration(age)}"]
