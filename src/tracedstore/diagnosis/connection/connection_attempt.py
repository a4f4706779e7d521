"""Connects to a store's server once, step by step, and reports what happened.

torch's client has one message for all failures: "the client socket has timed out".
Importing torch takes seconds, and its client may wait without end for a server that
does not answer, so the requests are our own.

A torch client begins with two requests: VALIDATE, and PING with a number that the
server echoes. A server that echoes it is a TCPStore. The server keeps nothing of either
request. A test compares these requests with those of the installed torch.
"""

import math
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tracedstore.common import causes, procfs
from tracedstore.common.causes import REMEDIES, Cause, probe_endpoint
from tracedstore.common.errors import error_message, error_type
from tracedstore.common.identity import (
    ProcessIdentity,
    number,
    process_identity,
)
from tracedstore.common.keys import shown
from tracedstore.common.procfs import IPAddress
from tracedstore.common.text import printable
from tracedstore.common.threads import pause, run_with_timeout
from tracedstore.diagnosis.connection.addresses import (
    AddressDefect,
    ConnectTarget,
    check_lookup,
    check_served_here,
    is_local,
)
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe.torch_keys import meaning, shown_phase
from tracedstore.local.facts import LocalIdentity
from tracedstore.local.sockets import ask_processes
from tracedstore.recording.counters import Call

# VALIDATE (0) with torch's magic number, PING (13) with ours.
_NONCE = 0x74726163
_PROBE_REQUEST = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, _NONCE)
_PROBE_RESPONSE = struct.pack("=I", _NONCE)
# HTTP, SSH, Redis and mail servers answer in text.
_TEXT = re.compile(rb"[\t\r\n\x20-\x7e]+")
# The server counts clients under this key, which torch's own methods cannot address.
_JOINED_KEY = b"init/"
# ADD (4) of 0 to it; the response is the sum.
_JOINED_REQUEST = struct.pack(f"=BQ{len(_JOINED_KEY)}sq", 4, 5, _JOINED_KEY, 0)
_JOINED_RESPONSE = struct.Struct("=q")
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
# Seconds for connecting once, name lookup included, and for which the result of a probe
# is used that took so long: a job that tries again must not wait for it each time.
_PROBE_TIMEOUT: Final = 1.0
_PROBE_VALID: Final = 10.0
_MAX_PROBED: Final = 64
# Variables with the number of the node, of torchrun, Slurm and others.
_NODE_RANKS: Final = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
# Seconds for the process that holds a port to answer who it is.
_HOLDER_TIMEOUT: Final = 0.5
# Seconds after which a server that accepts connections after an error is probed again:
# a process that is being killed closes its sockets one after the other.
_PROBE_AGAIN: Final = 0.1
_NETWORK_ERRORS: Final = ("torch.distributed.DistNetworkError",)

# When a server was probed that did not answer, by ``time.monotonic``.
_unanswered: dict[tuple[str, int], float] = {}


def probe_tcpstore(connection: socket.socket) -> bool | None:
    """Return whether a TCPStore server answers; None if only torch can tell.

    A server that closes the connection, or answers with other bytes than text, may be
    the TCPStore of a torch with other requests.

    Blocks until the server answers or hangs up, or the connection times out.
    """
    received = b""
    with suppress(ConnectionError):
        connection.sendall(_PROBE_REQUEST)
        received = _receive(connection, len(_PROBE_RESPONSE))
    if received == _PROBE_RESPONSE:
        return True
    return False if _TEXT.fullmatch(received) else None


