"""Where a rank connects to, and whether that address can work.

The spelling is checked before torch connects, without I/O. The lookups run only when a
connection does not succeed, and are bounded in time.
"""

import ipaddress
import math
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from tracedstore.common import procfs
from tracedstore.common.keys import key_text
from tracedstore.common.procfs import IPAddress
from tracedstore.common.text import host_port
from tracedstore.common.threads import run_with_timeout
from tracedstore.common.validation import MAX_PORT
from tracedstore.naming.decoders import quoted

_LOOKUP_TIMEOUT = 3.0
_MAX_OWN_ADDRESSES = 16
# getfqdn() returns such a name after a reverse lookup; mostly it does not resolve.
_REVERSE_NAMES: Final = (".ip6.arpa", ".in-addr.arpa")
# Set by torchrun for its workers.
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
# torch's default timeout of a process group.
_DEFAULT_TIMEOUT = 1800.0
# And of a store.
_STORE_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class AddressDefect:
    """Why an address cannot work.

    Attributes:
        name: Where the value is from: ``MASTER_ADDR``, ``the port of the URL``.
        value: The value.
        defect: What is wrong with it.
        remedy: What to do.
    """

    name: str
    value: str
    defect: str
    remedy: str

    @property
    def finding(self) -> str:
        """The value and the defect: ``MASTER_ADDR is ' a': it begins with a blank``."""
        return f"{self.name} is {quoted(key_text(self.value))}: {self.defect}"

    def __str__(self) -> str:
        return f"{self.finding}; {self.remedy}"


def check_host(name: str, value: str) -> AddressDefect | None:
    """Check the spelling of a host name or address; None if it can work."""
    bare = value.strip()
    if not bare:
        defect, remedy = "it is empty", f"set {name} to the host of rank 0"
    elif bare != value:
        defect = "it has white space around it, which name lookups do not accept"
        remedy = f"set {name} to {quoted(bare)}"
    elif value.startswith("[") or value.endswith("]"):
        defect = "it has brackets, which name lookups do not accept"
        remedy = f"set {name} to {quoted(value.strip('[]'))}"
    elif "/" in value:
        defect = "it is a URL or a path, not a host"
        host = value.rpartition("://")[2].partition("/")[0]
        remedy = f"set {name} to {quoted(host)}"
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
        defect = "it has a port, which is no part of a host name"
        remedy = f"set {name} to {quoted(host)} and the port to {quoted(port)}"
    elif any(character.isspace() or not character.isprintable() for character in value):
        defect = "it has white space or control characters in it"
        remedy = f"correct {name}"
    else:
        return None
    return AddressDefect(name, value, defect, remedy)


def check_port(name: str, value: str, world_size: int | None) -> AddressDefect | None:
    """Check the spelling of a port; None if it can work.

    Args:
        name: Where the value is from.
        value: The port, as text.
        world_size: The number of ranks: one rank alone may use port 0.
    """
    try:
        port = int(value)
    except ValueError:
        defect = "it is not a number"
    else:
        if 0 < port <= MAX_PORT or (port == 0 and world_size == 1):
            return None
        defect = f"ports are 1 to {MAX_PORT}"
        if port == 0:
            defect = (
                "rank 0 listens at any free port then, and the others cannot know it"
            )
    return AddressDefect(
        name, value, defect, f"set {name} to a free port of rank 0's host"
    )


def resolve(host: str) -> tuple[IPAddress, ...]:
    """Look a name up, within a timeout.

    Raises:
        socket.gaierror: There is no such name, or no name server.
        TimeoutError: The name server does not answer in time.
    """
    found = run_with_timeout(
        _LOOKUP_TIMEOUT, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )
    addresses = (str(info[4][0]).partition("%")[0] for info in found)
    return tuple(dict.fromkeys(map(ipaddress.ip_address, addresses)))


