"""Events as sentences for a terminal."""

import re
from typing import Any

from support.events import SCHEMA
from tracedstore import names
from tracedstore.common.event_text import terminal_line
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict

_AWAITED = AwaitedRank(
    rank=2, host="node4", pid=7445, cause="busy", doing="alive, in data.py:88 load"
)
_CALL: dict[str, Any] = {
    "operation": "wait",
    "store": "tcp_store",
    "server": "node1:29400",
    "key": "epoch/3",
    "key_count": 2,
    "duration_seconds": 1.25,
    "suppressed_count": 3,
}


def line_of(
    event: str, level: str = "", *, colors: bool = False, **fields: object
) -> str:
    """Return the line of an event, without the time."""
    shown = {"event": event, "level": level or names.EVENT_LEVELS[event], **fields}
    line = terminal_line(shown, colors=colors)
    return re.sub(r"\b[0-9]{2}:[0-9]{2}:[0-9]{2}\b", "TIME", line)


class TestSentences:
    """What a person reads."""

    def test_stalled(self) -> None:
        """The phase, who is awaited, where, and what it does."""
        verdict = Verdict(
            phase="new_group 1",
            cause="busy",
            awaited=(_AWAITED,),
            awaited_ranks=(2,),
            waited_seconds=31,
        )

        fields = verdict.event_fields()
        expected = (
            "tracedstore TIME rank 0: stalled 31 s in new_group 1: waiting for rank 2"
            " on node4 (pid 7445): alive, in data.py:88 load. See: tracedstore status"
        )

        for url, address in (
            ("tcp://node1:29400", " --store tcp://node1:29400"),
            ("", ""),
        ):
            line = line_of(names.JOB_STALLED, rank=0, store_url=url, **fields)
            assert line == f"{expected}{address}"

    def test_nobody_named(self) -> None:
        """What is known stands in the place of a rank."""
        verdict = Verdict(phase="key go", cause="unknown", known="one of ranks 2-3")

        line = line_of(names.JOB_STALLED, **verdict.event_fields())

        assert "in key go: one of ranks 2-3. " in line

    def test_calls(self) -> None:
        """The call, its store, and what became of it."""
        assert line_of(names.OPERATION_SLOW, **_CALL) == (
            "tracedstore TIME: wait 'epoch/3' and 1 other key of tcp_store node1:29400"
            " took 1.25 s (3 more events of this kind since the last)"
        )
        failed = line_of(
            names.OPERATION_FAILED, error_type="OSError", error="gone", **_CALL
        )
        assert "failed after 1.25 s: OSError: gone" in failed

    def test_barrier(self) -> None:
        """The missing ranks, and what they do, each text once."""
        line = line_of(
            names.BARRIER_TIMEOUT,
            barrier="checkpoint/7",
            timeout_seconds=30,
            missing="2 of 4: ranks 2-3 on node4",
            missing_doing=["alive", "alive"],
        )

        assert line.endswith(
            "barrier checkpoint/7 timed out after 30 s:"
            " missing 2 of 4: ranks 2-3 on node4: alive"
        )

    def test_every_event(self) -> None:
        """Every event has a sentence, in one line, and needs no optional field."""
        for event in names.EVENT_NAMES:
            line = line_of(event)
            assert event not in line
            assert "\n" not in line
        assert {branch["title"] for branch in SCHEMA["oneOf"]} == set(names.EVENT_NAMES)


class TestHostile:
    """Texts that other programs wrote."""

    def test_control_characters(self) -> None:
        """A key cannot move the cursor, or begin another line."""
        line = line_of(names.OPERATION_SLOW, **_CALL | {"server": "a\x1b[2J\nb"})

        assert "a\\x1b[2J\\nb" in line
        assert line.isprintable()

    def test_colors(self) -> None:
        """Only warnings and errors are coloured, and only where colors are shown."""
        warning = line_of(names.JOB_STALLED, colors=True)
        assert warning.startswith("\x1b[33m")
        assert warning.endswith("\x1b[0m")
        assert line_of(names.JOB_RESUMED, colors=True).isprintable()
        assert line_of(names.JOB_STALLED).isprintable()
