"""Measures how many requests a second a TCPStore server answers, on loopback."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from harness import tcp_server

_CLIENTS = 8
# One request each.
_CALLS: dict[str, Callable[[Any], Any]] = {
    "add": lambda store: store.add("number", 1),
    "check": lambda store: store.check(["number"]),
    "compare_set": lambda store: store.compare_set("text", "", ""),
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """The requests that one server answers a second.

    Attributes:
        backend: ``libuv`` or ``TCP``.
        clients: Processes that call at the same time.
        call: What they call.
        requests_a_second: What the server answers.
    """

    backend: str
    clients: int
    call: str
    requests_a_second: float


def measure(seconds: float) -> list[Capacity]:
    """Measure both backends of torch, and each call for so many seconds."""
    results = []
    for backend in ("libuv", "TCP"):
        with tcp_server(libuv=backend == "libuv") as port:
            for clients, call in product((1, _CLIENTS), _CALLS):
                rate = _requests_a_second(port, clients, call, seconds)
                results.append(Capacity(backend, clients, call, rate))
    return results


def _requests_a_second(port: int, clients: int, call: str, seconds: float) -> float:
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(clients):
        pipe, other_end = fork.Pipe()
        process = fork.Process(target=_call, args=(other_end, port, call), daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(seconds)
        counts: list[int] = [pipe.recv() for pipe in pipes]
        return sum(counts) / seconds
    finally:
        for process in processes:
            process.kill()
            process.join()


def _call(pipe: "Connection[Any, Any]", port: int, call: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    store.set("text", "0")
    make_call = _CALLS[call]
    pipe.send("ready")
    ends = time.monotonic() + pipe.recv()
    count = 0
    while time.monotonic() < ends:
        make_call(store)
        count += 1
    pipe.send(count)
