"""Adds the metrics to what the readers of an application's MeterProvider collect.

The SDK for Python has no MetricProducer, by which a reader would get metrics that are
aggregated elsewhere. So the metrics are added where a reader receives what it has
collected: `MetricReader._receive_metrics`, which every reader implements. A gauge, made
with the API alone, has a callback that finds the readers: it runs in each collection,
also of a provider that is set late and of a reader that is added late, and before the
reader receives anything.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.util.types import AttributeValue

from tracedstore import names, otel_names
from tracedstore._version import __version__
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.identity import process_identity
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.snapshot import MetricSource
from tracedstore.signals.spans import process_attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader, MetricsData

    from tracedstore.signals.otel_metrics import MetricStream, Temporality

# It serves a Prometheus registry, which has these metrics already, by their own names.
_SERVES_PROMETHEUS = "PrometheusMetricReader"
_GLOBAL = None


def has_provider() -> bool:
    """Return whether the application has set a MeterProvider."""
    return "Proxy" not in type(metrics.get_meter_provider()).__name__


class MeterReaders:
    """The readers of the application's MeterProvider.

    What each reader has been given is kept over a `configure`, as the counts are.
    """

    def __init__(self) -> None:
        self._source: MetricSource | None = None
        self._given: MeterProvider | None = None
        self._streams: WeakKeyDictionary[Any, MetricStream] = WeakKeyDictionary()
        # Providers that have the gauge; None is the global one, set or not.
        self._gauges: list[ref[MeterProvider] | None] = []
        self._unusable = False

    def start(self, source: MetricSource, given: MeterProvider | None) -> None:
        """Add metrics to what the readers of the given, or global, provider collect."""
        self._source, self._given, self._unusable = source, given, False
        of_provider = _GLOBAL if given is None else ref(given)
        if of_provider in self._gauges:
            return
        self._gauges.append(of_provider)
        provider = metrics.get_meter_provider() if given is None else given
        meter = provider.get_meter(
            names.SCOPE, __version__, schema_url=otel_names.SCHEMA_URL
        )
        meter.create_observable_gauge(
            otel_names.ACTIVE.name,
            [partial(self._on_collection, of_provider)],
            unit=otel_names.ACTIVE.unit,
            description=otel_names.ACTIVE.description,
        )

    def stop(self) -> None:
        """Add nothing more."""
        self._source = None

    def reset(self) -> None:
        """Forget what the parent's readers were given, as a forked child must."""
        for stream in list(self._streams.values()):
            stream.reset()

    def flush(self, timeout: float) -> None:
        """Let the readers collect and export, if the metrics are added to any."""
        provider = self._given or metrics.get_meter_provider()
        # OpenTelemetry's API has no force_flush; the SDK's provider does.
        force_flush = getattr(provider, "force_flush", None)
        if self._source is not None and force_flush is not None:
            force_flush(timeout * 1000)

    def _on_collection(
        self, of_provider: "ref[MeterProvider] | None", _options: CallbackOptions
    ) -> Iterable[Observation]:
        provider = (
            metrics.get_meter_provider() if of_provider is None else of_provider()
        )
        is_current = provider is (self._given or metrics.get_meter_provider())
        if self._source is None or not is_current:
            return []
        RECORDER.failures.guarded(names.OTEL_METRICS, self._find_readers, provider)
        return [Observation(1)]

    def _find_readers(self, provider: MeterProvider) -> None:
        consumer = getattr(provider, "_measurement_consumer", None)
        readers = getattr(consumer, "_reader_storages", None)
        if readers is None:
            self._report_unusable(provider)
            return
        for reader in list(readers):
            if (
                reader not in self._streams
                and type(reader).__name__ != _SERVES_PROMETHEUS
            ):
                self._add_to(reader)

    def _report_unusable(self, provider: MeterProvider) -> None:
        if self._unusable:
            return
        self._unusable = True
        name = f"{type(provider).__module__}.{type(provider).__name__}"
        raise TracedStoreError(
            f"the MeterProvider {name} is not the SDK's, or a version that is not"
            " known: metrics are in the Prometheus registry only; set"
            " TRACEDSTORE_METRICS_EXPORTER to otlp or prometheus"
        )

    def _add_to(self, reader: "MetricReader") -> None:
        from tracedstore.signals.otel_metrics import MetricStream  # noqa: PLC0415

        receive = reader._receive_metrics  # noqa: SLF001 - see above
        stream = MetricStream(_temporality_of(reader))

        def receive_all(metrics_data: "MetricsData", *args: Any, **kwargs: Any) -> None:
            added = RECORDER.failures.guarded(
                names.OTEL_METRICS, self._added_to, metrics_data, stream
            )
            receive(added or metrics_data, *args, **kwargs)

        reader._receive_metrics = receive_all  # type: ignore[method-assign]  # noqa: SLF001
        self._streams[reader] = stream

    def _added_to(
        self, collected: "MetricsData", stream: "MetricStream"
    ) -> "MetricsData":
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

        from tracedstore.signals.otel_metrics import in_scope  # noqa: PLC0415

        if self._source is None:
            return collected
        with stream.lock:
            ours = stream.read(self._source)
            stream.commit()
        others = []
        resource = Resource(resource_attributes())
        for one in collected.resource_metrics:
            # What the application says of its process wins.
            resource = resource.merge(one.resource)
            scopes = [
                scope for scope in one.scope_metrics if scope.scope.name != names.SCOPE
            ]
            others += [replace(one, scope_metrics=scopes)] if scopes else []
        return replace(collected, resource_metrics=[*others, in_scope(resource, ours)])


def resource_attributes() -> dict[str, AttributeValue]:
    """Return the attributes of this process, as a resource has them."""
    return process_attributes(process_identity())


def _temporality_of(reader: "MetricReader") -> "Temporality":
    from tracedstore.signals.otel_metrics import Temporality  # noqa: PLC0415

    # By the kinds of instrument that would have the same temporality: the counts are
    # read when they are collected, and the SDK has no such histogram.
    by_name = {
        instrument.__name__.lstrip("_"): temporality
        for instrument, temporality in reader._instrument_class_temporality.items()  # noqa: SLF001
    }
    return Temporality(by_name["ObservableCounter"], by_name["Histogram"])


METER_READERS: Final = MeterReaders()