def joined_count(connection: socket.socket) -> int:
    """Return how many clients of the job have joined, as torch's message counts them.

    Only after `probe`, which begins the conversation.

    Raises:
        OSError: The server does not answer in time, or hung up.
    """
    connection.sendall(_JOINED_REQUEST)
    response = _receive(connection, _JOINED_RESPONSE.size)
    if len(response) < _JOINED_RESPONSE.size:
        raise ConnectionError("the server hung up")
    (count,) = _JOINED_RESPONSE.unpack(response)
    return int(count)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes; fewer if the server hangs up."""
    received = b""
    while len(received) < size:
        if not (more := connection.recv(size - len(received))):
            break
        received += more
    return received


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionAttempt:
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


def connect_once(
    target: ConnectTarget, environ: Mapping[str, str] = os.environ
) -> ConnectionAttempt:
    """Resolve, connect and ask, in bounded time."""
    defect = target.check_spelling()
    if defect is not None:
        return ConnectionAttempt(result=causes.NAME_RESOLUTION, defect=defect)
    published = target.agents or "TORCHELASTIC_RUN_ID" in environ
    addresses, defect = check_lookup(target.host_name, target.host, published=published)
    if defect is not None:
        return ConnectionAttempt(result=causes.NAME_RESOLUTION, defect=defect)
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
    return ConnectionAttempt(
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
            is_tcpstore = probe_tcpstore(connection)
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
            joined = joined_count(connection)
        return ANSWERED, joined


def verdict_on(
    target: ConnectTarget, attempt: ConnectionAttempt, waited_seconds: float
) -> Verdict | None:
    """Return why the store cannot be reached; None if it answers.

    A server that answers has not failed: this rank is slow, or its turn has not come.
    """
    if attempt.defect is not None:
        return from_defect(target, attempt.defect)
    if attempt.answered:
        return _agents_absent(target, attempt)
    shown = ", ".join(map(str, attempt.addresses[:_MAX_ADDRESSES_TRIED]))
    failure = causes.failure_of(attempt.result)
    sentence = failure.finding.format(
        server=target.server, here=socket.gethostname(), somaxconn=procfs.max_backlog()
    )
    evidence = [sentence]
    if shown != target.host:
        evidence.insert(0, f"{target.host_name} {target.host!r} resolves to {shown}")
    if attempt.holder:
        evidence.append(f"the port is held by {attempt.holder}")
    own_address = _own_address(target, attempt)
    if own_address is not None:
        return from_defect(target, own_address)
    evidence.append(f"torch has tried for {waited_seconds:.0f} s")
    refused = attempt.result == causes.REFUSED
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
    return _verdict(
        target, cause, awaited, known=known, evidence=tuple(evidence), remedy=remedy
    )


def _own_address(
    target: ConnectTarget, attempt: ConnectionAttempt
) -> AddressDefect | None:
    """Return that a rank of another node than the first has its own node's address."""
    rank = target.rank or 0
    nodes = (number(os.environ.get(name)) for name in _NODE_RANKS)
    # Where rank 0 runs, it is local rank 0. Ranks need not be numbered node by node.
    is_elsewhere = process_identity().local_rank == 0 or any(nodes)
    if not (rank and is_elsewhere and attempt.addresses) or target.agents:
        return None
    if attempt.result != causes.REFUSED:
        return None
    if any(one.is_loopback or not is_local(one) for one in attempt.addresses):
        return None
    here = socket.gethostname()
    return AddressDefect(
        name=target.host_name,
        value=target.host,
        defect=f"it is an address of {here} itself, where rank {rank} runs, and rank 0"
        " does not",
        remedy=f"set {target.host_name} to the address of the machine of rank 0, the"
        " same on all nodes",
    )


def _verdict(
    target: ConnectTarget,
    cause: Cause,
    awaited: tuple[AwaitedRank, ...] = (),
    **fields: Any,
) -> Verdict:
    return Verdict(
        phase=PHASE,
        cause=cause,
        awaited=awaited,
        awaited_ranks=tuple(one.rank for one in awaited),
        waiting_ranks=() if target.rank is None else (target.rank,),
        agents=target.agents,
        time=time.time(),
        **fields,
    )


def _agents_absent(target: ConnectTarget, attempt: ConnectionAttempt) -> Verdict | None:
    """Count the agents that have not joined; only their number is known."""
    size, joined = target.world_size or 0, attempt.joined
    if not (target.agents and target.serving and joined is not None and joined < size):
        return None
    return _verdict(
        target,
        "unknown",
        known=f"{joined} of {size} agents have connected to {target.server}",
        evidence=("agents of a static rendezvous do not register",),
        remedy="check that torchrun was started on every node, with this endpoint",
    )


def from_defect(target: ConnectTarget, defect: AddressDefect) -> Verdict:
    """Return the verdict on an address that cannot work."""
    return _verdict(target, "address", known=defect.finding, remedy=defect.remedy)


def port_in_use(target: ConnectTarget) -> Verdict:
    """Return who holds the port that this process should serve at."""
    found = procfs.port_holder(target.port)
    here = socket.gethostname()
    who = "a process that is not visible here" if found is None else found.describe()
    rank = target.rank or 0
    cause: Cause = "address"
    # Whatever it is, it may be healthy: nothing is said about ending it.
    remedy = f"set {target.port_name} to another port"
    evidence = [f"port {target.port} of {here} is held by {who}"]
    awaited: tuple[AwaitedRank, ...] = ()
    if found is not None and found.pid == os.getpid():
        evidence.append("that is this process, which has a server at this port already")
        remedy = f"release the earlier store, or set {target.port_name} to another port"
    elif found is not None and (job := _other_job_of(found)):
        evidence.append(f"that process belongs to another job: {job}")
    elif found is not None and _is_same_rank(found, rank, target.port):
        cause = "duplicate"
        remedy = REMEDIES[cause]
        doing = f"also started as pid {os.getpid()} on {here}"
        evidence.append(f"that process was started as rank {rank} with the same port")
        awaited = (
            AwaitedRank(rank=rank, host=here, pid=found.pid, cause=cause, doing=doing),
        )
    return _verdict(
        target,
        cause,
        awaited,
        known=f"rank {rank} cannot serve the store: port {target.port} is in use",
        evidence=tuple(evidence),
        remedy=remedy,
    )


