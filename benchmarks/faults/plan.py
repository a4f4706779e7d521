"""Makes the cases of a run. A case depends on the seed and its number alone."""

import random
from collections.abc import Callable
from typing import Any

from faults.cases import Case, Fault

# Seconds. A FileStore counts whole seconds.
_SHORT, _SHORT_FILE = 0.6, 1.0
# For barriers that complete: no machine is that slow.
_LONG = 30.0
_JOIN = 2.0
_NOT_COUNTED = ("start", "registered", "recorded")
_COUNTED = ("counted", "waiting")
_AFTER_TIMEOUT = ("timed_out", "confirmed", "publishing", "published")
_UNTIL_TIMEOUT = (*_NOT_COUNTED, *_COUNTED, "timed_out", "confirmed")
_SERVER_FAULTS = (
    ("server_kill", ""),
    ("server_restart", ""),
    ("server_stop", "0.9"),
    ("server_stop", "0.2"),
    ("server_stop", ""),
)
# Probability that a rank of a case finalizes its interpreter.
_EXITS = 0.25

Fields = dict[str, Any]
Draw = random.Random


def make_case(seed: int, number: int, only: str = "") -> Case:
    """Make one case of a run.

    Args:
        seed: The seed of the run.
        number: The number of the case.
        only: The fault class, instead of a random one.
    """
    draw = random.Random(f"{seed}/{number}")
    drawn = draw.choices(list(_CLASSES), [weight for weight, _ in _CLASSES.values()])
    fault_class = only or drawn[0]
    fields = _CLASSES[fault_class][1](draw)
    world_size = fields["world_size"]
    started = [r for r in range(world_size) if r not in fields.get("absent", ())]
    defaults = {
        "order": tuple(draw.sample(range(world_size), world_size)),
        "ordered": draw.random() < 0.7,
        "flavours": ("traced",) * world_size,
        "spans": draw.random() < 0.3,
        "exits": (draw.choice(started),) if draw.random() < _EXITS else (),
        "warn_after": draw.choice((0.0, 0.0, 0.15)),
    }
    return Case(
        seed=seed, number=number, fault_class=fault_class, **(defaults | fields)
    )


def classes() -> list[str]:
    """Return the names of the fault classes."""
    return list(_CLASSES)


def _split(draw: Draw, world_size: int, absent: int) -> tuple[list[int], Fields]:
    """Return the ranks that start, in random order, and those that do not."""
    ranks = draw.sample(range(world_size), world_size)
    return ranks[absent:], {"absent": tuple(sorted(ranks[:absent]))}


def _held(draw: Draw, *releases: str) -> tuple[str, str]:
    """Draw what happens to a rank, and when it goes on."""
    actions = [("kill", "")]
    actions += [("stop", release) for release in ("", *releases)]
    actions += [("late", release) for release in releases]
    return draw.choice(actions)


def _barrier(draw: Draw) -> Fields:
    """Kill, stop or delay ranks at a step of the barrier."""
    store = draw.choices(("tcp", "file", "etcd"), (75, 20, 5))[0]
    short = _SHORT_FILE if store == "file" else _SHORT
    step = draw.choice(
        (*_NOT_COUNTED, *_COUNTED, *_AFTER_TIMEOUT, "completing", "completed")
    )
    if step in _AFTER_TIMEOUT:
        fields = _after_timeout(draw, step)
    elif step in ("completing", "completed"):
        fields = _last_rank(draw, step)
    elif step in _COUNTED:
        fields = _counted(draw, step)
    else:
        fields = _not_counted(draw)
    stops = any(fault.action == "stop" for fault in fields["faults"])
    if store == "file" and stops:
        # A process that is stopped in a call may hold the lock of the file.
        if step == "waiting":
            store, short = "tcp", _SHORT
        else:
            fields["warn_after"] = 0.0
    if draw.random() < 0.2:
        fields["flavours"] = tuple(
            draw.choice(("traced", "bare")) for _ in range(fields["world_size"])
        )
    timeout = _LONG if fields.pop("completes") else short
    return {"store": store, "timeout": timeout, **fields}


def _not_counted(draw: Draw) -> Fields:
    world_size = draw.randint(2, 5)
    ranks, absent = _split(draw, world_size, 0)
    victims = ranks[: 1 if world_size == 2 or draw.random() < 0.7 else 2]
    action, release = _held(draw, "in_time", "after")
    faults = tuple(
        Fault(rank=rank, step=draw.choice(_NOT_COUNTED), action=action, release=release)
        for rank in victims
    )
    completes = release == "in_time" and len(victims) == 1
    if release == "in_time" and len(victims) == 2:
        faults, completes = faults[:1], True
    return {
        "world_size": world_size,
        "faults": faults,
        "completes": completes,
        **absent,
    }


