"""The keys that torchrun's agents wait for in their store, and their writers.

After the agents have joined, rank 0 writes MASTER_ADDR and MASTER_PORT, every agent
writes its role, and rank 0 reads all roles and writes the ranks of all agents. An agent
that waits for one of these keys waits for another agent, which has a name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

from tracedstore.coordination.arrivals import find_absent, side_connection
from tracedstore.core.counters import Explain
from tracedstore.core.keys import MAX_KEYS_SHOWN, shown
from tracedstore.core.operation import Arguments, Method

ROLE_INFO = "torchelastic/role_info/"
_ROLE = re.compile(re.escape(ROLE_INFO) + r"([0-9]{1,9})")
# Maximum number of keys of a call that are checked; there are thousands of agents at
# most.
_MAX_KEYS_CHECKED = 8192


def explainer(store: Any, world_size: int, name_of: Callable[[int], str]) -> Explain:
    """Return a function that finds the keys and agents that a call waits for.

    It reads through a side connection, blocks on nothing and changes nothing. The store
    refers to it, so it refers to the store weakly.
    """
    weak_store = ref(store)

    def explain(method: Method, args: Arguments) -> Mapping[str, Any]:
        keys, count = method.keys_of(args)
        if not method.blocks or not 0 < count <= _MAX_KEYS_CHECKED:
            return {}
        with side_connection(weak_store()) as connection:
            missing = find_absent(connection.check, list(keys))
            agents = _agents(missing, connection, world_size)
        return {
            "missing_keys": list(shown(missing[:MAX_KEYS_SHOWN])),
            "missing_key_count": len(missing),
            "missing_agents": [name_of(rank) for rank in agents[:MAX_KEYS_SHOWN]],
            "missing_agent_count": len(agents),
        }

    return explain


def _agents(missing: Sequence[Any], store: Any, world_size: int) -> list[int]:
    """Return the ranks of the agents that write the missing keys."""
    roles = [_ROLE.fullmatch(str(key)) for key in missing]
    agents = [int(role[1]) for role in roles if role is not None]
    if agents or not missing:
        return agents
    # Rank 0 writes all other keys, and needs the roles of all agents for that.
    every = [f"{ROLE_INFO}{rank}" for rank in range(min(world_size, _MAX_KEYS_CHECKED))]
    absent = find_absent(store.check, every) if "MASTER_" not in str(missing[0]) else []
    return [every.index(key) for key in absent] or [0]