def _other_job_of(found: procfs.PortHolder) -> str:
    """Describe the job of a process if it is another one than this; else "".

    Jobs are told apart by their run ids, and without these by the number of ranks.
    """
    theirs, own = ProcessIdentity.from_environment(found.environ), process_identity()
    rank = "a process" if theirs.rank is None else f"rank {theirs.rank}"
    if theirs.run_id and own.run_id and theirs.run_id != own.run_id:
        text = f"{rank} of run {theirs.run_id!r}; this is run {own.run_id!r}"
        return printable(text)
    if theirs.world_size and own.world_size and theirs.world_size != own.world_size:
        return f"{rank} of {theirs.world_size}; this job has {own.world_size} ranks"
    return ""


def _is_same_rank(found: procfs.PortHolder, rank: int, port: int) -> bool:
    """Return whether a process was started as this rank, or answers that it is.

    A forked process has the variables of its parent in /proc, and its own only for
    those that ask it.
    """
    if found.pid is None or found.is_rank(rank, port):
        return found.pid is not None
    reply = ask_processes([found.pid], "status", _HOLDER_TIMEOUT).get(found.pid)
    if reply is None or reply.identity.rank != rank:
        return False
    return reply.identity.same_job(LocalIdentity.own())


def reset() -> None:
    """Forget the results, as a forked child must: a thread may have been writing."""
    _unanswered.clear()


def probe_server(host: str, port: int) -> str:
    """Connect once; return "" or why that failed, a constant of `common/causes`.

    Takes a second at most. Only that it took so long is used again, for 10 s: any other
    result is of now.
    """
    return _probe(host, port)[0]


def _probe(host: str, port: int) -> tuple[str, float]:
    """Return the result of `probe_server`, and its age in seconds."""
    now = time.monotonic()
    age = now - _unanswered.get((host, port), -math.inf)
    if age < _PROBE_VALID:
        return causes.NO_ANSWER, age
    try:
        result = run_with_timeout(_PROBE_TIMEOUT, partial(probe_endpoint, host, port))
    except TimeoutError:
        result = causes.NO_ANSWER
    if result == causes.NO_ANSWER:
        if len(_unanswered) >= _MAX_PROBED:
            _unanswered.clear()
        _unanswered[host, port] = time.monotonic()
    else:
        _unanswered.pop((host, port), None)
    return result, 0.0


def examine_server(call: Call, error: BaseException | None) -> Verdict | None:
    """Return a verdict on the server of a call's store; None if it is not at fault.

    Args:
        call: The call.
        error: The exception that ended the call; None if the call lasts and the server
            does not respond.
    """
    method, state, args, _, _ = call
    identity = state.identity
    if identity.port is None:
        return None
    if error is not None and error_type(error) not in _NETWORK_ERRORS:
        return None
    keys = shown(method.keys_of(args)[0])
    known = meaning(keys[0]) if keys else None
    cause, finding = _server_cause(
        identity.address, identity.port, responded=error is not None
    )
    evidence = [finding]
    if error is not None:
        evidence.append(error_message(error))
    return Verdict(
        phase=shown_phase(known)
        if known
        else f"key {keys[0]}"
        if keys
        else method.name,
        cause=cause,
        known=f"the store's server {identity.server}{_served_by(identity.port)}",
        key=keys[0] if keys else "",
        evidence=tuple(evidence),
        remedy=REMEDIES[cause],
        time=time.time(),
    )


def _server_cause(host: str, port: int, *, responded: bool) -> tuple[Cause, str]:
    result, age = _probe(host, port)
    if not result and responded and pause(_PROBE_AGAIN):
        result, age = _probe(host, port)
    if result == causes.REFUSED:
        return "server_gone", "it refuses connections: its process has ended"
    if result == causes.NO_ANSWER:
        when = f", {age:.0f} s before" if age >= 1 else ""
        finding = f"connecting took longer than {_PROBE_TIMEOUT:g} s{when}"
        return "server_unreachable", finding
    if result:
        return "server_unreachable", f"connecting failed: {result}"
    if responded:
        return "server_gone", "it closed the connection, and accepts new ones"
    return "server_unreachable", "it accepts connections, but does not respond"


def _served_by(port: int) -> str:
    """Return which process serves a port, as far as torch's launchers determine it."""
    if os.environ.get("MASTER_PORT") != str(port):
        return ""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return ", which torchrun's agent on that host serves"
    return " at MASTER_PORT, which rank 0 serves unless the program does"
