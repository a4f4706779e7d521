"""Counts the requests that reach a TCPStore server, by phase of a job and purpose.

A relay between the clients and the server parses torch's requests. A call may be
several of them: ``get`` is a WAIT and a GET.
"""

import multiprocessing
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from wire import RelayedConnection, relay

# The requests of torch 2.13 by number, with their arguments: s is a text with its
# length, i and q are numbers of 4 and 8 bytes, * is a list of texts with its length,
# and % one of pairs.
_REQUESTS = (
    ("validate", "i"),
    ("set", "ss"),
    ("compare_set", "sss"),
    ("get", "s"),
    ("add", "sq"),
    ("check", "*"),
    ("wait", "*"),
    ("num_keys", ""),
    ("delete_key", "s"),
    ("append", "ss"),
    ("multi_get", "*"),
    ("multi_set", "%"),
    ("cancel_wait", ""),
    ("ping", "i"),
    ("queue_push", "ss"),
    ("queue_pop", "s"),
    ("queue_len", "s"),
    ("list_keys", ""),
)
_LENGTH = struct.Struct("=Q")
_SIZES = {"i": 4, "q": 8}
# What keys are for, by a part of them; the first that matches counts.
_PURPOSES = (
    (b"tracedstore/QUESTION", "questions"),
    (b"tracedstore/ANSWER", "questions"),
    (b"tracedstore/RANKS", "registration"),
    (b"tracedstore/STAMPS", "registration"),
    (b"tracedstore/STALE", "registration"),
    (b"tracedstore/REPLACED", "registration"),
    (b"tracedstore/", "diagnosis"),
)


@dataclass(slots=True)
class Requests:
    """Counts of requests.

    Attributes:
        phase: What the job does now.
        counts: The requests, by phase, purpose and type.
        seconds: The requests, by phase and second.
        bytes: The bytes that clients and server sent, by phase.
    """

    phase: str = ""
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: Counter[tuple[str, int]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def summary(self, phase: str) -> dict[str, Any]:
        """Return the counts of a phase, for a JSON file."""
        purposes: Counter[str] = Counter()
        types: Counter[str] = Counter()
        for (one, purpose, kind), count in self.counts.items():
            if one == phase:
                purposes[purpose] += count
                types[f"{purpose} {kind}"] += count
        return {
            "requests": purposes.total(),
            "purposes": dict(purposes),
            "types": dict(types),
            "most_a_second": max(
                (count for (one, _), count in self.seconds.items() if one == phase),
                default=0,
            ),
            "bytes": self.bytes[phase],
        }


class _Connection(RelayedConnection):
    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self._requests = requests
        self._unparsed = bytearray()

    def count(self, data: bytes, *, client: bool) -> None:
        super().count(data, client=client)
        requests = self._requests
        requests.bytes[requests.phase] += len(data)
        if not client:
            return
        self._unparsed += data
        for kind, key in self._parse():
            requests.counts[requests.phase, _purpose(kind, key), kind] += 1
            requests.seconds[requests.phase, int(time.monotonic())] += 1

    def _parse(self) -> Iterator[tuple[str, bytes]]:
        """Yield type and first key of the requests that have arrived."""
        data, start = memoryview(bytes(self._unparsed)), 0
        while start < len(data):
            kind, form = _REQUESTS[data[start]]
            parsed = _arguments(data, start + 1, form)
            if parsed is None:
                break
            start, key = parsed
            yield kind, key
        del self._unparsed[:start]


def _arguments(data: memoryview, at: int, form: str) -> tuple[int, bytes] | None:
    """Return the end of the arguments and the first text; None if some are missing."""
    first = b""
    for one in form:
        if size := _SIZES.get(one):
            at += size
            continue
        texts = 1
        if one in "*%":
            if at + _LENGTH.size > len(data):
                return None
            (texts,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            texts *= 1 + (one == "%")
        for _ in range(texts):
            if at + _LENGTH.size > len(data):
                return None
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            first = first or bytes(data[at : at + length])
            at += length
    return (at, first) if at <= len(data) else None


def _purpose(kind: str, key: bytes) -> str:
    for part, purpose in _PURPOSES:
        if part in key:
            return purpose
    return "job" if key else kind


class CountingRelay:
    """A relay to a TCPStore, in a process of its own.

    Attributes:
        port: The port for clients.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self.port: int = pipe.recv()

    def begin(self, phase: str) -> None:
        """Count what comes from now on for a phase."""
        self._pipe.send(phase)
        self._pipe.recv()

    def requests(self) -> Requests:
        """Return the counts so far."""
        self._pipe.send(None)
        requests: Requests = self._pipe.recv()
        return requests


def _run_relay(pipe: "Connection[Any, Any]", server_port: int) -> None:
    requests = Requests()
    with relay(server_port, lambda: _Connection(requests)) as running:
        pipe.send(running.port)
        while True:
            phase = pipe.recv()
            if phase is not None:
                requests.phase = phase
            pipe.send(requests)


@contextmanager
def counting_relay(server_port: int) -> Iterator[CountingRelay]:
    """Run a relay to a TCPStore.

    A process of its own, because torch holds the GIL while it lists keys. It is forked:
    this process must have no threads yet.
    """
    fork = multiprocessing.get_context("fork")
    pipe, other_end = fork.Pipe()
    process = fork.Process(
        target=_run_relay, args=(other_end, server_port), daemon=True
    )
    process.start()
    try:
        yield CountingRelay(pipe)
    finally:
        process.kill()
        process.join()
