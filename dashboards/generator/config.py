"""Constants of all dashboards."""

from typing import Final

TAG: Final = "tracedstore"
# The uid of a dashboard is part of its URL, and its file name.
JOB: Final = "tracedstore-job"
FLEET: Final = "tracedstore-fleet"
INTERNALS: Final = "tracedstore-internals"
HEALTH: Final = "tracedstore-health"

# Variable names that dashboard linters expect where data sources have several types.
PROMETHEUS: Final = "prometheus_datasource"
LOKI: Final = "loki_datasource"
TEMPO: Final = "tempo_datasource"
