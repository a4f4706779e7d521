"""The public names, imported from where they are defined.

`tracedstore/__init__.py` loads this module, and torch with it, when the first of these
names is used.
"""

from tracedstore.auto.patches import instrument as instrument
from tracedstore.auto.patches import uninstrument as uninstrument
from tracedstore.common.errors import ConfigurationError as ConfigurationError
from tracedstore.common.errors import TracedStoreError as TracedStoreError
from tracedstore.coordination.barrier import BarrierTimeout as BarrierTimeout
from tracedstore.elastic import barrier as barrier
from tracedstore.elastic import get_all as get_all
from tracedstore.elastic import store_timeout as store_timeout
from tracedstore.elastic import synchronize as synchronize
from tracedstore.export.settings import Settings as Settings
from tracedstore.export.setup import configure as configure
from tracedstore.export.setup import in_flight as in_flight
from tracedstore.export.setup import shutdown as shutdown
from tracedstore.recording.operation import Operation as Operation
from tracedstore.recording.recorder import Observer as Observer
from tracedstore.signals.inflight import InFlight as InFlight
from tracedstore.store import TracedStore as TracedStore
from tracedstore.store import wrap as wrap
