"""``tracedstore status`` with the verdict and the blocked ranks of a stalled job."""

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from support.terminal import without_styles
from tracedstore.common.causes import REMEDIES
from tracedstore.coordination.rank_registry import REGISTRY
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, blocked_key
from tracedstore.tools.cli.main import main

Store = Any
KEY = "default_pg/0//1//cpu//0/2"
DOING = "alive, no store call for 612 s, in data.py:88 load_dataset"


def register(store: Store, *ranks: int, world_size: int = 4) -> None:
    """Register ranks, whose processes started a minute ago."""
    for rank in ranks:
        entry = {"rank": rank, "host": "node1", "pid": 100 + rank}
        entry |= {"world_size": world_size, "started": time.time() - 60}
        store.set(f"{REGISTRY}/{rank}", json.dumps(entry))


def blocked(rank: int, seconds: float = 41.0) -> BlockedRecord:
    """Return the record of a rank that waits in new_group for rank 2."""
    return BlockedRecord(
        rank=rank,
        host="node1",
        pid=100 + rank,
        operation="get",
        keys=(KEY,),
        phase="new_group 1",
        protocol="gloo",
        group="default_pg/0//1//cpu//0",
        awaits=(2,),
        started=time.time() - seconds,
    )


def verdict(age: float = 11.0) -> Verdict:
    """Return the verdict that ranks 0, 1 and 3 wait for rank 2."""
    return Verdict(
        phase="new_group 1",
        cause="busy",
        awaited=(
            AwaitedRank(rank=2, host="node4", pid=812, cause="busy", doing=DOING),
        ),
        awaited_ranks=(2,),
        waiting_ranks=(0, 1, 3),
        key=KEY,
        waited_seconds=30.0,
        evidence=("rank 2 answered itself",),
        remedy=REMEDIES["busy"],
        time=time.time() - age,
    )


def stall(store: Store, age: float = 11.0) -> None:
    """Write what a stalled job has in its store."""
    register(store, 0, 1, 2, 3)
    for rank in (0, 1, 3):
        store.set(blocked_key(rank), blocked(rank).to_bytes())
    store.set(VERDICT, verdict(age).to_bytes())


def run(
    capsys: pytest.CaptureFixture[str], url: str, *arguments: str
) -> tuple[int, str]:
    """Run the command; return its exit code and output."""
    capsys.readouterr()
    code = main(["status", "--store", url, *arguments])
    written = capsys.readouterr()
    assert written.err == ""
    return code, written.out


@pytest.fixture
def tcp_job() -> tuple[Store, str]:
    """Serve a TCPStore; return it with its URL."""
    store: Store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    return store, f"tcp://127.0.0.1:{store.port}"


