"""Runs one case: starts its processes, injects what ranks cannot, collects results."""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from faults import ranks, servers
from faults.cases import Case, Fault
from faults.oracle import (
    EXIT_BOUND,
    VERDICT_BOUND,
    RankRecord,
    is_stall_report,
    may_block,
    record_of,
)
from faults.processes import Process

# Seconds for a process to start on a machine under load.
_START_TIMEOUT = 60.0
# A rank that has sent one of these steps, or ended, keeps no other rank from its turn.
_WAITING = ("waiting", "compare_set returned:1")
_POLL_INTERVAL = 0.05
# Seconds after a timeout at which a rank that is not blocked has noticed it.
_SETTLE = 1.5
# Lines of a rank's log that are kept, beside its events.
_MAX_OUTPUT = 60


class Director:
    """Runs the processes of one case.

    Args:
        case: The case.
        folder: An empty folder for its files.
        etcd_port: The port of a running etcd, for cases that need one.
    """

    def __init__(self, case: Case, folder: Path, etcd_port: int = 0) -> None:
        self._case = case
        self._folder = folder
        self._etcd_port = etcd_port
        self._ranks: dict[int, Process] = {}
        self._helpers: list[Process] = []
        self._server: Process | None = None
        self._proxy: Process | None = None
        self._proxy_control = -1
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        # Ranks that hold at a step or are stopped, with their faults.
        self._held: dict[int, Fault] = {}
        # Faults that happen when all ranks wait.
        self._when_waiting: list[Fault] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._to_release: list[int] = []
        # When the last fault outside of a rank was injected.
        self._injected = float("inf")

    def run(self) -> list[RankRecord]:
        """Run the case and return what each rank did.

        Raises:
            TimeoutError: A process did not start, so there is nothing to judge.
        """
        case = self._case
        try:
            where = self._start_servers()
            for rank in range(case.world_size):
                if rank not in case.absent:
                    self._ranks[rank] = Process(
                        partial(ranks.run, case, rank, where=where)
                    )
            for process in self._ranks.values():
                port = process.wait_for("ready", _START_TIMEOUT)["port"]
                if case.http_clients > 0:
                    self._sockets += servers.hang_clients(port, case.http_clients)
            self._conduct()
            return [self._record(rank) for rank in range(case.world_size)]
        finally:
            for process in (*self._ranks.values(), *self._helpers):
                process.kill()

    def _start_servers(self) -> ranks.Surroundings:
        case = self._case
        address = str(self._folder / "store")
        if case.store == "tcp":
            self._server = self._helper(partial(servers.serve_tcp, port=0))
            port = self._server.wait_for("port", _START_TIMEOUT)["port"]
            address = f"127.0.0.1:{port}"
        elif case.store == "etcd":
            address = f"{self._etcd_port},/{case.seed}/{case.number}-{os.getpid()}"
        where = ranks.Surroundings(folder=self._folder, address=address)
        if case.proxied:
            control, self._proxy_control = os.pipe()
            own, _, prefix = address.rpartition(":")[2].partition(",")
            target = int(own)
            self._proxy = self._helper(
                lambda channel: servers.Proxy(channel, control, target).serve()
            )
            port = self._proxy.wait_for("port", _START_TIMEOUT)["port"]
            proxy = f"{port},{prefix}" if prefix else f"127.0.0.1:{port}"
            where = replace(where, proxy=proxy)
        if case.exporter:
            where = replace(where, collector=self._start_collector(case.exporter))
        return where

    def _start_collector(self, kind: str) -> int:
        if kind == "slow":
            collector = self._helper(servers.serve_slow_collector)
            return int(collector.wait_for("port", _START_TIMEOUT)["port"])
        silent = servers.refusing_socket()
        if kind == "silent":
            silent.listen(64)  # the kernel accepts, nothing responds
        self._sockets.append(silent)
        return int(silent.getsockname()[1])

    def _helper(self, work: Callable[[Any], Any]) -> Process:
        process = Process(work)
        self._helpers.append(process)
        return process

    # Following the ranks.

    def _conduct(self) -> None:
        """Release the ranks, follow them, and inject faults as they reach steps."""
        for rank, process in self._ranks.items():
            self._selector.register(process.reading, selectors.EVENT_READ, rank)
            self._selector.register(process.handle, selectors.EVENT_READ, rank)
        self._to_release = [r for r in self._case.order if r in self._ranks]
        bound = self._case.timeout + VERDICT_BOUND + EXIT_BOUND
        self._follow(bound, self._survivors_ended)
        # What was to go on after all others have ended does so now.
        for rank, fault in list(self._held.items()):
            if fault.release == "after":
                self._let_go(rank, fault)
        self._follow(bound, self._all_ended)

    def _follow(self, bound: float, finished: Callable[[], bool]) -> None:
        deadline = time.monotonic() + bound
        self._advance()
        while not finished() and time.monotonic() < deadline:
            due = min((when for when, _ in self._timers), default=deadline)
            blocked = any(may_block(self._case, rank) for rank in self._ranks)
            left = max(0.0, min(due, deadline) - time.monotonic())
            # A stall report arrives in a file, which has to be polled.
            for key, _ in self._selector.select(
                min(left, _POLL_INTERVAL) if blocked else left
            ):
                self._receive(key.data)
            for timer in [t for t in self._timers if t[0] <= time.monotonic()]:
                self._timers.remove(timer)
                timer[1]()
            self._advance()

    def _receive(self, rank: int) -> None:
        process = self._ranks[rank]
        for line in process.receive():
            if line["kind"] == "held":
                fault = self._case.faults_of(rank)[line["step"]]
                self._held[rank] = fault
                if fault.action not in ("stop", "late"):
                    self._break(fault)
                    del self._held[rank]
                    process.go()
            elif line["kind"] == "signal":
                self._when_waiting.append(self._case.faults_of(rank)["waiting"])
        if process.reap():
            for line in process.receive():
                if line["kind"] == "signal":
                    self._when_waiting.append(self._case.faults_of(rank)["waiting"])
            for fd in (process.reading, process.handle):
                with suppress(KeyError):
                    self._selector.unregister(fd)

    def _advance(self) -> None:
        """Release ranks whose turn it is, and inject what waits for its moment."""
        while self._to_release:
            if self._case.ordered and not all(
                self._is_waiting(rank)
                for rank in self._ranks
                if rank not in self._to_release
            ):
                return
            self._ranks[self._to_release.pop(0)].go()
        for rank, fault in list(self._held.items()):
            if fault.release == "in_time" and all(
                self._is_waiting(other) for other in self._ranks if other != rank
            ):
                self._let_go(rank, fault)
        if self._when_waiting and all(map(self._is_waiting, self._ranks)):
            pending, self._when_waiting = self._when_waiting, []
            for fault in pending:
                self._break(fault)

    def _is_waiting(self, rank: int) -> bool:
        process = self._ranks[rank]
        return (
            rank in self._held
            or process.exit_status is not None
            or self._is_blocked(rank)
            or any(
                line["kind"] == "result" or line.get("step") in _WAITING
                for line in process.lines
            )
        )

    def _let_go(self, rank: int, fault: Fault) -> None:
        del self._held[rank]
        if fault.action == "stop":
            self._ranks[rank].resume()
        else:
            self._ranks[rank].go()

    def _survivors_ended(self) -> bool:
        return all(
            process.exit_status is not None
            or rank in self._held
            or self._is_blocked(rank)
            for rank, process in self._ranks.items()
        )

    def _all_ended(self) -> bool:
        return all(
            process.exit_status is not None
            or (rank in self._held and not self._held[rank].release)
            or self._is_blocked(rank)
            for rank, process in self._ranks.items()
        )

    # Faults outside of the ranks.

    def _break(self, fault: Fault) -> None:
        """Inject a fault that a rank asked for."""
        self._injected = time.monotonic()
        process = self._ranks[fault.rank]
        if fault.action == "kill":
            process.signal(signal.SIGKILL)
        elif fault.action == "stop":
            process.signal(signal.SIGSTOP)
            self._held[fault.rank] = fault
        elif fault.action.startswith("server"):
            self._break_server(fault)
        elif fault.action == "file_delete":
            (self._folder / "store").unlink()
        elif fault.action == "file_truncate":
            os.truncate(self._folder / "store", 0)
        elif fault.action.startswith("proxy"):
            mode = fault.action.removeprefix("proxy_")
            self._set_proxy(f"{mode} {fault.value}" if mode == "delay" else mode)
            if fault.release:
                after, then = fault.release.split()
                self._after(float(after), partial(self._set_proxy, then))

    def _break_server(self, fault: Fault) -> None:
        server = self._server
        if server is None:
            return
        if fault.action == "server_stop":
            server.signal(signal.SIGSTOP)
            if fault.release:
                self._after(float(fault.release), server.resume)
            return
        port = server.lines[0]["port"]
        server.kill()
        if fault.action == "server_restart":
            self._server = self._helper(partial(servers.serve_tcp, port=port))
            self._server.wait_for("port", _START_TIMEOUT)

    def _set_proxy(self, mode: str) -> None:
        if self._proxy is not None:
            os.write(self._proxy_control, mode.encode())
            self._proxy.wait_for("mode", _START_TIMEOUT)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    # What the ranks did.

    def _is_blocked(self, rank: int) -> bool:
        """Return whether a rank has reported that its store blocks it without end.

        A rank whose wait has ended is not blocked: its verdict is due.
        """
        settled = self._injected + self._case.timeout + _SETTLE
        if time.monotonic() < settled or not may_block(self._case, rank):
            return False
        if any(
            line["kind"] == "result" or line.get("step") == "timed_out"
            for line in self._ranks[rank].lines
        ):
            return False
        return any(map(is_stall_report, self._log(rank)[0]))

    def _record(self, rank: int) -> RankRecord:
        record = record_of(self._case, rank)
        process = self._ranks.get(rank)
        if process is None:
            return record
        process.receive()
        record.read(process.lines)
        record.exit_status, record.exited = process.exit_status, process.exited
        stopped = rank in self._held and not self._held[rank].release
        if stopped:
            record.exit_status = -signal.SIGKILL  # when the case ends
        # A rank that ended before it reached the step was not killed.
        faults = self._case.faults_of(rank).values()
        record.killed = stopped or (
            process.exit_status != 0 and any(f.action == "kill" for f in faults)
        )
        record.events, record.output = self._log(rank)
        return record

    def _log(self, rank: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the events of a rank, and the last other lines that it has written."""
        path = ranks.log_path(self._folder, rank)
        if self._case.log != "file" or not path.exists():
            return [], []
        pid = self._ranks[rank].pid  # a process that it forked logs as well
        events, output = [], []
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                output.append(line)
                continue
            with suppress(ValueError):  # cut off when the rank was killed
                event = json.loads(line)
                if event.get("pid") == pid:
                    events.append(event)
        return events, output[-_MAX_OUTPUT:]
