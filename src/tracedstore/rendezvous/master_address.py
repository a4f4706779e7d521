"""A MASTER_ADDR of an earlier round, which an agent gives to its workers.

With a shared TCPStore, torch's agents keep the address of the first round for as long
as they are not rank 0. If the node of rank 0 is replaced, they give their workers the
address of a server that no longer exists.
"""

import time
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from tracedstore.common.codec import printable_text
from tracedstore.common.timeouts import pause
from tracedstore.coordination.arrivals import absent_keys, read_existing
from tracedstore.coordination.connections import side_connection
from tracedstore.diagnosis.observe import incarnations
from tracedstore.recording.recorder import RECORDER
from tracedstore.rendezvous.state import RendezvousState

_KEYS: Final = ["MASTER_ADDR", "MASTER_PORT"]
# Seconds in which rank 0 of the round publishes its address, and between two looks.
_TIMEOUT, _INTERVAL = 10.0, 0.5
_MAX_BYTES = 256
_REMEDY: Final = (
    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: its agents read the address"
    " of every round then"
)


def check_master_address(info: RendezvousInfo, last: RendezvousState | None) -> None:
    """Report that workers get another address than rank 0 of the round published.

    A round in which rank 0 publishes none within 10 s has the address of an earlier
    one. It takes that long, so call it in a bounded thread.

    Args:
        info: What the agent got for its workers.
        last: The state of the round.
    """
    address = info.bootstrap_store_info
    if address is None or info.rank == 0:
        return
    given = f"{address.master_addr}:{address.master_port}"
    with RECORDER.unrecorded(), side_connection(info.store) as store:
        published = _read_published(store)
    if published in ("", given):
        return
    number = "this round" if last is None else f"round {last.round}"
    incarnations.report_stale(
        f"this agent gives its workers the MASTER_ADDR of an earlier round: {given};"
        f" that of {number} is {published}. The workers cannot connect if the process"
        " that served the former has ended",
        remedy=_REMEDY,
    )


def _read_published(store: Any) -> str:
    """Return the address that rank 0 of the round published.

    "" if it does not publish one, or this process ends meanwhile.
    """
    deadline = time.monotonic() + _TIMEOUT
    # The values are read once: any client can have written long ones.
    while absent_keys(store, _KEYS):
        if time.monotonic() > deadline or not pause(_INTERVAL):
            return ""
    values = read_existing(store, _KEYS)
    if len(values) < len(_KEYS):
        return ""
    host, port = (value[:_MAX_BYTES].decode("utf-8", "replace") for value in values)
    return printable_text(f"{host}:{port}")
