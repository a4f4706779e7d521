"""The parts of the debug page: answers, asking, what is said, and why not."""

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.debug as torchs
from torch.distributed.debug import _store
from torch.distributed.debug._frontend import FrontendServer

import tracedstore
from support import events as schema
from support.events import Events
from tracedstore.auto import debug_page
from tracedstore.auto.debug_page import rank_client
from tracedstore.auto.debug_page.rank_client import Directory, ask_all
from tracedstore.auto.debug_page.view import view
from tracedstore.coordination.decoders import nameless
from tracedstore.coordination.rank_registry import RankInfo, register
from tracedstore.core.barrier_stats import StalledBarrier
from tracedstore.core.recorder import RECORDER
from tracedstore.export import process_status
from tracedstore.export.inflight_client import Reply
from tracedstore.export.process_status import ProcessStatus
from tracedstore.export.server import Server
from tracedstore.signals.inflight import InFlight

CALL = InFlight(
    operation="wait",
    store="tcp_store",
    server="node0:29500",
    key="epoch/3",
    key_count=2,
    key_family="epoch/*",
    started=1.0,
    waited_seconds=12.34,
    thread="MainThread",
)
STALLED = StalledBarrier(
    family="epoch/*",
    arrived=5,
    missing={1: "node1", 2: "node1", 4: "rank 4"},
    possible=0,
)


def answer(rank: int = 0, **facts: Any) -> ProcessStatus:
    """What a rank might say."""
    given = {"recording": True, "calls": (), "more_calls": 0, "barriers": (), **facts}
    return ProcessStatus(process={"rank": rank, "pid": os.getpid()}, **given)


def info(rank: int) -> RankInfo:
    """What a rank might have registered."""
    return RankInfo(rank=rank, host=f"node{rank}", pid=7, world_size=8, started=1.0)


def answered(rank: int, **facts: Any) -> Reply:
    """A rank that answered."""
    return Reply(state="answered", info=info(rank), answer=answer(rank, **facts))