def check_lookup(
    name: str, host: str, *, published: bool
) -> tuple[tuple[IPAddress, ...], AddressDefect | None]:
    """Look a host up; return its addresses, or why there are none.

    Args:
        name: Where the host is from.
        host: The host.
        published: The torchrun agent of node rank 0 chose the host.
    """
    remedy = f"make the name known to the name servers of {socket.gethostname()}"
    if published:
        remedy = (
            "pass --local-addr with an address that all nodes can reach to torchrun on"
            " the node of rank 0, which published this one"
        )
    elif name == "MASTER_ADDR":
        remedy += ", or set MASTER_ADDR to an IP address"
    try:
        return resolve(host), None
    except TimeoutError:
        defect = f"its name lookup does not end within {_LOOKUP_TIMEOUT:g} s"
    except socket.gaierror as error:
        defect = (
            f"it does not resolve on {socket.gethostname()}"
            f" (gai error {error.errno}: {error.strerror})"
        )
        if host.rstrip(".").endswith(_REVERSE_NAMES):
            defect = f"it is the name of a reverse lookup, and {defect[3:]}"
    except (OSError, UnicodeError):
        defect = "it is not a name that can be looked up"
    return (), AddressDefect(name, host, defect, remedy)


def is_local(address: IPAddress) -> bool:
    """Return whether an address is one of this machine's."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004 - IPv4
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel binds only to its own addresses.
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def check_served_here(
    name: str, host: str, addresses: Iterable[IPAddress]
) -> AddressDefect | None:
    """Check that this machine, which serves the store, has one of the addresses."""
    found = list(addresses)
    if any(map(is_local, found)):
        return None
    shown = ", ".join(map(str, found))
    return AddressDefect(
        name,
        host,
        f"it resolves to {shown}, which is not an address of {socket.gethostname()},"
        f" where rank 0 runs and serves the store ({describe_own()})",
        f"set {name} to an address of the host of rank 0, or start rank 0 on {host}",
    )


def own_addresses() -> list[str]:
    """List the IP addresses of this machine, loopback and link-local ones excluded."""
    return [
        str(address)
        for address in procfs.interface_addresses()
        if not (address.is_loopback or address.is_link_local)
    ]


def describe_own() -> str:
    """Describe this machine's name and addresses in a few words."""
    addresses = own_addresses()
    shown = ", ".join(addresses[:_MAX_OWN_ADDRESSES]) or "only loopback addresses"
    if more := len(addresses) - _MAX_OWN_ADDRESSES:
        shown += f" and {more} more" if more > 0 else ""
    return f"this machine is {socket.gethostname()}, with {shown}"


def describe_comparison(host: str) -> str:
    """Describe why torch takes an endpoint for that of another machine.

    It compares the endpoint with this machine's name, and with what that resolves to,
    and not with the addresses of its interfaces. In Debian the name is 127.0.1.1.
    """
    here = socket.gethostname()
    found: list[str] = []
    with suppress(OSError, ValueError):
        infos = socket.getaddrinfo(here, None, proto=socket.IPPROTO_TCP)
        found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    resolved = ", ".join(found[:_MAX_OWN_ADDRESSES]) or "nothing"
    text = (
        f"torch compares {quoted(key_text(host))} with the name {here} and what that"
        f" resolves to, which is {resolved}"
    )
    if host in own_addresses():
        text += f"; {host} is an address of this machine all the same"
    return text


def spans_hosts(environ: Mapping[str, str]) -> bool:
    """Return whether the job has ranks on other nodes, by the launcher's variables.

    Two nodes may be one host, as in tests with several agents.
    """
    try:
        return int(environ["WORLD_SIZE"]) > int(environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return False


def check_loopback(
    name: str,
    host: str,
    addresses: Iterable[IPAddress],
    environ: Mapping[str, str],
) -> AddressDefect | None:
    """Check that the address of a job with several nodes is not loopback."""
    found = list(addresses)
    unusable = [a for a in found if a.is_loopback or a.is_unspecified]
    if not (found and len(unusable) == len(found) and spans_hosts(environ)):
        return None
    return AddressDefect(
        name,
        host,
        f"it leads each host to itself ({unusable[0]}), and the job has ranks on other"
        " nodes",
        f"set {name} to the name or address by which other hosts reach rank 0's host",
    )


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

    @property
    def url(self) -> str:
        """Its address as ``--store`` takes it."""
        return f"file://{self.path}" if self.path else f"tcp://{self.server}"

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
