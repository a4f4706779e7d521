"""Makes the spans that are late before a TracerProvider is flushed.

The spans of completed barriers are made a moment after the call. An application that
flushes its provider means them too. Nothing of its provider is replaced for that: a
provider has a list of span processors, and this is one more.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

from opentelemetry.sdk.trace import SpanProcessor

from tracedstore import names
from tracedstore.recording.recorder import RECORDER

# Seconds for making the spans.
_TIMEOUT = 1.0


class LateSpans(SpanProcessor):
    """A span processor that does nothing with spans, and makes late ones at a flush.

    Args:
        flush: Makes the spans, within a number of seconds.
        provider: The provider that it is added to. Not kept alive.
    """

    def __init__(self, flush: Callable[[float], object], provider: Any) -> None:
        self._make = flush
        self._provider = ref(provider)
        self._flushes = False

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Make the late spans, and flush the provider again if it was flushed before.

        A provider flushes its processors in the order in which they were added. The
        application's come first, mostly, and have got the late spans only now.
        """
        provider = self._provider()
        if self._flushes or provider is None:
            return True
        RECORDER.failures.guarded(names.SPANS, self._make, _TIMEOUT)
        self._flushes = True
        try:
            return bool(provider.force_flush(timeout_millis))
        finally:
            self._flushes = False

    def shutdown(self) -> None:
        """Make the late spans, for processors that are shut down after this one."""
        RECORDER.failures.guarded(names.SPANS, self._make, _TIMEOUT)
