"""The parts of the debug page: status, queries, content and installation."""

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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tracedstore
from support import events as schema
from support.events import Events
from support.versions import DEBUG_SERVER, TORCH, needs_debug_server
from tracedstore.auto import debug_page
from tracedstore.auto.debug_page import install, rank_client
from tracedstore.auto.debug_page.rank_client import Directory, query_ranks
from tracedstore.auto.debug_page.view import view
from tracedstore.common.timeouts import join_bounded_threads
from tracedstore.coordination.rank_registry import RankInfo, register
from tracedstore.export import process_status
from tracedstore.export.http_server import Server
from tracedstore.export.inflight_client import Reply
from tracedstore.export.process_status import ProcessStatus
from tracedstore.naming.decoders import default_name
from tracedstore.recording.barrier_stats import StalledBarrier
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.inflight import InFlight

if TORCH >= DEBUG_SERVER:
    import torch.distributed.debug as torch_debug
    from torch.distributed.debug import _store
    from torch.distributed.debug._frontend import FrontendServer

pytestmark = needs_debug_server

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


def make_status(rank: int = 0, **fields: Any) -> ProcessStatus:
    """Return the status of a rank."""
    default: dict[str, Any] = {
        "recording": True,
        "calls": (),
        "more_calls": 0,
        "barriers": (),
    }
    process = {"rank": rank, "pid": os.getpid()}
    return ProcessStatus(process=process, **(default | fields))


def info(rank: int) -> RankInfo:
    """Return the registry entry of a rank."""
    return RankInfo(rank=rank, host=f"node{rank}", pid=7, world_size=8, started=1.0)


def answered(rank: int, **fields: Any) -> Reply:
    """Return the reply of a rank that answered."""
    status = make_status(rank, **fields)
    return Reply(state="answered", info=info(rank), status=status)


