"""Fresh processes that must end as they do without tracing.

They end while threads are in calls, load a damaged build of the native base, or find a
hostile record in their store.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

from faults import exit_child
from faults.results import Result
from tracedstore.native import load

COLUMNS = ("lost", "doubled", "deadlocks", "aborts", "recording off", "wrong ends")
# Seconds for one process, with the import of torch on a busy machine.
_TIMEOUT = 120.0
_BASES = ("bare", "python", "native")
# Loads the native base where it can, and makes a few calls.
_USE_BUILD = """
import torch.distributed as dist, tracedstore
store = tracedstore.wrap(dist.HashStore())
store.set("key", "value")
assert store.get("key") == b"value" and store.add("count", 2) == 2
"""


def exits(options: argparse.Namespace, done: dict[int, Result]) -> Iterator[Result]:
    """End processes with threads in calls, at a seeded moment."""
    kinds = [
        *product(exit_child.WORK, ("local", "global"), ("fresh", "forked")),
        ("barrier", "local", "fresh"),
    ]
    numbered = enumerate(product(range(options.exits), kinds, _BASES))
    for number, (turn, kind, base) in numbered:
        text = f"{base} {' '.join(kind)}"
        if number in done or options.match not in text:
            continue
        # The same moment on each base.
        draw = random.Random(f"exits/{options.seed}/{turn}/{kind}")
        delay = draw.uniform(0.0, 0.3)
        command = ["-m", "faults.exit_child", base, *kind, f"{delay:.4f}"]
        yield _result(number, "exits", base, " ".join(kind), text, command)


def builds(options: argparse.Namespace, done: dict[int, Result]) -> Iterator[Result]:
    """Load builds of the native base that were truncated or changed."""
    for number in range(options.builds):
        if number in done:
            continue
        draw = random.Random(f"builds/{options.seed}/{number}")
        with tempfile.TemporaryDirectory(prefix="tracedstore-builds-") as name:
            folder = Path(name) / "builds"
            shutil.copytree(load.PACKAGE_DIRECTORY, folder)
            kind, text = _damage(load.file_in(folder), draw)
            env = {load.DIRECTORY_VARIABLE: str(folder), "TRACEDSTORE_CORE": "auto"}
            yield _result(
                number, "builds", "native", kind, text, ["-c", _USE_BUILD], env
            )


def _damage(file: Path, draw: random.Random) -> tuple[str, str]:
    data = bytearray(file.read_bytes())
    if draw.random() < 0.3:
        # Most truncated files of a real machine end at a block, and some are empty.
        size = draw.choice((0, 4096, draw.randrange(len(data)), len(data) - 4096))
        del data[size:]
        kind, text = "truncated", f"truncated to {size} bytes"
    else:
        number = draw.choice((1, 16, 256))
        # Somewhere, or all in one block as a bad sector has it.
        block = draw.random() < 0.5
        first = draw.randrange(len(data) - 4096) if block else 0
        last = first + 4096 if block else len(data)
        for _ in range(number):
            data[draw.randrange(first, last)] ^= 1 << draw.randrange(8)
        kind, text = "flipped", f"{number} bits flipped from {first} to {last}"
    file.write_bytes(data)
    return kind, text


def records(options: argparse.Namespace, done: dict[int, Result]) -> Iterator[Result]:
    """Let processes read a question about a million ranks."""
    for number, base in enumerate(_BASES):
        if number not in done and options.match in base:
            command = ["-m", "faults.record_child", base]
            text = f"{base}, a question about a million ranks"
            yield _result(number, "records", base, "a million ranks", text, command)


def _result(
    number: int,
    fault_class: str,
    base: str,
    row: str,
    text: str,
    arguments: list[str],
    env: dict[str, str] | None = None,
) -> Result:
    """Run a process to its end, and return how that was."""
    began = time.monotonic()
    findings: dict[str, list[str]] = {column: [] for column in COLUMNS}
    settings = {k: v for k, v in os.environ.items() if not k.startswith("TRACEDSTORE_")}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        env={**settings, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        # The forked child too.
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        findings["deadlocks"].append(f"runs after {_TIMEOUT:g} s")
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode
        if code < 0 or code == exit_child.ABORTED:
            findings["aborts"].append(f"exit status {code}")
        elif code:
            findings["wrong ends"].append(f"exit status {code}: {errors[-300:]}")
    return {
        "number": number,
        "class": fault_class,
        "base": base,
        "row": row,
        "compared": row,
        "text": text,
        "faults": 1,
        "findings": findings,
        "seconds": round(time.monotonic() - began, 2),
        "errors": errors[-300:] if any(findings.values()) else "",
    }
