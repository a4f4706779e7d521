"""Examines the server of a store that does not respond."""

import os
import socket
import time
from typing import Final

from tracedstore.core.counters import Call
from tracedstore.core.errors import error_message, error_type
from tracedstore.core.keys import shown
from tracedstore.diagnosis.torch_keys import meaning
from tracedstore.diagnosis.verdict import REMEDIES, Cause, Verdict

_CONNECT_TIMEOUT: Final = 2.0
_NETWORK_ERRORS: Final = ("torch.distributed.DistNetworkError",)


def check_reachable(host: str, port: int) -> None:
    """Connect to a server and close the connection.

    Raises:
        OSError: That fails, or takes longer than 2 s.
    """
    socket.create_connection((host, port), _CONNECT_TIMEOUT).close()


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
    cause, finding = _probe(
        identity.address, identity.port, responded=error is not None
    )
    evidence = [finding]
    if error is not None:
        evidence.append(error_message(error))
    return Verdict(
        phase=known.phase if known else f"key {keys[0]}" if keys else method.name,
        cause=cause,
        known=f"the store's server {identity.server}{_served_by(identity.port)}",
        key=keys[0] if keys else "",
        evidence=tuple(evidence),
        remedy=REMEDIES[cause],
        time=time.time(),
    )


def _probe(host: str, port: int, *, responded: bool) -> tuple[Cause, str]:
    try:
        check_reachable(host, port)
    except ConnectionRefusedError:
        return "server_gone", "it refuses connections: its process has ended"
    except TimeoutError:
        return (
            "server_unreachable",
            f"connecting took longer than {_CONNECT_TIMEOUT:g} s",
        )
    except OSError as error:
        return "server_unreachable", f"connecting failed: {error}"
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
