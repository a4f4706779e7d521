"""What torchrun's agents wait for in their store, and who has to write it.

After they have joined, rank 0 writes MASTER_ADDR and MASTER_PORT, every agent writes
its role, and rank 0 reads all of these and writes everybody's ranks. Whoever waits
for one of them waits for an agent, which has a name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

from tracedstore.coordination.arrivals import find_absent, side_connection
from tracedstore.core.counters import Explain
from tracedstore.core.keys import MOST_KEYS_SHOWN, shown
from tracedstore.core.operation import Arguments, Method

ROLE_INFO = "torchelastic/role_info/"
_ROLE = re.compile(re.escape(ROLE_INFO) + r"([0-9]{1,9})")
# Keys of a call that are asked for; agents are thousands at most.
_MOST_ASKED = 8192


def explainer(store: Any, world_size: int, name_of: Callable[[int], str]) -> Explain:
    """Make what says which keys, and which agents, a call on the store waits for.

    It reads through a side connection, blocks on nothing and changes nothing. The
    store has it, so it has the store only while others do.
    """
    weak_store = ref(store)

    def explain(method: Method, args: Arguments) -> Mapping[str, Any]:
        keys, count = method.keys_of(args)
        if not method.blocks or not 0 < count <= _MOST_ASKED:
            return {}
        with side_connection(weak_store()) as looking:
            missing = find_absent(looking.check, list(keys))
            agents = _agents(missing, looking, world_size)
        return {
            "missing_keys": list(shown(missing[:MOST_KEYS_SHOWN])),
            "missing_key_count": len(missing),
            "missing_agents": [name_of(rank) for rank in agents[:MOST_KEYS_SHOWN]],
            "missing_agent_count": len(agents),
        }

    return explain


def _agents(missing: Sequence[Any], store: Any, world_size: int) -> list[int]:
    """Tell whose turn it is to write what is missing."""
    roles = [_ROLE.fullmatch(str(key)) for key in missing]
    agents = [int(role[1]) for role in roles if role is not None]
    if agents or not missing:
        return agents
    # All else is written by rank 0, for which it needs the roles of all of them.
    every = [f"{ROLE_INFO}{rank}" for rank in range(min(world_size, _MOST_ASKED))]
    absent = find_absent(store.check, every) if "MASTER_" not in str(missing[0]) else []
    return [every.index(key) for key in absent] or [0]