class TestAnswer:
    """What a rank says of itself."""

    def test_survives_the_way(self) -> None:
        """Read back, it is what was written; the missing are written folded."""
        given = answer(calls=(CALL,), more_calls=3, barriers=(STALLED,))
        written = given.to_bytes()

        assert ProcessStatus.from_bytes(written) == given
        assert json.loads(written)["barriers"][0]["missing"] == {
            "node1": "1-2",
            "rank 4": "4",
        }

    @pytest.mark.parametrize(
        "written",
        [
            b"",
            b"<html>",
            b"[]",
            b"{}",
            b'{"process": 1}',
            answer(calls=(CALL,)).to_bytes().replace(b"12.34", b'"long"'),
            answer(barriers=(STALLED,)).to_bytes().replace(b'"1-2"', b'"0-9999999"'),
        ],
    )
    def test_anything_else(self, written: bytes) -> None:
        """Somebody else may listen where a rank did."""
        with pytest.raises(ValueError, match=r"."):
            ProcessStatus.from_bytes(written)

    def test_is_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over HTTP, with who says it, and what it waits in and at."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "run-7")
        tracedstore.configure(log_format="off")
        RECORDER.barriers.record_stall(RECORDER.barriers.begin(), STALLED)
        server = Server({"/": process_status.page}, "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{server.port}"
            with urllib.request.urlopen(url, timeout=10) as got:
                found = ProcessStatus.from_bytes(got.read())
        finally:
            server.stop(5)

        assert found.process == {
            "rank": 3,
            "run_id": "run-7",
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        assert (found.recording, found.calls) == (True, ())
        assert found.barriers == (STALLED,)

    def test_that_fails(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """It is counted, and nothing is printed into the job's log by the server."""

        def broken(_recorder: Any) -> list[InFlight]:
            raise RuntimeError("broken")

        monkeypatch.setattr(process_status, "in_flight", broken)
        tracedstore.configure(log_format="off")
        server = Server({"/": process_status.page}, "127.0.0.1", 0)
        try:
            with pytest.raises(urllib.error.HTTPError, match="500"):
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}", timeout=10)
        finally:
            server.stop(5)

        assert RECORDER.failures.counts() == {"endpoint": 1}
        assert capfd.readouterr().err == ""


@pytest.fixture
def store() -> dist.Store:
    """A store in which rank 0 runs torch's debug server, as it always does."""
    store = dist.HashStore()
    store.set("rank0", "http://somewhere")
    return store


@pytest.fixture
def listen() -> Iterator[Callable[[bytes | None], str]]:
    """Listen, and say this to whoever connects; None for nothing at all."""
    listening: list[socket.socket] = []

    def serve(server: socket.socket, said: bytes) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(1000)
                client.sendall(said)

    def start(said: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)
        if said is not None:
            threading.Thread(target=serve, args=(server, said), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def http(body: bytes) -> bytes:
    """An answer as a server words it."""
    return b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class TestAsking:
    """Every rank has a reply, in bounded time."""

    def test_who_is_there(
        self, store: dist.Store, listen: Callable[[bytes | None], str]
    ) -> None:
        """Each says something else, or nothing."""
        said = {
            0: http(answer(0).to_bytes()),
            1: http(answer(0).to_bytes()),
            2: http(b"hello"),
            3: b"HTTP/1.0 404 Not Found\r\n\r\n",
            4: b"",
            5: b"HTTP/1.0 200 OK\r\nContent-Length: 99999999\r\n\r\n",
            6: b"x" * 100_000,
        }
        for rank, text in said.items():
            register(store, rank, 10, answers=listen(text))
        register(store, 7, 10)
        store.set("rank8", "http://somewhere")

        replies, trouble = ask_all(Directory(lambda: store, 10), 10, 5)

        assert trouble == ""
        assert replies[0].answer == answer(0)
        assert replies[1].why == "another process responds at its address"
        assert [replies[rank].state for rank in range(10)] == (
            ["answered"] + ["silent"] * 7 + ["without", "absent"]
        )
        assert "404" in replies[3].why
        assert "99999999" in replies[5].why

    def test_very_many_that_say_nothing(
        self, store: dist.Store, listen: Callable[[bytes | None], str]
    ) -> None:
        """More than can be asked at once, and still the page has an end."""
        silent = listen(None)
        for rank in range(700):
            # As each would from a process of its own, which registers once.
            register(store, rank, 700, answers=silent)
        started = time.monotonic()
        replies, _ = ask_all(Directory(lambda: store, 700), 700, 1)

        assert time.monotonic() - started < 3
        assert {reply.state for reply in replies.values()} == {"silent"}

    def test_store_that_hangs(self) -> None:
        """One thread at a time asks it, and nobody waits for that one."""
        asked: list[int] = []
        go_on = threading.Event()

        def connect() -> dist.Store:
            asked.append(1)
            go_on.wait(30)
            raise RuntimeError("gone")

        directory = Directory(connect, 2)
        found = [directory.look(0.05), directory.look(0.05)]
        with directory._lock:
            under_way = directory._under_way
        go_on.set()
        assert under_way is not None
        under_way.wait(10)

        assert [trouble for _, trouble in found] == [
            "the store has not answered for 0 s"
        ] * 2
        assert asked == [1]
        _, trouble = directory.look(10)
        assert trouble == "the store could not be read: RuntimeError('gone')"

    def test_torch_has_other_keys(self) -> None:
        """Rank 0 is registered wherever this runs; if it is not, nothing is sure."""
        store = dist.HashStore()

        replies, trouble = ask_all(Directory(lambda: store, 2), 2, 5)

        assert {reply.state for reply in replies.values()} == {"absent"}
        assert trouble == rank_client._KEYS_CHANGED


class TestView:
    """What the page says."""

    def test_in_words(self) -> None:
        """Alarms first, then the blocked, longest first; the idle in one row."""
        shorter = InFlight(
            operation="get",
            store="hash_store",
            server="",
            key="k",
            key_count=1,
            key_family="k",
            started=1.0,
            waited_seconds=0.5,
            thread="MainThread",
        )
        replies = {
            0: answered(0, barriers=(STALLED,)),
            1: answered(1, calls=(shorter,)),
            2: answered(2, calls=(CALL, shorter), more_calls=1),
            3: answered(3, barriers=(STALLED,)),
            4: Reply(state="silent", info=info(4), why="no response within 2 s"),
            5: Reply(state="absent"),
            6: Reply(state="absent"),
            7: Reply(state="without"),
            8: answered(8, recording=False),
        }

        def roster(rank: int) -> str:
            return {5: "node5", 6: "node5"}.get(rank, nameless(rank))

        shown = view(replies, "the store is slow", roster)

        assert shown.text().splitlines() == [
            (
                "9 ranks: 5 answered, 1 did not answer, 1 without this page,"
                " 2 never registered."
            ),
            "the store is slow",
            (
                "barrier epoch/*: 5 arrived, missing 3 of 8: node1 (ranks 1-2),"
                " node4 (rank 4) (told by ranks 0,3)"
            ),
            "    rank 1: get for 0.5 s, hash_store, key k",
            (
                "    rank 2: wait for 12.3 s, tcp_store node0:29500, key epoch/3,"
                " and 1 more"
            ),
            "    rank 4: did not answer",
            "rank 4 node4, pid 7: did not answer: no response within 2 s",
            "ranks 5-6 node5: never registered",
            "rank 7: runs torch's debug server without this page",
            "rank 2 node2, pid 7: in 3 Store calls",
            "    wait for 12.3 s, tcp_store node0:29500, key epoch/3, and 1 more",
            "    get for 0.5 s, hash_store, key k",
            "rank 1 node1, pid 7: in a Store call",
            "    get for 0.5 s, hash_store, key k",
            "ranks 0,3: in no Store call",
            "rank 8: in no Store call that is recorded: recording is off there",
        ]

    def test_missing_without_names(self) -> None:
        """Nobody is accused who may have arrived."""
        unsure = StalledBarrier(family="b", arrived=2, missing={}, possible=3)
        (waiting,) = view({0: answered(0, barriers=(unsure,))}, "", str).barriers

        assert waiting.missing == "missing 3, some arrived without a name"
        assert waiting.doing == ()


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The environment of rank 0, and the store there."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    tracedstore.configure(log_format="json")
    return server


def the_sentence(events: Events) -> str:
    """Why there is no page, as it was told."""
    (event,) = events()
    schema.check(event)
    assert (event["event"], event["observer"]) == ("telemetry.disabled", "debug_page")
    sentence: str = event["error"]
    return sentence


class TestAdd:
    """What start_debug_server is given."""

    def test_on_rank_0(self, rank_0: dist.Store, events: Events) -> None:
        """Torch's pages and ours, after Home."""
        given = debug_page.add()["handlers"]
        names = [type(handler).__name__ for handler in given]

        assert names[:3] == ["IndexHandler", "StoreHandler", "StacksHandler"]
        assert [link.path for link in given[1].nav_links()] == ["/tracedstore"]
        assert events() == []

    def test_spawned(self, rank_0: dist.Store) -> None:
        """A frontend in a process that is not forked is sent the page."""
        (_, page, *_) = debug_page.add()["handlers"]

        sent = pickle.loads(pickle.dumps(page))

        assert sent.dump_filename() == "tracedstore"

    def test_frame_has_changed(self, rank_0: dist.Store) -> None:
        """The page does without torch's frame, and escapes all the same."""

        class Asked:
            frontend = FrontendServer.__new__(FrontendServer)

        RECORDER.barriers.record_stall(
            RECORDER.barriers.begin(),
            StalledBarrier(family="<b>", arrived=1, missing={1: "node1"}, possible=0),
        )
        (_, page, *_) = debug_page.add()["handlers"]
        (route,) = page.routes()
        shown = route.handler(Asked()).decode()

        assert shown.startswith("<!doctype html><pre>2 ranks: 1 answered, 1 never")
        assert "barrier &lt;b&gt;: 1 arrived, missing 1 of 2: node1 (rank 1)" in shown

    def test_own_pages(self, rank_0: dist.Store) -> None:
        """Instead of torch's."""
        (own, *_) = debug_page.add()["handlers"]

        given = debug_page.add([own])["handlers"]

        assert [type(h).__name__ for h in given] == ["IndexHandler", "StoreHandler"]

    def test_on_another_rank(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """It answers, and needs none of the frontend's packages."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setitem(sys.modules, "tabulate", None)

        assert debug_page.add() == {}
        found = ask_all(Directory(_store.tcpstore_client, 2), 2, 5)[0]
        assert [found[rank].state for rank in (0, 1)] == ["absent", "answered"]
        assert events() == []

    @pytest.mark.parametrize("package", ["tabulate", "jinja2"])
    def test_package_is_missing(
        self,
        rank_0: dist.Store,
        package: str,
        monkeypatch: pytest.MonkeyPatch,
        events: Events,
    ) -> None:
        """One sentence, with what to install."""
        for module in ("_debug_handlers", "_frontend"):
            monkeypatch.delitem(
                sys.modules, f"torch.distributed.debug.{module}", raising=False
            )
            monkeypatch.delattr(torchs, module, raising=False)
        monkeypatch.setitem(sys.modules, package, None)

        assert debug_page.add() == {}
        assert the_sentence(events) == (
            f"torch's debug server needs the package {package}, which is not"
            f" installed: pip install {package}"
        )

    def test_variable_is_missing(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """Which torch needs as well."""
        monkeypatch.delenv("MASTER_PORT")

        assert debug_page.add() == {}
        assert the_sentence(events) == (
            "torch's debug server needs the variable MASTER_PORT, which is not set:"
            " start the job with torchrun, or set it"
        )

    def test_torch_has_changed(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """What is private there may go any day; the caller's own pages stay."""
        monkeypatch.delattr(_store, "tcpstore_client")

        assert debug_page.add([]) == {"handlers": []}
        sentence = the_sentence(events)
        assert sentence.startswith(
            f"no page in torch's debug server: that of torch {torch.__version__} is"
            " not as in 2.13 (AttributeError: "
        )

    def test_torch_is_older(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """Its server takes no pages, so it is given none."""
        monkeypatch.setattr(torchs, "start_debug_server", lambda port=25999: None)

        assert debug_page.add() == {}
        assert "start_debug_server takes no handlers" in the_sentence(events)

    def test_torch_is_much_older(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """It has no debug server."""
        monkeypatch.setitem(sys.modules, _store.__name__, None)

        assert debug_page.add() == {}
        assert "is not as in 2.13 (ModuleNotFoundError" in the_sentence(events)

    def test_import_is_light(self) -> None:
        """Nothing of torch's server is loaded before it is asked for."""
        program = (
            "import sys, tracedstore.auto.debug_page;"
            "print(*{'tabulate', 'aiohttp', 'torch.distributed.debug'}"
            " & sys.modules.keys())"
        )

        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )

        assert done.stdout.strip() == ""
