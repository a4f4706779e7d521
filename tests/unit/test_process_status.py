"""The status that a process serves as /inflight, and what clients make of it."""

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tracedstore
from tracedstore.coordination.arrivals import StalledBarrier
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.http_endpoint import facts_page
from tracedstore.export.http_server import Server
from tracedstore.local import facts
from tracedstore.local.facts import ProcessFacts
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.inflight import InFlight
from tracedstore.tools.attach.rank_endpoints import query_ranks
from tracedstore.tools.attach.token_policy import TokenPolicy

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


def make_status(rank: int = 0, **fields: Any) -> ProcessFacts:
    """Return the status of a rank."""
    return ProcessFacts(
        rank=rank, host="", pid=os.getpid(), state="running", recording=True, **fields
    )


class TestStatus:
    """The status that a rank serves."""

    def test_round_trip(self) -> None:
        """Decoding returns the encoded status; missing ranks are folded."""
        status = make_status(in_flight=(CALL,), more_in_flight=3, barriers=(STALLED,))
        encoded = status.to_bytes()

        assert ProcessFacts.from_page(encoded) == status
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
            make_status(in_flight=(CALL,)).to_bytes().replace(b"12.34", b'"long"'),
            make_status(barriers=(STALLED,))
            .to_bytes()
            .replace(b'"1-2"', b'"0-9999999"'),
        ],
    )
    def test_other_bodies(self, body: bytes) -> None:
        """Another program may listen at the address of a rank."""
        with pytest.raises(ValueError, match=r"."):
            ProcessFacts.from_page(body)

    def test_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page has the process, its calls and its stalled barriers."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "run-7")
        tracedstore.configure(log_format="off")
        RECORDER.cold.begin("a barrier", STALLED)
        server = Server({"/": facts_page}, "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{server.port}"
            with urllib.request.urlopen(url, timeout=10) as response:
                body = response.read()
        finally:
            server.stop(5)

        status = ProcessFacts.from_page(body)
        assert json.loads(body)["process"] == {
            "rank": 3,
            "run_id": "run-7",
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        assert (status.recording, status.in_flight) == (True, ())
        assert status.barriers == (STALLED,)

    def test_failure(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A failure is counted, and the server prints nothing into the job's log."""

        def broken(_recorder: Any) -> list[InFlight]:
            raise RuntimeError("broken")

        monkeypatch.setattr(facts, "in_flight", broken)
        tracedstore.configure(log_format="off")
        server = Server({"/": facts_page}, "127.0.0.1", 0)
        try:
            with pytest.raises(urllib.error.HTTPError, match="500"):
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}", timeout=10)
        finally:
            server.stop(5)

        assert RECORDER.failures.counts() == {"endpoint": 1}
        assert capfd.readouterr().err == ""


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


def entry(rank: int, world_size: int, address: str | None) -> RankInfo:
    """Return the entry of a rank of this process that serves at an address."""
    return RankInfo(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        world_size=world_size,
        metrics=address and f"http://{address}/metrics",
        started=1.0,
    )


class TestQueryRanks:
    """There is a reply for every rank, in bounded time."""

    def test_states(self, listen: Callable[[bytes | None], str]) -> None:
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
        infos = [entry(rank, 8, listen(one)) for rank, one in responses.items()]
        infos.append(entry(7, 8, None))

        replies = list(query_ranks(infos, TokenPolicy()).values())

        assert replies[0].status == make_status(0)
        assert replies[1].error == "another process responds at its address"
        assert [reply.state for reply in replies] == (
            ["answered"] + ["silent"] * 6 + ["absent"]
        )
        assert "404" in replies[3].error
        assert "99999999" in replies[5].error

    def test_many_silent_ranks(self, listen: Callable[[bytes | None], str]) -> None:
        """With more ranks than concurrent queries, the timeout of all holds."""
        silent = listen(None)
        started = time.monotonic()
        replies = query_ranks(
            [entry(rank, 700, f"{silent}/{rank}") for rank in range(700)],
            TokenPolicy(),
        )

        # One after the other would take 700 s.
        assert time.monotonic() - started < 60
        assert {reply.state for reply in replies.values()} == {"silent"}
