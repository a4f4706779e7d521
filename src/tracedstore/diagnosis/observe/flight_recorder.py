"""Reads torch's Flight Recorder: the last collectives that this process called.

Each process group writes an entry when a collective is called, and marks it as retired
when it has ended. gloo's groups share one recorder, and those of NCCL have another one.
Both are JSON of the same form.

Only ``retired`` is trusted. gloo leaves every entry in the state ``scheduled``, and
NCCL says ``completed`` of work that was never launched. What torch writes about groups
(``pg_config``, ``pg_status``) is not read: gloo's has no ranks, and the last completed
number is not monotone.

A recorder has 2,000 entries by default. Writing them as JSON takes 50 ms, without the
GIL where torch has a handler for it that Python can call (before torch 2.15). Parsing
takes as long again, with the GIL. So only the end of the text is parsed, and the
entries before it that have not retired.

From torch 2.14 on, hooks on a process group could show what gloo does not record. They
were tried, and are not used: they run Python in each call of the job. torch's own
``FlightRecorderHook`` records a ``recv`` that hangs as retired.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from tracedstore import names
from tracedstore.common import text
from tracedstore.diagnosis.observe.blocked_record import (
    MAX_RECENT,
    Called,
    CollectivePosition,
)
from tracedstore.recording.recorder import RECORDER

# Characters at the end of the text that are parsed: 250 entries of ordinary length.
_TAIL = 128 * 1024
# Entries before these that have not retired and are parsed, the oldest first.
_MAX_EARLIER = 256
# Characters in which an entry must begin and end.
_MAX_ENTRY = 64 * 1024
_MAX_GROUPS: Final = 1024
_MAX_NAME: Final = 128
_MAX_SIZES: Final = 100
_MAX_NUMBER: Final = 2**63
# That of all groups but NCCL's, and that of NCCL: functions of torch, and handlers of
# its control plane, which do the same without the GIL.
_FUNCTIONS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_HANDLERS: Final = ("fr_trace_json", "dump_nccl_trace_json")
_WITH_FUNCTION: Final = ("gloo", "nccl", "undefined")
_MAX_BACKENDS: Final = 8
_NOT_RETIRED: Final = re.compile(r'"retired":\s*false')
_NEXT_ENTRY: Final = re.compile(r"\}\s*,\s*\{")
_SEPARATOR: Final = re.compile(r"\s*,\s*")
_PEER: Final = re.compile(r"(recv|send) (\d{1,7})(<-|->)(\d{1,7})")
_DECODER: Final = json.JSONDecoder()
# What the parser raises; the second one for nested lists without end.
_MALFORMED: Final = (ValueError, RecursionError)
# One coalesced call is an entry of its own next to those of its members.
COALESCED: Final = "coalesced"
# By operation: which tensors all ranks have in common. Others have the inputs. None:
# the sizes of two ranks may differ.
_COMPARED: Final = {
    "all_to_all": None,
    "alltoall": None,
    "alltoall_base": None,
    "all_to_all_single": None,
    "scatter": "output_sizes",
    "reduce_scatter": "output_sizes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What all ranks of a group have in common that call the same collective.

    Attributes:
        operation: The collective, in the spelling of ``torch.distributed``.
        sizes: The size of the tensor, as ``[10, 4]``; "" where those of two ranks may
            differ.
        dtype: The type of its elements; "" without elements.
    """

    operation: str
    sizes: str = ""
    dtype: str = ""

    def matches(self, other: "Signature") -> bool:
        """Return whether both may be the same collective."""
        return self.operation == other.operation and all(
            not (one and two) or one == two
            for one, two in ((self.sizes, other.sizes), (self.dtype, other.dtype))
        )

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operation, self.sizes, self.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One call of a collective, or of a point-to-point operation.

    Attributes:
        group: The name of its process group.
        instance: torch's number of that group: a later group may have the same name.
        description: The description of the group, "" without one.
        number: The number of the collective in its group, from 1.
        signature: What was called.
        is_p2p: It is a point-to-point operation, and the number is one of these.
        peer: The other rank in the group, of a point-to-point operation.
        created: When it was called, in seconds since the epoch.
        thread_id: The thread that called it; 0 if it is unknown.
        retired: It has ended.
        timeout: Seconds after which it fails; 0 if that is unknown.
        place: The line of the program that called it; "" in a live recorder, whose
            JSON has no stacks.
    """

    group: str
    instance: int
    description: str
    number: int
    signature: Signature
    is_p2p: bool = False
    peer: int | None = None
    created: float = 0.0
    thread_id: int = 0
    retired: bool = False
    timeout: float = 0.0
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What a recorder has about one process group.

    Attributes:
        name: The name of the group.
        pending: The first entry that has not ended; None if all have.
        recent: The last collectives that have ended, the latest last.
        last_called: The number of the last collective; 0 without one.
        expected: What was called after the same collective before, if that is known:
            what this rank would call next.
    """

    name: str
    pending: Entry | None = None
    recent: tuple[Entry, ...] = ()
    last_called: int = 0
    expected: Signature | None = None

    @property
    def last_number(self) -> int:
        """The number of the last collective that has ended; 0 without one."""
        return self.recent[-1].number if self.recent else 0

    def position_of(
        self,
        entry: Entry,
        *,
        description: str = "",
        place: str = "",
        since: float = 0.0,
        called: Mapping[str, int],
    ) -> CollectivePosition:
        """Return the position of a rank that waits in an entry of this record.

        Args:
            entry: The entry.
            description: The description of the group, if the entry has none.
            place: The line of the program that called it.
            since: When the rank saw the group first; 0 if that is unknown.
            called: The last collective that the rank has called, by group.
        """
        signature = entry.signature
        return CollectivePosition(
            group=self.name,
            description=description or entry.description,
            number=None if entry.is_p2p else entry.number,
            operation=signature.operation,
            sizes=signature.sizes,
            dtype=signature.dtype,
            recent=self.recent_calls(),
            expected=None if self.expected is None else _called(0, self.expected),
            since=since,
            place=place,
            called=called,
        )

    def recent_calls(self) -> tuple[Called, ...]:
        """Return the last collectives that have ended, the latest last."""
        return tuple(_called(one.number, one.signature) for one in self.recent)


