"""What ranks answered, as text of ``tracedstore status --ask``."""

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import Frame, ProcessFacts
from tracedstore.tools.attach.job_reading import Answers
from tracedstore.tools.attach.job_text import answer_lines
from tracedstore.tools.attach.live_view import answered


def answers(world_size: int, functions: dict[int, str]) -> Answers:
    """Return the answers of ranks that execute these functions."""
    return Answers(
        world_size=world_size,
        registered={
            rank: RankInfo(
                rank=rank, host="node4", pid=rank, world_size=world_size, started=1
            )
            for rank in functions
        },
        answers={
            rank: ProcessFacts(
                rank=rank,
                host="node4",
                pid=100 + rank,
                state="running",
                idle_seconds=12.0,
                frames=(Frame(file="data.py", line=88, function=function),),
            )
            for rank, function in functions.items()
        },
    )


def text(given: Answers, blocked: tuple[int, ...] = ()) -> list[str]:
    """Return the lines as plain text."""
    return [line.text for line in answer_lines(answered(given, blocked))]


def test_unblocked_ranks_are_grouped() -> None:
    """The odd rank first; a blocked one is not repeated."""
    job = answers(4, {0: "train", 1: "train", 2: "load_dataset", 3: "wait"})
    assert text(job, blocked=(3,)) == [
        "ranks that are not blocked in a published call:",
        (
            "  rank 2 on node4 (pid 102): alive, no store call for 12 s,"
            " in data.py:88 load_dataset"
        ),
        (
            "  rank 0 on node4 (pid 100): alive, no store call for 12 s,"
            " in data.py:88 train; the same: rank 1"
        ),
    ]


def test_silent_ranks() -> None:
    """Ranks without an answer are listed."""
    assert text(answers(4, {0: "train"}))[-1] == "no answer: ranks 1-3"


def test_bounded() -> None:
    """A thousand ranks that do different things are a few lines."""
    lines = text(answers(1000, {rank: f"f{rank}" for rank in range(1000)}))
    assert len(lines) == 18
    assert lines[-1] == "  and 984 more, which tracedstore stacks lists"
