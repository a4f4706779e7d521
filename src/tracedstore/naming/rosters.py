"""Parsers for the node lists, task counts and host files of schedulers.

These are pure functions of text. They raise ValueError for malformed text, and for more
than a million hosts or tasks; the size is checked before anything is expanded.

ClusterShell's NodeSet is not used: see docs/design.md.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

MAX_HOSTS = 1_000_000
MAX_TASKS = 1_000_000
# A DNS name has at most 253 characters. Without this limit, a long prefix before a wide
# bracket expands to gigabytes.
_MAX_HOST_LENGTH = 253

# One host expression: literal text and brackets, up to a comma outside of them. There
# is no quantifier inside the repeated group, so malformed text fails in linear time.
_EXPRESSION = re.compile(r"(?:[^][,\s]|\[[^][]*\])+")
_PART = re.compile(r"\[([^][]*)\]|([^][]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")
_SLOTS = re.compile(r"[0-9]{1,18}")


def parse_node_list(text: str) -> list[str]:
    """Expand a Slurm node list, such as ``node[01-02,7],gpu-a[1-2]b3``.

    The hosts are in Slurm's order: in a name with several brackets, the last one varies
    fastest.
    """
    expressions = _EXPRESSION.findall(text)
    if ",".join(expressions) != text or not text:
        raise ValueError("unbalanced brackets, or an empty name")
    hosts: list[str] = []
    for expression in expressions:
        choices: list[list[str]] = []
        room, count, length = MAX_HOSTS - len(hosts), 1, 0
        for bracket, literal in _PART.findall(expression):
            choice = [literal] if literal else _parse_bracket(bracket, room)
            choices.append(choice)
            count *= len(choice)
            length += max(map(len, choice))
            if count > room:
                raise ValueError(f"more than {MAX_HOSTS} hosts")
            if length > _MAX_HOST_LENGTH:
                raise ValueError(f"a name longer than {_MAX_HOST_LENGTH} characters")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _parse_bracket(bracket: str, max_numbers: int) -> list[str]:
    """Expand the inside of a bracket; numbers are padded to the first one's width."""
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _RANGE.fullmatch(item)
        if not match:
            raise ValueError(f"[{item[:40]}] is not a number or a range")
        first, last = match[1], match[2] or match[1]
        size = int(last) - int(first) + 1
        if size < 1:
            raise ValueError(f"[{item}] is a descending range")
        if len(numbers) + size > max_numbers:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        width = len(first)
        numbers += (f"{n:0{width}}" for n in range(int(first), int(last) + 1))
    return numbers


def parse_task_counts(text: str) -> list[int]:
    """Expand Slurm's tasks per node: ``8(x2),4`` is 8, 8 and 4."""
    counts: list[int] = []
    total = 0
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise ValueError(f"{item[:40]!r} is not a count such as 8 or 8(x4)")
        count, nodes = int(match[1]), int(match[2] or 1)
        total += count * nodes
        if len(counts) + nodes > MAX_HOSTS or total > MAX_TASKS:
            raise ValueError(f"more than {MAX_TASKS} tasks")
        counts += [count] * nodes
    return counts


def assign_tasks(counts: Sequence[int], plane_size: int) -> list[int]:
    """Return the node of each task, in Slurm's ``plane`` distribution.

    Nodes take up to ``plane_size`` tasks in turn, until each has its count. ``cyclic``
    is a plane size of one, ``block`` a plane size of at least the highest count.
    """
    assigned: list[int] = []
    remaining = list(counts)
    open_nodes = [node for node, count in enumerate(counts) if count]
    # A node with all its tasks is removed, so every step assigns at least one task.
    while open_nodes:
        for node in open_nodes:
            size = min(plane_size, remaining[node])
            assigned += [node] * size
            remaining[node] -= size
        open_nodes = [node for node in open_nodes if remaining[node]]
    return assigned


def parse_host_file(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Return the host and slots of each line of an Open MPI, DeepSpeed or MPICH file.

    ``node1 slots=8``, ``node1:8``, and ``node1`` for one slot; ``#`` starts a comment.
    Options other than ``slots`` are the launcher's and are ignored. The text of the
    ValueError begins with the line number.
    """
    entries: list[tuple[str, int]] = []
    total = 0
    for line_number, line in enumerate(lines, 1):
        parts = line.partition("#")[0].split("=")
        entry = "=".join(part.strip() for part in parts)
        if not entry:
            continue
        name, *rest = entry.split()
        host, colon, count = name.partition(":")
        options = dict(option.partition("=")[::2] for option in rest)
        slots = options.get("slots", count if colon else "1")
        malformed = "=" in name or "" in {host, *options.values()}
        if malformed or not _SLOTS.fullmatch(slots):
            raise ValueError(
                f"{line_number}: {entry[:80]!r} is not a host such as node1, node1:8"
                " or node1 slots=8"
            )
        total += int(slots)
        if total > MAX_TASKS or len(entries) == MAX_HOSTS:
            raise ValueError(f"{line_number}: more than {MAX_TASKS} slots")
        entries.append((host, int(slots)))
    return entries


def parse_slurm_host_file(lines: Iterable[str]) -> list[str]:
    """Return the host of each task in a file of SLURM_HOSTFILE.

    A line is a node list, or ``node1*4`` for four tasks; ``#`` starts a comment. The
    text of the ValueError begins with the line number.
    """
    hosts: list[str] = []
    for line_number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        names, star, times = entry.partition("*")
        if star and not _SLOTS.fullmatch(times):
            raise ValueError(
                f"{line_number}: {entry[:80]!r} is not a host such as n1*4"
            )
        try:
            listed = parse_node_list(names)
        except ValueError as error:
            raise ValueError(f"{line_number}: {error}") from None
        repeats = int(times) if star else 1
        if len(hosts) + len(listed) * repeats > MAX_TASKS:
            raise ValueError(f"{line_number}: more than {MAX_TASKS} tasks")
        hosts += listed * repeats
    return hosts
