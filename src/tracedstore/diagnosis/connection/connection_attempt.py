"""Connects to a store's server once, step by step, and reports what happened.

torch's client has one message for all failures: "the client socket has timed out".
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tracedstore.common import causes, procfs
from tracedstore.common.causes import REMEDIES, Cause
from tracedstore.common.procfs import IPAddress
from tracedstore.diagnosis.connection import tcpstore_probe
from tracedstore.diagnosis.connection.addresses import (
    AddressDefect,
    check_lookup,
    check_served_here,
    is_local,
)
from tracedstore.diagnosis.connection.connect_target import ConnectTarget
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict

# Seconds for one connection, and for the server's answer to one request.
_STEP_TIMEOUT = 1.5
_MAX_ADDRESSES_TRIED = 2

PHASE: Final = "connecting to the store"
ANSWERED: Final = "answered"
# The server closed or reset the connection: it may be the TCPStore of a torch with
# another protocol, unless torch fails as well.
HUNG_UP: Final = "hung_up"
# Who holds the port matters then.
_NO_STORE: Final = (causes.SILENT, causes.FOREIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The result of one attempt to connect.

    Attributes:
        result: ANSWERED, HUNG_UP, or a cause of `common/causes`.
        addresses: What the host resolves to.
        defect: Why the address cannot work, if that is the case.
        holder: The process of this host that listens at the port, "" if unknown.
        joined: The number of clients that have joined, None if it was not read.
    """

    result: str
    addresses: tuple[IPAddress, ...] = ()
    defect: AddressDefect | None = None
    holder: str = ""
    joined: int | None = None

    @property
    def answered(self) -> bool:
        """Whether a store may be there."""
        return self.result in (ANSWERED, HUNG_UP)


def examine(target: ConnectTarget, environ: Mapping[str, str] = os.environ) -> Reach:
    """Resolve, connect and ask, in bounded time."""
    defect = target.check_spelling()
    if defect is not None:
        return Reach(result=causes.NAME_RESOLUTION, defect=defect)
    published = target.agents or "TORCHELASTIC_RUN_ID" in environ
    addresses, defect = check_lookup(target.host_name, target.host, published=published)
    if defect is not None:
        return Reach(result=causes.NAME_RESOLUTION, defect=defect)
    result, joined = causes.UNKNOWN, None
    for address in addresses[:_MAX_ADDRESSES_TRIED]:
        # Port 0 is any free port: which one is not known yet.
        if target.port:
            result, joined = _ask(str(address), target.port)
        if result == ANSWERED:
            break
    if result not in (ANSWERED, HUNG_UP) and target.serving:
        defect = check_served_here(target.host_name, target.host, addresses)
        if not target.port and defect is None:
            result = ANSWERED  # nothing is known to be wrong
    holder = ""
    if result in _NO_STORE and all(map(is_local, addresses)):
        found = procfs.port_holder(target.port)
        holder = "" if found is None else found.describe()
    return Reach(
        result=result,
        addresses=addresses,
        defect=defect,
        holder=holder,
        joined=joined,
    )


def count_joined(port: int) -> int | None:
    """Return how many clients have joined at a port of this host; None if unknown."""
    return _ask("127.0.0.1", port)[1]


def _ask(host: str, port: int) -> tuple[str, int | None]:
    """Connect and ask for the number of clients that have joined."""
    try:
        connection = socket.create_connection((host, port), _STEP_TIMEOUT)
    except OSError as error:
        return causes.classify(error) or causes.UNKNOWN, None
    with connection:
        try:
            is_tcpstore = tcpstore_probe.probe(connection)
        except TimeoutError:
            return causes.SILENT, None
        except OSError:
            return causes.CONNECTION_LOST, None
        if is_tcpstore is None:
            return HUNG_UP, None
        if not is_tcpstore:
            return causes.FOREIGN, None
        joined = None
        # A torch with another protocol may not answer this: its server is there.
        with suppress(OSError):
            joined = tcpstore_probe.joined_count(connection)
        return ANSWERED, joined