def _counted(draw: Draw, step: str) -> Fields:
    world_size = draw.randint(3, 5)
    with_absent = draw.random() < 0.6
    ranks, absent = _split(draw, world_size, int(with_absent))
    releases = ("after",) if step == "waiting" else ("in_time", "after")
    action, release = _held(draw, *releases)
    if step == "waiting" and action == "late":
        action, release = "kill", ""
    fault = Fault(rank=ranks[0], step=step, action=action, release=release)
    return {
        "world_size": world_size,
        "faults": (fault,),
        # Not the last one, which completes the barrier.
        "order": (*ranks, *absent["absent"]),
        "ordered": True,
        "completes": not with_absent,
        **absent,
    }


def _after_timeout(draw: Draw, step: str) -> Fields:
    world_size = draw.randint(3, 5)
    ranks, absent = _split(draw, world_size, 1)
    action, release = _held(draw, "after")
    fault = Fault(rank=ranks[0], step=step, action=action, release=release)
    more: tuple[Fault, ...] = ()
    if len(ranks) > 2 and draw.random() < 0.4:
        # Another rank died while it arrived, so that confirmations matter.
        more = (Fault(rank=ranks[1], step="recorded", action="kill"),)
    return {
        "world_size": world_size,
        "faults": (fault, *more),
        "completes": False,
        **absent,
    }


def _last_rank(draw: Draw, step: str) -> Fields:
    world_size = draw.randint(2, 5)
    ranks, absent = _split(draw, world_size, 0)
    releases = ("in_time", "after") if step == "completing" else ("after",)
    action, release = _held(draw, *releases)
    return {
        "world_size": world_size,
        "faults": (Fault(rank=ranks[-1], step=step, action=action, release=release),),
        "order": tuple(ranks),
        "ordered": True,
        "completes": step == "completed" or release == "in_time",
        **absent,
    }


def _mixed(draw: Draw) -> Fields:
    """Let plain torch ranks take part, with ranks that fail."""
    world_size = draw.randint(3, 5)
    ranks, absent = _split(draw, world_size, draw.choice((0, 1)))
    plain = ranks[1 : draw.randint(2, len(ranks))]
    step = draw.choice(("recorded", "counted", "registered", "waiting"))
    faults: tuple[Fault, ...] = ()
    if not absent["absent"] or draw.random() < 0.5:
        faults = (Fault(rank=ranks[-1], step=step, action="kill"),)
    dies_before = faults and step in _NOT_COUNTED
    return {
        "world_size": world_size,
        "faults": faults,
        "flavours": tuple(
            "torch" if r in plain and r != ranks[-1] else "traced"
            for r in range(world_size)
        ),
        "timeout": _SHORT if dies_before or absent["absent"] else _LONG,
        "trace_timeout": 1.0,
        # The rank that dies is not the last one, which completes the barrier.
        "order": (*reversed(ranks), *absent["absent"]),
        "ordered": True,
        **absent,
    }


def _rendezvous(draw: Draw) -> Fields:
    """Kill, stop or delay nodes at a call of the rendezvous."""
    world_size = draw.randint(2, 4)
    ranks, absent = _split(draw, world_size, draw.choice((0, 0, 1)))
    step = draw.choice(
        (
            "start",
            "get:1",
            "get returned:1",
            "compare_set:1",
            "joined",
            "compare_set returned:1",
            "get:2",
            "get:3",
            "compare_set:2",
        )
    )
    action, release = _held(draw, "in_time", "after")
    if action == "late" and step == "joined":
        action, release = "kill", ""
    if draw.random() < 0.3:
        action, release = draw.choice(_SERVER_FAULTS)
    return {
        "protocol": "rendezvous",
        "world_size": world_size,
        "min_nodes": draw.randint(max(1, world_size - 1), world_size),
        "timeout": _JOIN,
        "faults": (Fault(rank=ranks[0], step=step, action=action, release=release),),
        "ordered": False,
        **absent,
    }


def _server(draw: Draw) -> Fields:
    """Kill, stop or restart the server, or damage the file of the store."""
    world_size = draw.randint(2, 4)
    ranks, absent = _split(draw, world_size, draw.choice((0, 1)))
    store = draw.choices(("tcp", "file"), (75, 25))[0]
    if store == "file":
        action, release = draw.choice(("file_delete", "file_truncate")), ""
    else:
        action, release = draw.choice(_SERVER_FAULTS)
    step = draw.choice(_UNTIL_TIMEOUT)
    return {
        "store": store,
        "world_size": world_size,
        "timeout": _SHORT_FILE if store == "file" else _SHORT,
        "faults": (Fault(rank=ranks[0], step=step, action=action, release=release),),
        "warn_after": draw.choice((0.0, 0.15)),
        **absent,
    }


