"""Replaces the method with which torchrun's agent starts its workers.

Afterwards the agent answers for its workers (`diagnosis.ask.agent_responder`), and
serves their metrics. A torch without this method is not patched: then the agent does
neither.
"""

import functools
import sys
from contextlib import nullcontext
from typing import Any

from tracedstore import names
from tracedstore.diagnosis.ask.responder import AGENT_RESPONDER
from tracedstore.export import node_endpoint
from tracedstore.export.setup import try_to_configure
from tracedstore.recording.recorder import RECORDER

_MODULE = "torch.distributed.elastic.agent.server.local_elastic_agent"
_METHOD = "_start_workers"
# The class, torch's own method, and the one that replaces it.
_replaced: tuple[Any, Any, Any] | None = None


def replace() -> None:
    """Let agents of this process answer for the workers that they start."""
    global _replaced  # noqa: PLW0603 - torch is patched once per process
    # Not imported: a process that has not imported it is no agent of torchrun.
    module = sys.modules.get(_MODULE)
    agent = getattr(module, "LocalElasticAgent", None)
    original = vars(agent).get(_METHOD) if agent is not None else None
    if original is None or _replaced is not None:
        return

    @functools.wraps(original)
    def start_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = try_to_configure(names.DIAGNOSIS)
        with node_endpoint.announced() if on else nullcontext():
            started = original(self, *args, **kwargs)
        if on:
            processes = getattr(self, "_pcontext", None)
            RECORDER.failures.guarded(
                names.DIAGNOSIS, AGENT_RESPONDER.started, processes
            )
        return started

    setattr(agent, _METHOD, start_workers)
    _replaced = agent, original, start_workers


def restore() -> None:
    """Restore torch's own method."""
    global _replaced  # noqa: PLW0603 - torch is patched once per process
    if _replaced is None:
        return
    agent, original, ours = _replaced
    # Another library may have patched it since.
    if vars(agent).get(_METHOD) is ours:
        setattr(agent, _METHOD, original)
    _replaced = None