def verdict(
    target: ConnectTarget, reach: Reach, waited_seconds: float
) -> Verdict | None:
    """Return why the store cannot be reached; None if it answers.

    A server that answers has not failed: this rank is slow, or its turn has not come.
    """
    if reach.defect is not None:
        return from_defect(target, reach.defect, waited_seconds)
    if reach.answered:
        return _agents_absent(target, reach, waited_seconds)
    shown = ", ".join(map(str, reach.addresses[:_MAX_ADDRESSES_TRIED]))
    failure = causes.failure_of(reach.result)
    sentence = failure.finding.format(
        server=target.server, here=socket.gethostname(), somaxconn=procfs.max_backlog()
    )
    evidence = [sentence]
    if shown != target.host:
        evidence.insert(0, f"{target.host_name} {target.host!r} resolves to {shown}")
    if reach.holder:
        evidence.append(f"the port is held by {reach.holder}")
    evidence.append(f"torch has tried for {waited_seconds:.0f} s")
    refused = reach.result == causes.REFUSED
    cause: Cause = "server_unreachable"
    remedy = failure.remedy or REMEDIES[cause]
    known = sentence
    awaited: tuple[AwaitedRank, ...] = ()
    if target.agent_store and refused:
        cause = "server_gone"
        known = f"the store of torchrun's agent at {target.server} has ended"
        remedy = (
            "read the log of the agent of node rank 0; if that node was replaced, the"
            " address is of an earlier round"
        )
    elif refused and not target.agents:
        doing = f"does not listen at {target.server}"
        awaited = (AwaitedRank(rank=0, cause=cause, doing=doing),)
    return Verdict(
        phase=PHASE,
        cause=cause,
        awaited=awaited,
        awaited_ranks=tuple(one.rank for one in awaited),
        known=known,
        waiting_ranks=() if target.rank is None else (target.rank,),
        waited_seconds=waited_seconds,
        evidence=tuple(evidence),
        remedy=remedy,
        agents=target.agents,
        time=time.time(),
    )


def _agents_absent(
    target: ConnectTarget, reach: Reach, waited_seconds: float
) -> Verdict | None:
    """Count the agents that have not joined; only their number is known."""
    size, joined = target.world_size or 0, reach.joined
    if not (target.agents and target.serving and joined is not None and joined < size):
        return None
    return Verdict(
        phase=PHASE,
        cause="unknown",
        known=f"{joined} of {size} agents have connected to {target.server}",
        waiting_ranks=() if target.rank is None else (target.rank,),
        waited_seconds=waited_seconds,
        evidence=("agents of a static rendezvous do not register",),
        remedy="check that torchrun was started on every node, with this endpoint",
        agents=True,
        time=time.time(),
    )


def from_defect(
    target: ConnectTarget, defect: AddressDefect, waited_seconds: float = 0.0
) -> Verdict:
    """Return the verdict on an address that cannot work."""
    return Verdict(
        phase=PHASE,
        cause="address",
        known=defect.finding,
        waiting_ranks=() if target.rank is None else (target.rank,),
        waited_seconds=waited_seconds,
        remedy=defect.remedy,
        agents=target.agents,
        time=time.time(),
    )


def port_in_use(target: ConnectTarget) -> Verdict:
    """Return who holds the port that this process should serve at."""
    found = procfs.port_holder(target.port)
    here = socket.gethostname()
    who = "a process that is not visible here" if found is None else found.describe()
    rank = target.rank or 0
    cause: Cause = "address"
    remedy = f"end that process, or set {target.port_name} to another port"
    evidence = [f"port {target.port} of {here} is held by {who}"]
    awaited: tuple[AwaitedRank, ...] = ()
    if found is not None and found.pid == os.getpid():
        evidence.append("that is this process, which has a server at this port already")
        remedy = f"release the earlier store, or set {target.port_name} to another port"
    elif found is not None and found.is_rank(rank, target.port):
        cause = "duplicate"
        remedy = REMEDIES[cause]
        doing = f"also started as pid {os.getpid()} on {here}"
        evidence.append(f"that process was started as rank {rank} with the same port")
        awaited = (
            AwaitedRank(rank=rank, host=here, pid=found.pid, cause=cause, doing=doing),
        )
    return Verdict(
        phase=PHASE,
        cause=cause,
        awaited=awaited,
        awaited_ranks=tuple(one.rank for one in awaited),
        known=f"rank {rank} cannot serve the store: port {target.port} is in use",
        waiting_ranks=() if target.rank is None else (target.rank,),
        evidence=tuple(evidence),
        remedy=remedy,
        agents=target.agents,
        time=time.time(),
    )