class TestStatus:
    """The status that a rank serves."""

    def test_round_trip(self) -> None:
        """Decoding returns the encoded status; missing ranks are folded."""
        status = make_status(calls=(CALL,), more_calls=3, barriers=(STALLED,))
        encoded = status.to_bytes()

        assert ProcessStatus.from_bytes(encoded) == status
        assert json.loads(encoded)["barriers"][0]["missing"] == {
            "node1": "1-2",
            "rank 4": "4",
        }

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<html>",
            b"[]",
            b"{}",
            b'{"process": 1}',
            make_status(calls=(CALL,)).to_bytes().replace(b"12.34", b'"long"'),
            make_status(barriers=(STALLED,))
            .to_bytes()
            .replace(b'"1-2"', b'"0-9999999"'),
        ],
    )
    def test_other_bodies(self, body: bytes) -> None:
        """Another program may listen at the address of a rank."""
        with pytest.raises(ValueError, match=r"."):
            ProcessStatus.from_bytes(body)

    def test_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page has the process, its calls and its stalled barriers."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "run-7")
        tracedstore.configure(log_format="off")
        RECORDER.barriers.record_stall(SimpleNamespace(ended=False), STALLED)
        server = Server({"/": process_status.page}, "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{server.port}"
            with urllib.request.urlopen(url, timeout=10) as response:
                status = ProcessStatus.from_bytes(response.read())
        finally:
            server.stop(5)

        assert status.process == {
            "rank": 3,
            "run_id": "run-7",
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        assert (status.recording, status.calls) == (True, ())
        assert status.barriers == (STALLED,)

    def test_failure(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A failure is counted, and the server prints nothing into the job's log."""

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
    """A store in which torch's rank 0 has registered."""
    store = dist.HashStore()
    store.set("rank0", "http://somewhere")
    return store


@pytest.fixture
def listen() -> Iterator[Callable[[bytes | None], str]]:
    """Start servers that send a response to every client; None for no response."""
    listening: list[socket.socket] = []

    def serve(server: socket.socket, response: bytes) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(1000)
                client.sendall(response)

    def start(response: bytes | None) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)
        if response is not None:
            threading.Thread(target=serve, args=(server, response), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def http(body: bytes) -> bytes:
    """Return an HTTP response."""
    return b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class TestQueryRanks:
    """There is a reply for every rank, in bounded time."""

    def test_states(
        self, store: dist.Store, listen: Callable[[bytes | None], str]
    ) -> None:
        """The state of a rank depends on its response and its registration."""
        responses = {
            0: http(make_status(0).to_bytes()),
            1: http(make_status(0).to_bytes()),
            2: http(b"hello"),
            3: b"HTTP/1.0 404 Not Found\r\n\r\n",
            4: b"",
            5: b"HTTP/1.0 200 OK\r\nContent-Length: 99999999\r\n\r\n",
            6: b"x" * 100_000,
        }
        for rank, response in responses.items():
            register(store, rank, 10, answers=listen(response))
        register(store, 7, 10)
        store.set("rank8", "http://somewhere")

        replies, store_error = query_ranks(Directory(lambda: store, 10), 10, 5)

        assert store_error == ""
        assert replies[0].status == make_status(0)
        assert replies[1].error == "another process responds at its address"
        assert [replies[rank].state for rank in range(10)] == (
            ["answered"] + ["silent"] * 7 + ["without", "absent"]
        )
        assert "404" in replies[3].error
        assert "99999999" in replies[5].error

    def test_many_silent_ranks(
        self, store: dist.Store, listen: Callable[[bytes | None], str]
    ) -> None:
        """With more ranks than concurrent queries, the timeout of the page holds."""
        silent = listen(None)
        for rank in range(700):
            register(store, rank, 700, answers=silent)
        started = time.monotonic()
        replies, _ = query_ranks(Directory(lambda: store, 700), 700, 1)

        assert time.monotonic() - started < 3
        assert {reply.state for reply in replies.values()} == {"silent"}

    def test_store_hangs(self) -> None:
        """Only one thread reads the store, and the page does not wait for it."""
        connects: list[int] = []
        go_on = threading.Event()

        def connect() -> dist.Store:
            connects.append(1)
            go_on.wait(30)
            raise RuntimeError("gone")

        directory = Directory(connect, 2)
        results = [directory.read(0.05), directory.read(0.05)]
        with directory._lock:
            read_done = directory._read_done
        # The thread is in a Store call, so the exit of the process waits for it.
        assert not join_bounded_threads(0.01)
        go_on.set()
        assert join_bounded_threads(20)
        assert read_done is not None
        read_done.wait(10)

        assert [error for _, error in results] == [
            "the store did not answer within 0 s"
        ] * 2
        assert connects == [1]
        _, store_error = directory.read(10)
        assert store_error == "the store could not be read: RuntimeError('gone')"

    def test_torch_uses_other_keys(self) -> None:
        """Rank 0 must be registered; otherwise torch's keys have changed."""
        store = dist.HashStore()

        replies, store_error = query_ranks(Directory(lambda: store, 2), 2, 5)

        assert {reply.state for reply in replies.values()} == {"absent"}
        assert store_error == rank_client._KEYS_CHANGED


class TestView:
    """The content of the page."""

    def test_text(self) -> None:
        """Alarms are first, then blocked ranks by duration, then the idle ranks."""
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
            4: Reply(state="silent", info=info(4), error="no response within 2 s"),
            5: Reply(state="absent"),
            6: Reply(state="absent"),
            7: Reply(state="without"),
            8: answered(8, recording=False),
        }

        def roster(rank: int) -> str:
            return {5: "node5", 6: "node5"}.get(rank, default_name(rank))

        shown = view(replies, "the store is slow", roster)

        assert shown.text().splitlines() == [
            (
                "9 ranks: 5 answered, 1 did not answer, 1 without this page,"
                " 2 never registered."
            ),
            "the store is slow",
            (
                "barrier epoch/*: 5 arrived, missing 3 of 8: node1 (ranks 1-2),"
                " node4 (rank 4) (reported by ranks 0,3)"
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
            "rank 8: in no recorded Store call: recording is off",
        ]

    def test_unidentified_arrivals(self) -> None:
        """No rank that may have arrived is listed as missing."""
        unsure = StalledBarrier(family="b", arrived=2, missing={}, possible=3)
        (waiting,) = view({0: answered(0, barriers=(unsure,))}, "", str).barriers

        assert waiting.missing == "missing 3, some arrivals unidentified"
        assert waiting.missing_calls == ()


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The environment of rank 0, and its store."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    tracedstore.configure(log_format="json")
    return server


def error_of(events: Events) -> str:
    """Return the error of the one telemetry.disabled event."""
    (event,) = events()
    schema.check(event)
    assert (event["event"], event["observer"]) == ("telemetry.disabled", "debug_page")
    error: str = event["error"]
    return error


class TestAdd:
    """The arguments for start_debug_server."""

    def test_on_rank_0(self, rank_0: dist.Store, events: Events) -> None:
        """The handlers are torch's and the page, after Home."""
        handlers = debug_page.add()["handlers"]
        names = [type(handler).__name__ for handler in handlers]

        assert names[:3] == ["IndexHandler", "StoreHandler", "StacksHandler"]
        assert [link.path for link in handlers[1].nav_links()] == ["/tracedstore"]
        assert events() == []

    def test_forked(self, rank_0: dist.Store) -> None:
        """A forked child does not register the port of its parent's server."""
        debug_page.add()
        parent = install._status_server
        assert parent is not None
        child = os.fork()
        if child == 0:
            os._exit(0 if install._status_server is None else 1)

        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert install._status_server is parent
        assert parent.listening

    def test_spawned(self, rank_0: dist.Store) -> None:
        """The page can be pickled for a frontend that is spawned."""
        (_, page, *_) = debug_page.add()["handlers"]

        copy = pickle.loads(pickle.dumps(page))

        assert copy.dump_filename() == "tracedstore"

    def test_base_template_has_changed(self, rank_0: dist.Store) -> None:
        """The page is served as escaped text without torch's template."""

        class Request:
            frontend = FrontendServer.__new__(FrontendServer)

        RECORDER.barriers.record_stall(
            SimpleNamespace(ended=False),
            StalledBarrier(family="<b>", arrived=1, missing={1: "node1"}, possible=0),
        )
        (_, page, *_) = debug_page.add()["handlers"]
        (route,) = page.routes()
        shown = route.handler(Request()).decode()

        assert shown.startswith("<!doctype html><pre>2 ranks: 1 answered, 1 never")
        assert "barrier &lt;b&gt;: 1 arrived, missing 1 of 2: node1 (rank 1)" in shown

    def test_other_handlers(self, rank_0: dist.Store) -> None:
        """The caller's handlers replace torch's."""
        (own, *_) = debug_page.add()["handlers"]

        handlers = debug_page.add([own])["handlers"]

        assert [type(h).__name__ for h in handlers] == ["IndexHandler", "StoreHandler"]

    def test_on_another_rank(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """The rank serves its status, without the frontend's packages."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setitem(sys.modules, "tabulate", None)

        assert debug_page.add() == {}
        replies, _ = query_ranks(Directory(_store.tcpstore_client, 2), 2, 5)
        assert [replies[rank].state for rank in (0, 1)] == ["absent", "answered"]
        assert events() == []

    @pytest.mark.parametrize("package", ["tabulate", "jinja2"])
    def test_package_is_missing(
        self,
        rank_0: dist.Store,
        package: str,
        monkeypatch: pytest.MonkeyPatch,
        events: Events,
    ) -> None:
        """The error names the package to install."""
        for module in ("_debug_handlers", "_frontend"):
            monkeypatch.delitem(
                sys.modules, f"torch.distributed.debug.{module}", raising=False
            )
            monkeypatch.delattr(torch_debug, module, raising=False)
        monkeypatch.setitem(sys.modules, package, None)

        assert debug_page.add() == {}
        assert error_of(events) == (
            f"torch's debug server needs the package {package}, which is not"
            f" installed: pip install {package}"
        )

    def test_variable_is_missing(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """The error names the variable, which torch needs too."""
        monkeypatch.delenv("MASTER_PORT")

        assert debug_page.add() == {}
        assert error_of(events) == (
            "torch's debug server needs the variable MASTER_PORT, which is not set:"
            " start the job with torchrun, or set it"
        )

    def test_torch_has_changed(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """The error has torch's version; the caller's handlers are returned."""
        monkeypatch.delattr(_store, "tcpstore_client")

        assert debug_page.add([]) == {"handlers": []}
        error = error_of(events)
        assert error.startswith(
            f"no page in torch's debug server: torch {torch.__version__} differs from"
            " torch 2.13 (AttributeError: "
        )

    def test_torch_without_handlers(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """A start_debug_server without the parameter gets no handlers."""
        monkeypatch.setattr(torch_debug, "start_debug_server", lambda port=25999: None)

        assert debug_page.add() == {}
        assert "start_debug_server takes no handlers" in error_of(events)

    def test_torch_without_debug_server(
        self, rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch, events: Events
    ) -> None:
        """A torch without a debug server is reported."""
        monkeypatch.setitem(sys.modules, _store.__name__, None)

        assert debug_page.add() == {}
        assert "differs from torch 2.13 (ModuleNotFoundError" in error_of(events)

    def test_import_is_light(self) -> None:
        """Importing the module does not load torch's debug server."""
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