def _network(draw: Draw) -> Fields:
    """Cut, hold, delay or half-close the connections of ranks."""
    world_size = draw.randint(2, 4)
    ranks, absent = _split(draw, world_size, draw.choice((0, 1)))
    action, release, value = draw.choice(
        (
            ("proxy_cut", "", 0.0),
            ("proxy_hold", "0.3 forward", 0.0),
            ("proxy_hold", "0.9 forward", 0.0),
            ("proxy_hold", "0.9 cut", 0.0),
            ("proxy_hold", "", 0.0),
            ("proxy_delay", "", round(draw.uniform(0.01, 0.2), 3)),
            ("proxy_half_close_server", "", 0.0),
            ("proxy_half_close_client", "", 0.0),
        )
    )
    store = draw.choices(("tcp", "etcd"), (85, 15))[0]
    if store == "etcd" and action == "proxy_hold" and not release:
        release = "0.9 cut"
    fault = Fault(
        rank=ranks[0],
        step=draw.choice(_UNTIL_TIMEOUT),
        action=action,
        release=release,
        value=value,
    )
    return {
        "store": store,
        "world_size": world_size,
        "timeout": _SHORT,
        "proxied": tuple(sorted(ranks[: draw.randint(1, len(ranks))])),
        "faults": (fault,),
        "warn_after": draw.choice((0.0, 0.15)),
        **absent,
    }


def _with_absent(draw: Draw, **fields: Any) -> Fields:
    """Return a barrier that times out, because one rank does not start."""
    world_size = draw.randint(2, 4)
    _, absent = _split(draw, world_size, 1)
    return {"world_size": world_size, "timeout": _SHORT, **absent, **fields}


def _exporter(draw: Draw) -> Fields:
    """Export spans to a collector that is dead, silent or slow."""
    fields = _with_absent(draw, exporter=draw.choice(("refused", "silent", "slow")))
    return fields | {"warn_after": draw.choice((0.0, 0.15))}


def _endpoint(draw: Draw) -> Fields:
    """Let clients of the metrics endpoint hang."""
    return _with_absent(draw, http_clients=draw.randint(0, 12))


def _log(draw: Draw) -> Fields:
    """Write events to a log that blocks or is full."""
    kinds = ("full_pipe", "broken_pipe", "dev_full", "too_large", "none")
    return _with_absent(draw, log=draw.choice(kinds), warn_after=0.15)


def _in_rank(draw: Draw, steps: tuple[str, ...], **fault: Any) -> Fields:
    """Inject a fault into the process of one rank."""
    world_size = draw.randint(2, 4)
    ranks, absent = _split(draw, world_size, 1 if draw.random() < 0.7 else 0)
    completes = not absent["absent"]
    injected = Fault(rank=ranks[0], step=draw.choice(steps), **fault)
    return {
        "world_size": world_size,
        "timeout": _LONG if completes else _SHORT,
        "faults": (injected,),
        **absent,
    }


def _disk(draw: Draw) -> Fields:
    """Let a rank's file system be full."""
    fields = _in_rank(draw, _UNTIL_TIMEOUT, action="limit_file_size")
    return fields | {"store": "file", "timeout": _SHORT_FILE}


def _clock(draw: Draw) -> Fields:
    """Set the wall clock of a rank."""
    jumps = (-0.5, 0.5, -3600.0, 3600.0, -3e8, 3e8)
    return _in_rank(draw, _UNTIL_TIMEOUT, action="set_clock", value=draw.choice(jumps))


def _fork(draw: Draw) -> Fields:
    """Fork a rank, during a wait, a warning or an export as well."""
    steps = (*_NOT_COUNTED, *_COUNTED, *_AFTER_TIMEOUT, "exporting")
    fields = _in_rank(draw, steps, action="fork")
    if fields["faults"][0].step == "exporting":
        fields["spans"] = True
    return fields | {"warn_after": draw.choice((0.0, 0.15))}


def _memory(draw: Draw) -> Fields:
    """Let a rank run out of memory."""
    sizes = (0.0, 0.5, 2.0, 9.0, 20.0)
    fields = _in_rank(
        draw, _UNTIL_TIMEOUT, action="limit_memory", value=draw.choice(sizes)
    )
    return fields | {"timeout": _SHORT}


def _threads(draw: Draw) -> Fields:
    """Let a rank start no more threads."""
    return _in_rank(draw, _UNTIL_TIMEOUT, action="refuse_threads")


# The classes with their shares of a run.
_CLASSES: dict[str, tuple[int, Callable[[Draw], Fields]]] = {
    "barrier": (38, _barrier),
    "mixed": (8, _mixed),
    "rendezvous": (10, _rendezvous),
    "server": (10, _server),
    "network": (12, _network),
    "exporter": (6, _exporter),
    "endpoint": (2, _endpoint),
    "log": (5, _log),
    "disk": (2, _disk),
    "clock": (3, _clock),
    "fork": (4, _fork),
    "memory": (2, _memory),
    "threads": (2, _threads),
}