def _called(number: int, signature: Signature) -> Called:
    return Called(
        number=number,
        operation=signature.operation,
        sizes=signature.sizes,
        dtype=signature.dtype,
    )


def read(*, nccl: bool = True, backends: Iterable[str] = ()) -> dict[str, GroupRecord]:
    """Return what torch's recorders have, by the name of the group.

    Args:
        nccl: Read that of NCCL too. Before torch 2.14 that may use CUDA events that
            were freed, and it may break the capture of a CUDA graph, so that it must
            be read only if the process hangs.
        backends: The backends of the groups. From torch 2.15 on, each but these two has
            a recorder of its own, which is read as that of NCCL.
    """
    dumps = chain(_dumps(nccl=nccl), _dumps_of(backends) if nccl else ())
    return records_of(entries for dump in dumps if (entries := parse(dump)))


def is_available() -> bool:
    """Return whether this torch has a recorder that can be read."""
    return _torch_name(_FUNCTIONS[0]) is not None


def _dumps(*, nccl: bool) -> Iterator[str]:
    """Yield the text of each recorder."""
    if not is_available():
        RECORDER.failures.add_missing(
            names.DIAGNOSIS,
            _FUNCTIONS[0],
            "collectives are known from the stacks of threads only",
        )
    recorders = zip(_FUNCTIONS, _HANDLERS, strict=True)
    for function, handler in list(recorders)[: 2 if nccl else 1]:
        dump = _torch_name(function)
        if dump is None:
            continue  # a build without NCCL, or an early torch
        found = _dump_without_gil(handler)
        # With entries, and with those that have ended.
        yield dump(True, False).decode(errors="replace") if found is None else found


def _dumps_of(backends: Iterable[str]) -> Iterator[str]:
    """Yield the text of each recorder that a backend besides gloo and NCCL has."""
    dump = _torch_name(_FUNCTIONS[0])
    # Its signature is in the first line.
    if dump is None or "backend" not in (dump.__doc__ or "").partition("->")[0]:
        return
    others = sorted(set(backends).difference(_WITH_FUNCTION))
    for backend in others[:_MAX_BACKENDS]:
        yield dump(True, False, backend).decode(errors="replace")


def _torch_name(name: str) -> Callable[..., Any] | None:
    # Not at the top: a build of torch may lack the module.
    from torch._C import _distributed_c10d  # noqa: PLC0415

    found: Callable[..., Any] | None = getattr(_distributed_c10d, name, None)
    return found


