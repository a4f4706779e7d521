"""How schedulers write down who runs where, read without asking the scheduler.

Pure functions from text. What is malformed, or names more than a million hosts or
tasks, is a ValueError; nothing is expanded before it is known to be small enough.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

MOST_HOSTS = 1_000_000
MOST_TASKS = 1_000_000
# A DNS name has at most 253 characters. Without a limit a long prefix before a
# wide bracket would multiply into gigabytes.
_LONGEST_HOST = 253

# One host expression: literal text and brackets, up to a comma outside of them. No
# quantifier inside the repeated group, so that a bad text fails in linear time.
_EXPRESSION = re.compile(r"(?:[^][,\s]|\[[^][]*\])+")
_PART = re.compile(r"\[([^][]*)\]|([^][]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")
_SLOTS = re.compile(r"[0-9]{1,18}")


def hosts_in(text: str) -> list[str]:
    """Expand a Slurm node list: ``node[01-02,7],gpu-a[1-2]b3`` in Slurm's order.

    Of several brackets in one name the last one turns fastest.
    """
    expressions = _EXPRESSION.findall(text)
    if ",".join(expressions) != text or not text:
        raise ValueError("brackets do not match, or a name is empty")
    hosts: list[str] = []
    for expression in expressions:
        choices: list[list[str]] = []
        room, count, length = MOST_HOSTS - len(hosts), 1, 0
        for bracket, literal in _PART.findall(expression):
            choice = [literal] if literal else _numbers(bracket, room)
            choices.append(choice)
            count *= len(choice)
            length += max(map(len, choice))
            if count > room:
                raise ValueError(f"more than {MOST_HOSTS} hosts")
            if length > _LONGEST_HOST:
                raise ValueError(f"a name longer than {_LONGEST_HOST} characters")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(bracket: str, most: int) -> list[str]:
    """Expand the inside of a bracket; the first number's width is the padding."""
    numbers: list[str] = []
    for item in bracket.split(","):
        found = _RANGE.fullmatch(item)
        if not found:
            raise ValueError(f"[{item[:40]}] is not a number or a range")
        first, last = found[1], found[2] or found[1]
        size = int(last) - int(first) + 1
        if size < 1:
            raise ValueError(f"[{item}] runs backwards")
        if len(numbers) + size > most:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        width = len(first)
        numbers += (f"{n:0{width}}" for n in range(int(first), int(last) + 1))
    return numbers


def counts_in(text: str) -> list[int]:
    """Expand Slurm's tasks per node: ``8(x2),4`` is 8, 8 and 4."""
    counts: list[int] = []
    total = 0
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if not found:
            raise ValueError(f"{item[:40]!r} is not a count such as 8 or 8(x4)")
        count, nodes = int(found[1]), int(found[2] or 1)
        total += count * nodes
        if len(counts) + nodes > MOST_HOSTS or total > MOST_TASKS:
            raise ValueError(f"more than {MOST_TASKS} tasks")
        counts += [count] * nodes
    return counts


def place(counts: Sequence[int], turn: int) -> list[int]:
    """Give the node of each task, where nodes take up to ``turn`` tasks in turn.

    This is Slurm's ``plane`` distribution; ``cyclic`` is a turn of one, and
    ``block`` a turn that takes all.
    """
    placed: list[int] = []
    left = list(counts)
    waiting = [node for node, count in enumerate(counts) if count]
    # A node that has all its tasks leaves, so every step places at least one.
    while waiting:
        for node in waiting:
            taken = min(turn, left[node])
            placed += [node] * taken
            left[node] -= taken
        waiting = [node for node in waiting if left[node]]
    return placed


def slots_in(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Read a host file of Open MPI, DeepSpeed or MPICH: each line's host and slots.

    ``node1 slots=8``, ``node1:8`` and a bare ``node1`` for one slot; ``#`` starts a
    comment, and options other than ``slots`` are for the launcher alone. The text
    of the ValueError begins with the number of the line.
    """
    entries: list[tuple[str, int]] = []
    total = 0
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split("=")
        entry = "=".join(word.strip() for word in words)
        if not entry:
            continue
        name, *rest = entry.split()
        host, colon, count = name.partition(":")
        options = dict(option.partition("=")[::2] for option in rest)
        slots = options.get("slots", count if colon else "1")
        malformed = "=" in name or "" in {host, *options.values()}
        if malformed or not _SLOTS.fullmatch(slots):
            raise ValueError(
                f"{number}: {entry[:80]!r} is not a host such as node1, node1:8 or"
                " node1 slots=8"
            )
        total += int(slots)
        if total > MOST_TASKS or len(entries) == MOST_HOSTS:
            raise ValueError(f"{number}: more than {MOST_TASKS} slots")
        entries.append((host, int(slots)))
    return entries