@pytest.mark.parametrize("prefix", ["", "job/attempt_1"])
def test_stalled_job(
    job: tuple[Store, str], prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is first, then the blocked ranks, on every kind of store."""
    store, url = job
    stall(dist.PrefixStore(prefix, store) if prefix else store)

    code, out = run(capsys, url)
    document = json.loads(run(capsys, url, "--json")[1])

    lines = [" ".join(line.split()) for line in out.splitlines()]
    text = " ".join(lines)
    assert code == 2
    # For as long as it has lasted by now, and not when it was reported.
    assert re.match(
        r"stalled in new_group 1 for 4[0-9.]+ s: waiting for rank 2 on node4 \(pid 8",
        lines[0],
    )
    assert DOING in text
    assert "cause: busy evidence: rank 2 answered itself remedy: look at" in text
    assert "waiting: ranks 0-1,3, reported 1" in text
    assert "may have ended" not in text
    assert "missing: 1 stall reported, 3 ranks blocked" in lines
    (line,) = [line for line in lines if line.startswith("ranks 0-1,3: new_group 1")]
    assert " for rank 2 (get default_pg/0//1//cpu//0/2)" in text
    assert line.startswith("ranks 0-1,3: new_group 1, waiting 4")
    assert not document["healthy"]
    assert document["verdict"] | verdict().event_fields() == document["verdict"]
    assert document["verdict"]["still_waiting"]
    assert document["verdict"]["confirmed"]
    assert document["claimed_verdicts"] == []
    assert [one["rank"] for one in document["blocked"]] == [0, 1, 3]
    assert {one["awaits"] for one in document["blocked"]} == {"2"}
    assert {one["key"] for one in document["blocked"]} == {KEY}
    assert all(41 <= one["waited_seconds"] < 400 for one in document["blocked"])


def test_resumed_job(
    job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict is not shown a minute after the ranks have resumed."""
    store, url = job
    stall(store, age=61.0)
    for rank in (0, 1, 3):
        store.set(blocked_key(rank), b"")

    code, out = run(capsys, url)
    document = json.loads(run(capsys, url, "--json")[1])

    assert (code, out.splitlines()[0]) == (0, "nothing is missing")
    assert document["verdict"] is None
    assert document["blocked"] == []
    assert document["invalid_records"] == 0


class TestFresh:
    """Which verdicts are fresh."""

    def test_old_verdict_of_a_wait_that_lasts(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A verdict of an hour ago is fresh while its ranks are in the same calls."""
        store, url = tcp_job
        register(store, 0, 1, 2, 3)
        store.set(VERDICT, verdict(age=3600).to_bytes())
        store.set(blocked_key(3), blocked(3, 3630).to_bytes())

        code, out = run(capsys, url)

        assert code == 2
        assert re.search(r"stalled in new_group 1 for .+: waiting for rank 2", out)
        assert "reported 1 h 0 min ago" in " ".join(out.split())

    def test_later_wait(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The verdict on an earlier wait is not shown for a later one."""
        store, url = tcp_job
        register(store, 0, 1, 2, 3)
        store.set(VERDICT, verdict(age=3600).to_bytes())
        store.set(blocked_key(3), blocked(3, 41).to_bytes())

        code, out = run(capsys, url)

        assert code == 2
        assert "stalled" not in out
        assert "  rank 3: new_group 1, waiting " in out

    def test_wait_that_has_just_ended(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A young verdict is shown if calls failed, and that it may be outdated."""
        store, url = tcp_job
        register(store, 0, 1, 2, 3)
        failed = replace(blocked(0), failed=time.time())
        store.set(blocked_key(0), failed.to_bytes())
        store.set(VERDICT, verdict(age=0).to_bytes())

        code, out = run(capsys, url)
        document = json.loads(run(capsys, url, "--json")[1])

        assert code == 2
        assert "it may have ended" in " ".join(out.split())
        assert document["blocked"] == document["claimed_verdicts"] == []
        assert not document["verdict"]["still_waiting"]
        assert document["missing"] == ["1 stall reported"]

    def test_after(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ranks that are blocked for less than --after are shown, with exit code 0."""
        store, url = tcp_job
        register(store, 0, 1, world_size=2)
        store.set(blocked_key(0), blocked(0).to_bytes())

        assert run(capsys, url)[0] == 2
        code, out = run(capsys, url, "--after", "3600")

        assert code == 0
        assert out.startswith("nothing is missing\n")
        assert "  rank 0: new_group 1, waiting " in out


def test_unknown_culprit(
    tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name the status has what is known, and accuses no rank."""
    store, url = tcp_job
    register(store, 0, 1, world_size=2)
    waits = replace(blocked(0), awaits=None, phase="key epoch/3/go")
    store.set(blocked_key(0), replace(waits, keys=("epoch/3/go",)).to_bytes())
    store.set(
        blocked_key(1), replace(blocked(1), awaits=None, members=(0, 1)).to_bytes()
    )
    unknown = Verdict(
        phase="key epoch/3/go",
        cause="unknown",
        known="no rank has written a key like it",
        waiting_ranks=(0,),
        time=time.time(),
    )
    store.set(VERDICT, unknown.to_bytes())

    _, out = run(capsys, url)

    assert re.match(
        "stalled in key epoch/3/go for .+: no rank has written a key like it\n"
        "  cause: unknown\n",
        out,
    )
    assert "  rank 0: key epoch/3/go, waiting " in out
    assert " for an unknown rank\n" in out
    assert "for one of ranks 0-1 (get default_pg" in " ".join(out.split())


def test_killed_rank(
    tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of a process that was replaced is not shown."""
    store, url = tcp_job
    killed = replace(blocked(0, 600), pid=7)
    store.set(blocked_key(0), killed.to_bytes())
    before_registration = run(capsys, url)
    register(store, 0, 1, world_size=2)

    code, out = run(capsys, url)

    assert "rank 0: new_group 1" in before_registration[1]
    assert code == 0
    assert "blocked ranks" not in out


def test_other_job(
    tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--run-id leaves out the stall of another job in the same store."""
    store, url = tcp_job
    for run_id in "ab":
        under: Store = dist.PrefixStore(run_id, store)
        if run_id == "a":
            stall(under)
        for rank in range(4):
            entry = {"rank": rank, "host": "node1", "pid": 100 + rank, "run_id": run_id}
            entry |= {"world_size": 4, "started": time.time() - 60}
            under.set(f"{REGISTRY}/{rank}", json.dumps(entry))

    assert "stalled in new_group 1" in run(capsys, url, "--run-id", "a")[1]
    code, out = run(capsys, url, "--run-id", "b")

    assert (code, out.splitlines()[0]) == (0, "nothing is missing")
    assert "new_group" not in out


def test_store_is_unchanged(
    tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes nothing."""
    store, url = tcp_job
    stall(store)
    before = {key: store.get(key) for key in store.list_keys()}

    assert run(capsys, url)[0] == 2

    assert {key: store.get(key) for key in store.list_keys()} == before


def test_thousands_of_ranks(
    tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of a job with 4,000 ranks is short; each rank has its own wait."""
    store, url = tcp_job
    ranks = range(4000)
    record = blocked(0)
    keys, values = [], []
    for rank in ranks:
        others = tuple(one for one in ranks if one != rank) if rank < 40 else (0,)
        own = replace(record, rank=rank, started=record.started + rank / 1000)
        keys.append(blocked_key(rank))
        values.append(replace(own, awaits=others).to_bytes().decode())
    store.multi_set(keys, values)
    store.set(
        VERDICT,
        replace(
            verdict(), awaited_ranks=tuple(ranks[1::2]), waiting_ranks=tuple(ranks[::2])
        ).to_bytes(),
    )
    # A set of TCPStore does not wait for the server.
    assert store.check([VERDICT])

    code, out = run(capsys, url)
    document = json.loads(run(capsys, url, "--json")[1])

    text = " ".join(out.split())
    assert code == 2
    assert len(out) < 8000
    assert "  rank 0: new_group 1, waiting " in out
    assert "and 3,976 more ranks" in text
    assert len(document["blocked"]) == 4000
    assert document["blocked"][1]["awaits"] == "0,2-3999"


class TestClaims:
    """Verdicts that records and processes do not confirm."""

    def check_claim(
        self, capsys: pytest.CaptureFixture[str], url: str, doubt: str, code: int = 0
    ) -> None:
        """The claim is shown as such, and accuses no rank."""
        found, out = run(capsys, url)
        text = " ".join(out.split())
        document = json.loads(run(capsys, url, "--json")[1])

        assert found == code
        assert "stalled in" not in text
        assert "stall reported" not in text
        assert f"claimed, not confirmed: {doubt}. The store has the verdict" in text
        assert "waiting in new_group 1 for rank 2 on node4" in text
        assert document["healthy"] is (code == 0)
        assert document["verdict"] is None
        (claim,) = document["claimed_verdicts"]
        assert not claim["confirmed"]
        assert (claim["awaited_ranks"], claim["doubt"]) == ([2], doubt)

    def test_forged_verdict(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """No rank of a healthy job is blocked: it is healthy, on every store."""
        store, url = job
        register(store, 0, 1, 2, 3)
        store.set(VERDICT, verdict(age=0).to_bytes())
        store.set(blocked_key(0), b"")

        doubt = "no rank that it says waits is blocked in such a call"
        self.check_claim(capsys, url, doubt)
        assert run(capsys, url)[1].startswith("nothing is missing\n")

    def test_rank_for_which_nobody_waits(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The ranks wait for rank 1, and the verdict accuses rank 2."""
        store, url = tcp_job
        register(store, 0, 1, 2, 3)
        for rank in (0, 3):
            waits = replace(blocked(rank), awaits=(1,))
            store.set(blocked_key(rank), waits.to_bytes())
        store.set(VERDICT, verdict().to_bytes())

        self.check_claim(capsys, url, "no blocked rank waits for rank 2", code=2)

    def test_rank_that_does_not_exist(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The writer of the key is unknown, but it is one of the job."""
        store, url = tcp_job
        register(store, 0, 1, world_size=2)
        waits = replace(blocked(0), awaits=None, protocol="")
        store.set(blocked_key(0), waits.to_bytes())
        store.set(VERDICT, verdict().to_bytes())

        self.check_claim(capsys, url, "no blocked rank waits for rank 2", code=2)

    @pytest.mark.parametrize("prefix", ["", "job/attempt_1/"])
    def test_key_that_exists(
        self,
        tcp_job: tuple[Store, str],
        prefix: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The call waits for a key that was written."""
        store, url = tcp_job
        under: Store = dist.PrefixStore(prefix[:-1], store) if prefix else store
        stall(under)
        under.set(KEY, "there")

        doubt = "no rank that it says waits is blocked in such a call"
        self.check_claim(capsys, url, doubt, code=2)

    def test_rank_that_never_registered(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A rank registers before it publishes a record."""
        store, url = tcp_job
        store.set(blocked_key(0), blocked(0).to_bytes())
        store.set(VERDICT, verdict().to_bytes())

        doubt = "no rank that it says waits is blocked in such a call"
        self.check_claim(capsys, url, doubt, code=2)

    def test_large_group(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each rank of it has the first absent rank only; the verdict has all."""
        store, url = tcp_job
        register(store, *range(17), world_size=17)
        store.set(blocked_key(0), blocked(0).to_bytes())
        several = replace(verdict(), awaited_ranks=(2, 5))
        store.set(VERDICT, several.to_bytes())

        code, out = run(capsys, url)

        assert code == 2
        assert re.search(r"stalled in new_group 1 for .+: waiting for rank 2", out)
        assert "claimed" not in out


class TestHostile:
    """Any client of the store can write any value."""

    BAD = (
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b"x" * 300_000,
        b"{}",
        json.dumps({"rank": 10**9}).encode(),
    )

    def test_bad_values(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Values that are not valid are counted, and the others are shown."""
        store, url = tcp_job
        stall(store)
        for number, value in enumerate(self.BAD):
            store.set(f"job-{'abcdef'[number]}/{VERDICT}", value)
            store.set(blocked_key(10 + number), value)
        # The record of one rank under the key of another one.
        store.set(blocked_key(30), blocked(31).to_bytes())
        store.set("tracedstore/BLOCKED/9999999999999999", blocked(0).to_bytes())

        code, out = run(capsys, url)
        document = json.loads(run(capsys, url, "--json")[1])

        assert code == 2
        assert re.match(r"stalled in new_group 1 for .+: waiting for rank 2 ", out)
        assert f"{2 * len(self.BAD) + 1} records of stalls are not valid" in out
        assert document["invalid_records"] == 2 * len(self.BAD) + 1
        assert [one["rank"] for one in document["blocked"]] == [0, 1, 3]

    def test_control_characters(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Escape sequences are shown and not executed, and long texts are cut."""
        store, url = tcp_job
        attack = "\x1b[2J\x1b]0;title\x07\u202e[red]x[/red]" + "y " * 400
        store.set(
            blocked_key(0), replace(blocked(0), phase=attack, host=attack).to_bytes()
        )
        evil = replace(verdict(), phase=attack, evidence=(attack,) * 16, remedy=attack)
        store.set(VERDICT, evil.to_bytes())

        code, out = run(capsys, url)

        assert code == 2
        assert "\u202e" not in out
        assert without_styles(out) == out
        assert "\x1b" not in out
        assert "\x07" not in out
        assert "[red]x[/red]" in out
        assert max(map(len, out.splitlines())) <= 80
        assert len(out) < 20_000

    def test_too_many_awaited_ranks(
        self, tcp_job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Small records that expand to a million ranks each are read up to a limit."""
        store, url = tcp_job
        for rank in range(300):
            fields = json.loads(blocked(rank).to_bytes())
            fields["awaits"] = f"{rank}-999999"
            store.set(blocked_key(rank), json.dumps(fields))

        code, out = run(capsys, url)

        assert code == 2
        assert "more ranks with records that were not read" in " ".join(out.split())
