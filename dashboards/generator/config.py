"""What all dashboards share."""

from typing import Final

TAG: Final = "tracedstore"
# The uid of a dashboard is its address, and the name of its file.
COORDINATION: Final = "tracedstore-coordination"
INTERNALS: Final = "tracedstore-internals"
HEALTH: Final = "tracedstore-health"

# Names that tools for dashboards know, where there is more than one kind of source.
PROMETHEUS: Final = "prometheus_datasource"
LOKI: Final = "loki_datasource"
TEMPO: Final = "tempo_datasource"
