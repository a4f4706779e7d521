"""One process of a user on a host reports, and no other user decides which."""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracedstore.diagnosis.judgement.stall_reports import claim
from tracedstore.local import sockets

CLAIM = """
import sys
from tracedstore.local import sockets
from tracedstore.diagnosis.judgement.stall_reports import claim
sockets.directory_candidates = lambda: sys.argv[1:]
claimed = claim("what")
print(claimed is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private directory for the test alone."""
    folder = tmp_path / "private"
    monkeypatch.setattr(sockets, "directory_candidates", lambda: [str(folder)])
    return folder


@pytest.fixture
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which claims the same, prints whether it has it, and waits."""
    command = [sys.executable, "-c", CLAIM, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_another_users_socket_mutes_no_report() -> None:
    """A name that every user can bind is no claim."""
    name = hashlib.sha256(f"{os.getuid()}/what".encode()).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0tracedstore/{name}")

        claimed = claim("what")

    assert claimed is not None
    claimed.close()


def test_in_one_process() -> None:
    """A claim is had once, until it is closed; others are not affected."""
    first = claim("what")
    assert first is not None
    assert claim("what") is None
    other = claim("something else")
    assert other is not None
    first.close()

    again = claim("what")

    assert again is not None
    again.close()
    other.close()


def test_ends_with_its_process(other_process: subprocess.Popen[str]) -> None:
    """A process that is killed leaves no claim behind."""
    assert other_process.stdout is not None
    assert other_process.stdout.readline() == "True\n"
    assert claim("what") is None
    other_process.kill()
    other_process.wait()

    claimed = claim("what")

    assert claimed is not None
    claimed.close()


def test_second_process(folder: Path) -> None:
    """Another process of this user and host does not get it."""
    claimed = claim("what")
    assert claimed is not None
    command = [sys.executable, "-c", CLAIM, str(folder)]
    other = subprocess.run(
        command, input="", capture_output=True, text=True, timeout=240, check=True
    )
    claimed.close()

    assert other.stdout == "False\n"


def test_kept_until_the_end(folder: Path) -> None:
    """A process that ends with a claim says nothing about it."""
    command = [sys.executable, "-X", "dev", "-c", f"{CLAIM}kept = [claimed]\n"]
    ended = subprocess.run(
        [*command, str(folder)],
        input="",
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )

    assert ended.stdout == "True\n"
    assert "unclosed" not in ended.stderr


@pytest.mark.parametrize("mode", [0o755, None])
def test_no_private_directory(folder: Path, mode: int | None) -> None:
    """A process that cannot find out reports; no other user's folder is used."""
    if mode is None:
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(mode)

    claims = [claim("what"), claim("what")]

    for claimed in claims:
        assert claimed is not None
        claimed.close()
    assert folder.is_file() or list(folder.iterdir()) == []
