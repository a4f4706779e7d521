"""The instrumentor that ``opentelemetry-instrument`` loads through its entry point.

Every Python process below that command loads this module, so it does not import torch.
Its dependency is in the extra ``tracedstore[instrument]``.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tracedstore.auto import patches

if TYPE_CHECKING:

    class BaseInstrumentor:
        """OpenTelemetry's class, which has no type annotations."""

        instrument: Callable[..., None]
        uninstrument: Callable[..., None]
else:
    try:
        from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
    except Exception:  # without the extra, nothing loads the entry point
        BaseInstrumentor = object

# Not meter_provider: metrics go to the Prometheus registry, and by OTLP.
_PROVIDERS = ("tracer_provider", "logger_provider")


class TracedStoreInstrumentor(BaseInstrumentor):
    """Traces the stores of ``torch.distributed``; see `tracedstore.instrument`."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the instrumented package, with its versions."""
        return ("torch >= 2.10",)

    def _instrument(self, **kwargs: Any) -> None:
        given = {name: kwargs[name] for name in _PROVIDERS if kwargs.get(name)}
        if given:
            # configure() imports torch, so only a caller with a provider pays for it.
            from tracedstore.export.setup import configure  # noqa: PLC0415

            configure(**given)
        patches.instrument()

    def _uninstrument(self, **_kwargs: Any) -> None:
        patches.uninstrument()