def _dump_without_gil(name: str) -> str | None:
    """Return what a handler of torch's control plane answers; None without one.

    The function of Python writes the JSON with the GIL, and the handler without.
    """
    get_handler = _torch_name("_get_handler")
    request, response = _torch_name("_Request"), _torch_name("_Response")
    if get_handler is None or request is None or response is None:
        return None
    answers: list[str] = []

    class Response(response):  # type: ignore[misc, valid-type]
        def set_content(self, content: str, _type: str) -> None:
            answers.append(content)

        def set_status(self, _status: int) -> None:
            pass

    class Request(request):  # type: ignore[misc, valid-type]
        def body(self) -> str:
            return ""

        def params(self) -> dict[str, str]:
            return {}

        def get_param(self, _name: str) -> str:
            return ""

    try:
        get_handler(name)(Request(), Response())
    except RuntimeError:  # there is no such handler
        return None
    return answers[0] if answers else None


def parse(dump: str) -> list[Entry]:
    """Return the last entries of a recorder, and earlier ones that have not retired.

    Args:
        dump: The text of the recorder.
    """
    start = dump.find('"entries"')
    if start < 0:
        return []
    start = dump.find("[", start) + 1
    if not start:
        return []
    tail = max(start, len(dump) - _TAIL)
    earlier: dict[int, Any] = {}
    for match in islice(_NOT_RETIRED.finditer(dump, start, tail), _MAX_EARLIER):
        found = _entry_around(dump, match.start(), start)
        if found is not None:
            position, value = found
            earlier[position] = value
    values = list(earlier.values())
    begin = tail if tail == start else _next_begin(dump, tail)
    if begin is not None:
        values += _entries_from(dump, begin)
    return entries_of(values)


def entries_of(
    values: Iterable[Any], place_of: Callable[[Any], str] = lambda _: ""
) -> list[Entry]:
    """Return the entries of a recorder, those of the known form.

    Args:
        values: What the recorder wrote of each.
        place_of: Returns the line of the program in the ``frames`` of one.
    """
    entries = (_entry(value, place_of) for value in values if isinstance(value, dict))
    return [entry for entry in entries if entry is not None]


def _entry_around(dump: str, position: int, start: int) -> tuple[int, Any] | None:
    """Return where the entry begins that has a position, and the entry."""
    low = max(start, position - _MAX_ENTRY)
    begins = [match.end() - 1 for match in _NEXT_ENTRY.finditer(dump, low, position)]
    if low == start:
        begins.insert(0, start)
    # The last one may be within a text.
    for begin in reversed(begins[-4:]):
        with suppress(*_MALFORMED):
            value, end = _DECODER.raw_decode(dump, begin)
            if end > position:
                return begin, value
    return None


def _next_begin(dump: str, position: int) -> int | None:
    for match in _NEXT_ENTRY.finditer(dump, position, position + _MAX_ENTRY):
        begin = match.end() - 1
        with suppress(*_MALFORMED):
            value, _ = _DECODER.raw_decode(dump, begin)
            if isinstance(value, dict) and "process_group" in value:
                return begin
    return None


def _entries_from(dump: str, begin: int) -> list[Any]:
    """Decode entry after entry, up to the end of the list."""
    values = []
    with suppress(*_MALFORMED):
        while True:
            value, end = _DECODER.raw_decode(dump, begin)
            values.append(value)
            match = _SEPARATOR.match(dump, end)
            if match is None:
                break
            begin = match.end()
    return values


def _entry(value: dict[str, Any], place_of: Callable[[Any], str]) -> Entry | None:
    """Return an entry; None for one that is not of the known form."""
    group = value.get("process_group")
    # A tuple in a pickle.
    if not (isinstance(group, (list, tuple)) and group and isinstance(group[0], str)):
        return None
    is_p2p = value.get("is_p2p") is True
    number = _number(value.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    name = value.get("profiling_name")
    if number is None or not isinstance(name, str) or not group[0]:
        return None
    description = group[1] if len(group) > 1 and isinstance(group[1], str) else ""
    operation = operation_of(name)
    peer = _PEER.search(name) if is_p2p else None
    return Entry(
        group=shown_name(group[0]),
        instance=_number(value.get("pg_id")) or 0,
        description=shown_description(description),
        number=number,
        signature=_signature(operation, value),
        is_p2p=is_p2p,
        peer=None if peer is None else int(peer[4]),
        created=(_number(value.get("time_created_ns")) or 0) / 1e9,
        thread_id=_number(value.get("thread_id")) or 0,
        retired=value.get("retired") is True,
        timeout=(_number(value.get("timeout_ms")) or 0) / 1000,
        place=place_of(value.get("frames")),
    )


def shown_name(name: str) -> str:
    """Return the name of a group as records have it."""
    return text.printable(name)[:_MAX_NAME]


def shown_description(description: str) -> str:
    """Return the description of a group; "" for one that its program did not give."""
    return "" if description == "undefined" else shown_name(description)


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:20])
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < _MAX_NUMBER else None


