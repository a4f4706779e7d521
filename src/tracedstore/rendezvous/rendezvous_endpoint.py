"""The endpoint of a rendezvous: its address, and which agent serves it."""

from contextlib import suppress

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from tracedstore import names
from tracedstore.diagnosis.connection.addresses import describe_own
from tracedstore.recording.recorder import RECORDER
from tracedstore.rendezvous.rendezvous_telemetry import JoinAttempt


def host_hint(params: RendezvousParameters, where: tuple[str, int] | None) -> str:
    """Return why this agent does not serve the endpoint; "" if it should.

    The c10d store is served by the agent whose machine has the name or an address of
    the endpoint. If no agent has, all of them wait for one that does not exist.
    """
    is_c10d = params.backend.removeprefix("traced-") == "c10d"
    if not is_c10d or where is None:
        return ""
    # Private to torch, and only the hint needs it.
    from torch.distributed.elastic.rendezvous.utils import (  # noqa: PLC0415
        _matches_machine_hostname,
    )

    host = where[0]
    if params.get_as_bool("is_host", _matches_machine_hostname(host)):
        return ""
    chosen = "is_host is false in --rdzv-conf"
    if params.get("is_host") is None:
        chosen = f"no name or address of it matches {host!r}"
    return (
        f"this agent does not serve the endpoint, because {chosen} ({describe_own()});"
        " if it should, pass --rdzv-conf is_host=1, or use one of these as the endpoint"
    )


def host_and_port(params: RendezvousParameters, port: int) -> tuple[str, int] | None:
    """Return host and port of an endpoint; None for a path."""
    if str(params.get("store_type", "tcp")).strip().lower() == "file":
        return None
    with suppress(ValueError):  # torch raises for it
        return parse_rendezvous_endpoint(params.endpoint, default_port=port)
    return None


def seconds_of(params: RendezvousParameters, name: str, default: float) -> float:
    """Return a parameter in seconds."""
    with suppress(TypeError, ValueError):
        return float(params.get(name))
    return default


def connecting_attempt(
    params: RendezvousParameters, where: tuple[str, int] | None, started: int
) -> JoinAttempt:
    """Return the attempt of an agent that has no backend yet."""
    waited = (RECORDER.ticks() - started) / 1e9
    hint = RECORDER.failures.guarded(names.RENDEZVOUS, host_hint, params, where)
    return JoinAttempt(
        backend=params.backend.removeprefix("traced-"),
        run_id=params.run_id,
        endpoint=params.endpoint,
        during="create_backend",
        waited_seconds=waited,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        where=where,
        hint=hint or "",
    )
