"""Where a rank connects to: the address of its store, from the URL and environment."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from tracedstore.common.text import host_port
from tracedstore.diagnosis.connection.addresses import (
    AddressDefect,
    check_host,
    check_port,
)

# Set by torchrun for its workers.
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
# torch's default timeout of a process group.
_DEFAULT_TIMEOUT = 1800.0
# And of a store.
_STORE_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectTarget:
    """The store that a rank connects to.

    Attributes:
        host: The host, "" for a file.
        host_name: Where the host is from: ``MASTER_ADDR`` or ``the host of the URL``.
        port_text: The port, as it was given.
        port_name: Where the port is from.
        path: The path of a FileStore, "" for a TCPStore.
        rank: The rank; of an agent, its node rank. None if unknown.
        world_size: The number of ranks, None if unknown.
        timeout: Seconds that the constructor may take, by the caller's argument.
        serving: This process serves the store.
        agent_store: torchrun's agent serves the store.
        agents: The clients are torchrun's agents.
    """

    host: str = ""
    host_name: str = "MASTER_ADDR"
    port_text: str = ""
    port_name: str = "MASTER_PORT"
    path: str = ""
    rank: int | None = None
    world_size: int | None = None
    timeout: float = _DEFAULT_TIMEOUT
    serving: bool = False
    agent_store: bool = False
    agents: bool = False

    @property
    def port(self) -> int:
        """The port, 0 if it is not valid."""
        with suppress(ValueError):
            return int(self.port_text)
        return 0

    @property
    def server(self) -> str:
        """host:port, or the path."""
        return self.path or host_port(self.host, self.port_text)

    def check_spelling(self) -> AddressDefect | None:
        """Check the address without I/O; None if it can work."""
        if self.path:
            return None
        return check_host(self.host_name, self.host) or check_port(
            self.port_name, self.port_text, self.world_size
        )


def from_url(
    url: str, timeout: Any = None, environ: Mapping[str, str] = os.environ
) -> ConnectTarget | None:
    """Read the target of an init method as torch does; None for what torch rejects.

    Args:
        url: ``env://``, ``tcp://...`` or ``file://...``, with rank and world size in
            the query.
        timeout: The ``timeout`` argument of the rendezvous.
        environ: The environment, for ``env://``.
    """
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        port = parts.port
    except ValueError:
        return None
    from_environ = environ if parts.scheme == "env" else {}
    rank = _number(query.get("rank", from_environ.get("RANK")))
    world_size = _number(query.get("world_size", from_environ.get("WORLD_SIZE")))
    seconds = _DEFAULT_TIMEOUT
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    if parts.scheme == "file":
        return ConnectTarget(
            path=parts.path, rank=rank, world_size=world_size, timeout=math.inf
        )
    if parts.scheme == "tcp":
        agent_store = _agent_serves(environ, parts.hostname, port)
        return ConnectTarget(
            host=parts.hostname or "",
            host_name="the host of the URL",
            port_text="" if port is None else str(port),
            port_name="the port of the URL",
            rank=rank,
            world_size=world_size,
            timeout=seconds,
            serving=rank == 0 and not agent_store,
            agent_store=agent_store,
        )
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return None  # torch's error names the variable
    agent_store = environ.get(_AGENT_STORE) == str(True)
    return ConnectTarget(
        host=environ["MASTER_ADDR"],
        port_text=environ["MASTER_PORT"],
        rank=rank,
        world_size=world_size,
        timeout=seconds,
        serving=rank == 0 and not agent_store,
        agent_store=agent_store,
    )


def _agent_serves(environ: Mapping[str, str], host: str | None, port: object) -> bool:
    """Return whether torch expects a server of torchrun's agent at an address."""
    if environ.get(_AGENT_STORE) != str(True):
        return False
    # From torch 2.14 on only at the address that the agent has published.
    rendezvous = import_module("torch.distributed.rendezvous")
    if not hasattr(rendezvous, "_agent_store_serves"):
        return True
    published = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return published == (host, str(port))


def of_agent(
    host: Any = "", port: Any = 0, world_size: Any = None, *rest: Any, **others: Any
) -> ConnectTarget:
    """Return the target of the TCPStore of a static rendezvous, by its arguments."""
    names = ("is_master", "timeout")
    arguments = dict(zip(names, rest, strict=False)) | others
    timeout = arguments.get("timeout")
    return ConnectTarget(
        host=str(others.get("host_name", host)),
        host_name="the master address",
        port_text=str(port),
        port_name="the master port",
        world_size=world_size,
        timeout=timeout.total_seconds()
        if isinstance(timeout, timedelta)
        else _DEFAULT_TIMEOUT,
        serving=bool(arguments.get("is_master")),
        agents=True,
    )


def of_worker_store(host: Any, port: Any) -> ConnectTarget:
    """Return the target of the store that an agent serves to its workers.

    Port 0 is any free port, which the agent publishes later. The agent is the only
    client that it waits for.
    """
    return ConnectTarget(
        world_size=1,
        host=str(host),
        port_text=str(port),
        timeout=_STORE_TIMEOUT,
        serving=True,
        agents=True,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None
