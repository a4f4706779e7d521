"""What torch itself knows about the process groups of this process.

A program may only wrap its store, and give its rank to ``init_process_group``. Nothing
of torch is replaced then, but torch keeps its groups in module state.
"""

import sys
from typing import Any, Final

from tracedstore.common.identity import (
    bottom_of,
    process_identity,
    set_group_identity,
)
from tracedstore.diagnosis.observe import torch_keys

_MODULE: Final = "torch.distributed.distributed_c10d"


def note_groups() -> None:
    """Note the rank and the members of groups on a traced store, as far as not known.

    The references to groups and stores are dropped when it returns: one that is kept
    keeps the port of its server.
    """
    world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
    default = getattr(world, "default_pg", None)
    if default is None:
        return
    _, store = getattr(world, "pg_map", {}).get(default, (None, None))
    if store is None or not hasattr(bottom_of(store), "_traced"):
        return
    if process_identity().rank is None:
        set_group_identity(default.rank(), default.size())
    names = getattr(world, "pg_names", {})
    for group, ranks in list(getattr(world, "pg_group_ranks", {}).items()):
        name = names.get(group, "")
        if name and torch_keys.members_of(name) is None:
            torch_keys.record_members(name, sorted(ranks, key=ranks.get), len(ranks))