def operation_of(name: str) -> str:
    """Return the collective in the spelling of ``torch.distributed``.

    ``nccl:_all_gather_base`` and ``gloo:all_gather`` are one collective: two ranks that
    call it by different functions meet.
    """
    operation = name.rpartition(":")[2].partition(" ")[0].strip("_")
    for suffix in ("_base", "_into_tensor", "_tensor", "_single"):
        operation = operation.removesuffix(suffix)
    if operation.startswith("alltoall"):
        operation = "all_to_all"
    return text.printable(operation)[:_MAX_NAME] or "collective"


def _signature(operation: str, value: dict[str, Any]) -> Signature:
    plain = operation.removesuffix("_coalesced")
    which = _COMPARED.get(plain, "input_sizes")
    if which is None or plain.endswith("_v") or operation == COALESCED:
        return Signature(operation=operation)
    sizes = value.get(which)
    # Lists of tensors are spelled in several ways.
    if not (isinstance(sizes, list) and len(sizes) == 1 and _is_size(sizes[0])):
        return Signature(operation=operation)
    dtypes = value.get(which.replace("sizes", "dtypes"))
    has_elements = 0 not in sizes[0]
    dtype = dtypes[0] if has_elements and isinstance(dtypes, list) and dtypes else ""
    return Signature(
        operation=operation,
        sizes=text.shorten(str(sizes[0]), _MAX_SIZES),
        dtype=shown_name(dtype) if isinstance(dtype, str) else "",
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and all(_number(one) is not None for one in value)


def records_of(recorders: Iterable[Sequence[Entry]]) -> dict[str, GroupRecord]:
    """Return the record of each group.

    Args:
        recorders: The entries of each recorder, in order. A group that has entries in
            two, as one of gloo and NCCL has, is taken from the one with the entry that
            is pending, else with the latest.
    """
    found: dict[str, GroupRecord] = {}
    for entries in recorders:
        for name, record in _by_group(entries).items():
            if name not in found or _rank_of(found[name]) < _rank_of(record):
                found[name] = record
    return found


def _rank_of(record: GroupRecord) -> tuple[bool, float]:
    latest = record.recent[-1].created if record.recent else 0.0
    return record.pending is not None, latest


def _by_group(entries: Sequence[Entry]) -> dict[str, GroupRecord]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.group in groups or len(groups) < _MAX_GROUPS:
            groups.setdefault(entry.group, []).append(entry)
    return {name: _record(name, some) for name, some in groups.items()}


def _record(name: str, entries: Sequence[Entry]) -> GroupRecord:
    # Entries of a group that was destroyed stay, and may never retire.
    latest = max(entry.instance for entry in entries)
    entries = [entry for entry in entries if entry.instance == latest]
    # The members of a coalesced call never retire; the entry of the call does.
    coalesced = {
        (entry.is_p2p, entry.number)
        for entry in entries
        if entry.signature.operation == COALESCED
    }
    counted = [
        entry
        for entry in entries
        if entry.signature.operation == COALESCED
        or (entry.is_p2p, entry.number) not in coalesced
    ]
    # A point-to-point operation with one peer does not wait for one with another.
    collectives = [entry for entry in counted if not entry.is_p2p]
    pending = next((entry for entry in collectives if not entry.retired), None)
    ended = [
        entry
        for entry in collectives
        if entry.retired and (pending is None or entry.number < pending.number)
    ]
    if pending is None:
        pending = next((entry for entry in counted if not entry.retired), None)
    return GroupRecord(
        name=name,
        pending=pending,
        recent=tuple(ended[-MAX_RECENT:]),
        last_called=max((entry.number for entry in collectives), default=0),
        expected=_expected(pending, ended),
    )


def _expected(pending: Entry | None, ended: Sequence[Entry]) -> Signature | None:
    """Return what followed the last collective like the pending one."""
    if pending is None or pending.is_p2p:
        return None
    before = [entry.signature for entry in ended]
    for position in range(len(before) - 2, -1, -1):
        if before[position] == pending.signature:
            return before[position + 1]
    return None
