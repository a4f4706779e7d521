"""The same for ``opentelemetry-instrument``, which finds this by its entry point.

It is loaded by every Python process below that command, so it imports no torch. The
extra ``tracedstore[instrument]`` has what it needs.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tracedstore.auto import patches

if TYPE_CHECKING:

    class BaseInstrumentor:
        """Theirs, which hides its types."""

        instrument: Callable[..., None]
        uninstrument: Callable[..., None]
else:
    try:
        from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
    except Exception:  # without the extra nobody asks for it
        BaseInstrumentor = object


class TracedStoreInstrumentor(BaseInstrumentor):
    """Traces the stores of ``torch.distributed``; see `tracedstore.instrument`."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Name what is instrumented."""
        return ("torch >= 2.6",)

    def _instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider")
        if provider is not None:
            # Only who has a provider of his own pays for torch at once.
            from tracedstore.export.setup import configure  # noqa: PLC0415

            configure(tracer_provider=provider)
        patches.instrument()

    def _uninstrument(self, **_kwargs: Any) -> None:
        patches.uninstrument()
