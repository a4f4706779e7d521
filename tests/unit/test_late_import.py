"""Modules that are imported when they are used: which, where, and in a forked child."""

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tracedstore import diagnosis
from tracedstore.common.late_import import late_import

# What a worker does not import that runs a job without a stall or a failure.
NOT_IMPORTED = (
    "structlog",
    "opentelemetry.sdk",
    "tracedstore.coordination.barrier",
    "tracedstore.diagnosis.connection.connection_attempt",
    "tracedstore.diagnosis.connection.file_store",
    "tracedstore.diagnosis.judgement",
    "tracedstore.diagnosis.observe.blocked_record",
    "tracedstore.elastic",
    "tracedstore.etcd",
    "tracedstore.rendezvous",
    "tracedstore.tools",
)
# A worker of one rank, as torchrun starts it. The diagnosis polls for questions
# meanwhile. Then every module that is late is imported, in another thread.
_WORKER = """
    import socket, sys, threading, time
    import tracedstore
    tracedstore.instrument()
    import torch
    import torch.distributed as dist
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not any(
        thread.name == "tracedstore-diagnosis" for thread in threading.enumerate()
    ):
        dist.distributed_c10d._get_default_store().set("key", "value")
        time.sleep(0.1)
    time.sleep(1.5)
    print("started", *sys.modules)
    from tracedstore.common import late_import
    before = set(sys.modules)
    for name in sorted(late_import.late_names()):
        __import__(name)
    print("late", *set(sys.modules) - before)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What a worker has imported, and what its late modules import besides."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_WORKER)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: set(line[1:]) for line in lines}


def test_worker_imports_little(imported: dict[str, set[str]]) -> None:
    """A worker does not import what only a stall or a failure needs."""
    offenders = [
        name
        for name in sorted(imported["started"])
        if any(name == one or name.startswith(one + ".") for one in NOT_IMPORTED)
    ]

    assert offenders == []


def test_late_modules_import_only_own(imported: dict[str, set[str]]) -> None:
    """The main thread may wait for a thread that imports a late module.

    So that imports nothing of which the application, in its main thread, may hold the
    lock.
    """
    assert "tracedstore.diagnosis.judgement.inquiry" in imported["late"]
    assert [one for one in imported["late"] if not one.startswith("tracedstore.")] == []


def test_module_is_imported_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands for a module imports it when an attribute is read."""
    monkeypatch.setattr(diagnosis, "__path__", [*diagnosis.__path__, str(tmp_path)])
    (tmp_path / "late_for_test.py").write_text("value = 7\n")
    name = "tracedstore.diagnosis.late_for_test"

    module = late_import(name)

    assert name not in sys.modules
    assert module.value == 7
    assert name in sys.modules
    del sys.modules[name]


def test_child_of_a_fork_imports_what_another_thread_was_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is not in the child, which would wait for its lock for ever."""
    monkeypatch.setattr(diagnosis, "__path__", [*diagnosis.__path__, str(tmp_path)])
    name = "tracedstore.diagnosis.slow_for_test"
    (tmp_path / "slow_for_test.py").write_text(
        "import os, threading\n"
        "if os.environ.get('SLOW_FOR_TEST') == str(os.getpid()):\n"
        "    threading.begun_for_test.set()\n"
        "    threading.end_for_test.wait()\n"
    )
    begun, end = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "begun_for_test", begun, raising=False)
    monkeypatch.setattr(threading, "end_for_test", end, raising=False)
    monkeypatch.setenv("SLOW_FOR_TEST", str(os.getpid()))
    thread = threading.Thread(target=importlib.import_module, args=[name], daemon=True)
    thread.start()
    assert begun.wait(20)

    pid = os.fork()
    if pid == 0:
        importer = threading.Thread(
            target=importlib.import_module, args=[name], daemon=True
        )
        importer.start()
        importer.join(20)
        os._exit(1 if importer.is_alive() or name not in sys.modules else 0)
    _, status = os.waitpid(pid, 0)
    end.set()
    thread.join(20)

    assert os.waitstatus_to_exitcode(status) == 0
    assert sys.modules.pop(name).__name__ == name
