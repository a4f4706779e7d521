"""The table of Store methods, and the record of one call."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, Literal

from tracedstore import names
from tracedstore.common.identity import StoreIdentity

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A Store method, as far as recording it needs to know.

    Attributes:
        name: As the caller spells it.
        index: Its index in a store's tuple of series, assigned by `methods_of`.
        parameters: The names of its parameters. Python stores take keywords; torch's
            own stores take most arguments by position only.
        keys: Whether the first argument is a key, a list of keys, or neither.
        blocks: May hold its caller for up to the store's timeout.
        size: Returns the bytes of value that a call moved, from its arguments and
            result; None for a method that moves no value.
        swapped: Returns whether a compare-and-set was won, from its arguments and
            result; None for a method, or a call, that is no compare-and-set.
        repeats: Who repeats a compare-and-set that the call has lost: its caller; or
            the call itself, in a store that makes several requests inside one call and
            counts them (`Probe`).
        contended: The event for compare-and-sets lost in a row.
        attributes: Returns further span attributes, from its arguments and result.
    """

    name: str
    index: int = -1
    parameters: tuple[str, ...] = ("key",)
    keys: Literal["one", "many", "none"] = "one"
    blocks: bool = False
    size: Callable[[Arguments, Any], int] | None = None
    swapped: Callable[[Arguments, Any], bool | None] | None = None
    repeats: Literal["nobody", "caller", "call"] = "nobody"
    contended: str = names.CAS_CONTENDED
    attributes: Callable[[Arguments, Any], Mapping[str, Any]] | None = None

    def positional(self, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
        """Return all arguments by position; unknown keywords are dropped."""
        missing = self.parameters[len(args) :]
        return args + tuple(kwargs.get(name) for name in missing)

    def keys_of(self, args: Arguments) -> tuple[Iterable[Any], int]:
        """Return the keys among the arguments of a call, and their number."""
        if self.keys == "none" or not args:
            return (), 0
        if self.keys == "one":
            return (args[0],), 1
        keys = args[0]
        # A string instead of a list is the caller's mistake, which the store raises
        # for; taken as a sequence it would become many keys.
        if isinstance(keys, (str, bytes)) or not hasattr(keys, "__len__"):
            return (keys,), 1
        return keys, len(keys)


def size_of(value: Any) -> int:
    """Return the bytes that a value takes in the store, 0 where that is unknown."""
    if type(value) is bytes:  # the common case, first
        return len(value)
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    return value.nbytes if isinstance(value, memoryview) else 0


def _written(position: int) -> Callable[[Arguments, Any], int]:
    def size(args: Arguments, _result: Any) -> int:
        return size_of(args[position]) if len(args) > position else 0

    return size


def _all_written(args: Arguments, _result: Any) -> int:
    return _all_read(args, args[1]) if len(args) > 1 else 0


def _read(_args: Arguments, result: Any) -> int:
    return size_of(result)


def _all_read(_args: Arguments, result: Any) -> int:
    return sum(map(size_of, result)) if isinstance(result, (list, tuple)) else 0


def _swapped(args: Arguments, result: Any) -> bool | None:
    if len(args) < 3:  # noqa: PLR2004 - key, expected, desired
        return False
    expected, desired = args[1], args[2]
    if expected == desired:
        return None  # nothing can change: it reads the key without waiting
    if isinstance(desired, str):
        desired = desired.encode("utf-8", "surrogatepass")
    # For a missing key the result is the *expected* value, so only a result equal to
    # the desired value means that the compare-and-set was won.
    return bool(result == desired)


# The methods of torch.distributed.Store that go to the store's server or file.
# set_timeout, timeout and has_extended_api do not, and are not operations.
METHODS: tuple[Method, ...] = (
    Method(name="set", parameters=("key", "value"), size=_written(1)),
    Method(name="get", blocks=True, size=_read),
    Method(name="add", parameters=("key", "num"), repeats="call"),
    Method(name="check", parameters=("keys",), keys="many"),
    Method(name="wait", parameters=("keys",), keys="many", blocks=True),
    Method(
        name="compare_set",
        parameters=("key", "expected_value", "desired_value"),
        size=_written(2),
        swapped=_swapped,
    ),
    Method(name="delete_key"),
    Method(name="num_keys", parameters=(), keys="none"),
    Method(name="append", parameters=("key", "value"), size=_written(1)),
    Method(
        name="multi_get",
        parameters=("keys",),
        keys="many",
        blocks=True,
        size=_all_read,
    ),
    Method(
        name="multi_set",
        parameters=("keys", "values"),
        keys="many",
        size=_all_written,
    ),
    Method(name="queue_push", parameters=("key", "value"), size=_written(1)),
    Method(name="queue_pop", parameters=("key", "block"), blocks=True, size=_read),
    Method(name="queue_len"),
    Method(name="list_keys", parameters=(), keys="none"),
    Method(name="barrier", parameters=("key", "world_size"), blocks=True),
    Method(name="clone", parameters=(), keys="none"),
)


@dataclass(frozen=True, slots=True)
class EtcdRequest:
    """One request of an EtcdV3Store.

    Attributes:
        method: The method: ``range``, ``txn``, ``watch``, ...
        server: The member of the cluster.
        result: ``ok``, ``failed``, or ``unknown`` if its answer was lost.
        started_ns: When it was sent, in nanoseconds since the epoch.
        duration_ns: How long it took.
    """

    method: str
    server: str
    result: str
    started_ns: int
    duration_ns: int


@dataclass(slots=True, kw_only=True)
class Attempts:
    """The requests that a store made inside one call (EtcdStore, EtcdV3Store).

    The store counts in it while the call lasts; after that nothing changes it.

    Attributes:
        requests: Requests made to the store's server.
        swaps_won: Compare-and-sets won.
        swaps_lost: Compare-and-sets lost to another writer; each is one retry.
        watch_timeouts: Watches that ended without a change.
        recoveries: EtcdV3Store: retries, failovers, log-ins and watches opened again.
        shown: EtcdV3Store: the first requests.
    """

    requests: int = 0
    swaps_won: int = 0
    swaps_lost: int = 0
    watch_timeouts: int = 0
    recoveries: int = 0
    shown: tuple[EtcdRequest, ...] = ()


class Reason(Flag):
    """Why a call is notable; `Recorder` decides, and the signals follow.

    Attributes:
        SAMPLED: The span budget had room for it.
        SLOW: It took at least ``slow_after``.
        OVERDUE: It took longer than a call of its kind should: ``slow_after`` for a
            call that does not block, ``stall_after`` for one that may.
        FAILED: It raised, and that is not an ordinary answer.
        RETRIED: It repeated compare-and-sets.
        CONTENDED: Its store lost ``contended_after`` compare-and-sets in a row.
    """

    NONE = 0
    SAMPLED = auto()
    SLOW = auto()
    OVERDUE = auto()
    FAILED = auto()
    RETRIED = auto()
    CONTENDED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One finished, notable call.

    Attributes:
        method: The Store method.
        store: The store.
        keys: The first keys, printable.
        key_count: Number of keys.
        family: The family that all these keys share, or "".
        started_ns: When it began, in nanoseconds since the epoch.
        duration_ns: How long it took, as its caller saw it.
        reasons: Why it is notable.
        error: The exception that reached the caller.
        error_message: The first line of its text; "" where it may quote a value.
        error_type: That exception's name in telemetry, "" on success.
        value_bytes: Bytes of value written or read.
        swapped: Whether a compare-and-set was won; None if it was none.
        losses_in_a_row: Compare-and-sets that this store lost since it last won one.
        attempts: The requests inside the call, where they are counted.
        thread_id: The thread that made it.
        in_flight: Other calls in flight on this store when it returned.
        attributes: Further span attributes.
        explained: Event fields on whom a call that stalled or failed waited for.
        trace_id: Set by the spans observer, for the observers after it.
        span_id: The same.
    """

    method: Method
    store: StoreIdentity
    keys: tuple[str, ...]
    key_count: int
    family: str
    started_ns: int
    duration_ns: int
    reasons: Reason = Reason.NONE
    error: BaseException | None = None
    error_message: str = ""
    error_type: str = ""
    value_bytes: int = 0
    swapped: bool | None = None
    losses_in_a_row: int = 0
    attempts: Attempts | None = None
    thread_id: int = 0
    in_flight: int = 0
    attributes: Mapping[str, Any] | None = None
    explained: Mapping[str, Any] | None = None
    trace_id: str = field(default="", init=False)
    span_id: str = field(default="", init=False)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.duration_ns / 1e9

    @property
    def retries(self) -> int:
        """Compare-and-sets repeated inside this one call."""
        return self.attempts.swaps_lost if self.attempts else 0
