"""Examines the server of a store that does not respond."""

import math
import os
import time
from functools import partial
from typing import Final

from tracedstore.common import causes
from tracedstore.common.causes import REMEDIES, Cause, probe_endpoint
from tracedstore.common.errors import error_message, error_type
from tracedstore.common.keys import shown
from tracedstore.common.timeouts import run_with_timeout
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.torch_keys import meaning
from tracedstore.recording.counters import Call

# Seconds for connecting once, name lookup included, and for which the result is used:
# a job that tries again must not wait for it each time.
_PROBE_TIMEOUT: Final = 1.0
_PROBE_VALID: Final = 10.0
_MAX_PROBED: Final = 64
_NETWORK_ERRORS: Final = ("torch.distributed.DistNetworkError",)

# When a server was probed, by ``time.monotonic``, and with which result.
_probed: dict[tuple[str, int], tuple[float, str]] = {}


def reset() -> None:
    """Forget the results, as a forked child must: a thread may have been writing."""
    _probed.clear()


def probe_server(host: str, port: int) -> str:
    """Connect once; return "" or why that failed, a constant of `common/causes`.

    Takes a second at most. The result is used again for 10 s.
    """
    now = time.monotonic()
    probed_at, result = _probed.get((host, port), (-math.inf, ""))
    if now - probed_at < _PROBE_VALID:
        return result
    try:
        result = run_with_timeout(_PROBE_TIMEOUT, partial(probe_endpoint, host, port))
    except TimeoutError:
        result = causes.NO_ANSWER
    if len(_probed) >= _MAX_PROBED:
        _probed.clear()
    _probed[host, port] = now, result
    return result


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
    cause, finding = _examine(
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


def _examine(host: str, port: int, *, responded: bool) -> tuple[Cause, str]:
    result = probe_server(host, port)
    if result == causes.REFUSED:
        return "server_gone", "it refuses connections: its process has ended"
    if result == causes.NO_ANSWER:
        return (
            "server_unreachable",
            f"connecting took longer than {_PROBE_TIMEOUT:g} s",
        )
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
