"""The number of Store calls in the metrics of a process."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric as Family

from tracedstore import names

_COUNTS = tuple(f"{metric.name}_count" for metric in names.CALL_DURATIONS)
# Store, operation and error type.
Call = tuple[str, str, str]


def exported_calls(families: Iterable[Family]) -> dict[Call, int]:
    """Return the number of calls by store, operation and error type, without zeros.

    A call is in the histogram of waits or in that of other operations; with
    `metrics="full"` a blocking call is in both.
    """
    found: dict[str, dict[Call, int]] = {name: {} for name in _COUNTS}
    for family in families:
        for sample in family.samples:
            if sample.name in found and sample.value:
                store, operation, error_type = map(
                    sample.labels.__getitem__, ("store", "operation", "error_type")
                )
                found[sample.name][store, operation, error_type] = int(sample.value)
    waits, operations = found.values()
    return operations | waits
