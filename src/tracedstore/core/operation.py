"""What one call was: the one table of Store methods, and the record of a call."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tracedstore import names
from tracedstore.core.identity import StoreIdentity

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A Store method, as far as recording it needs to know.

    Attributes:
        name: As the caller spells it.
        index: Its place in a store's row of series, given out by `methods_of`.
        parameters: Names by which a Python store may be given its arguments;
            torch's own stores take most of them by position only.
        keys: Whether the first argument is a key, a list of keys, or neither.
        blocks: May hold its caller for up to the store's timeout.
        size: Bytes of value that a call moved, from its arguments and result;
            None where a call moves no value.
        swapped: Whether a compare-and-set went through, from its arguments and
            result; None, or gives None, where a call is none.
        contended: The event that tells of compare-and-sets lost in a row.
        attributes: What else its span says, from its arguments and result.
    """

    name: str
    index: int = -1
    parameters: tuple[str, ...] = ("key",)
    keys: Literal["one", "many", "none"] = "one"
    blocks: bool = False
    size: Callable[[Arguments, Any], int] | None = None
    swapped: Callable[[Arguments, Any], bool | None] | None = None
    contended: str = names.CAS_CONTENDED
    attributes: Callable[[Arguments, Any], Mapping[str, Any]] | None = None

    def positional(self, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
        """Order keyword arguments as the table has them; unknown ones are dropped."""
        missing = self.parameters[len(args) :]
        return args + tuple(kwargs.get(name) for name in missing)

    def keys_of(self, args: Arguments) -> tuple[Iterable[Any], int]:
        """Find the keys among the arguments of a call, and how many they are."""
        if self.keys == "none" or not args:
            return (), 0
        if self.keys == "one":
            return (args[0],), 1
        keys = args[0]
        # A lone string where a list is due is the caller's mistake, which the
        # store answers for; taken as a sequence it would become many keys.
        if isinstance(keys, (str, bytes)) or not hasattr(keys, "__len__"):
            return (keys,), 1
        return keys, len(keys)


def size_of(value: Any) -> int:
    """Give the bytes a value takes in the store, 0 where that cannot be told."""
    if type(value) is bytes:  # what it nearly always is
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
        return None  # whichever it was, nothing changed: a way to read without waiting
    if isinstance(desired, str):
        desired = desired.encode("utf-8", "surrogatepass")
    # A missing key answers with the *expected* value, so only "is it what I wanted"
    # tells who won.
    return bool(result == desired)


# Everything of torch.distributed.Store that goes to the store's server or file.
# set_timeout, timeout and has_extended_api are answered on the spot and are not
# operations.
METHODS: tuple[Method, ...] = (
    Method(name="set", parameters=("key", "value"), size=_written(1)),
    Method(name="get", blocks=True, size=_read),
    Method(name="add", parameters=("key", "num")),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """What a store did inside one call, where that can be seen (EtcdStore).

    Attributes:
        requests: Requests made to the store's server.
        swaps_won: Compare-and-sets that went through.
        swaps_lost: Compare-and-sets that somebody else was faster than; each is
            one retry of the call.
        watch_timeouts: Watches that ended with nothing to tell.
    """

    requests: int = 0
    swaps_won: int = 0
    swaps_lost: int = 0
    watch_timeouts: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One finished call that observers are told about.

    Attributes:
        method: What was called.
        store: On which store.
        keys: The first keys, printable.
        key_count: How many keys there were.
        family: The family all these keys share, or "".
        started_ns: When it began, in nanoseconds since the epoch.
        duration_ns: How long it took, as its caller saw it.
        error: The exception that reached the caller.
        error_type: That exception's name in telemetry, "" on success.
        value_bytes: Bytes of value written or read.
        swapped: Whether a compare-and-set went through; None if it was none.
        losses_in_a_row: Compare-and-sets this store lost since it last won one.
        attempts: What happened inside the call, where that can be seen.
        thread_id: Which thread called.
        in_flight: Other calls that were in flight on this store when it returned.
        slow: It took longer than it should: over the slow threshold.
        admitted: The span budget has room for it, whatever else it is.
        attributes: What else its span says.
        explained: What else its event says, of a call that timed out.
        trace_id: Set by the spans observer, for those after it.
        span_id: Likewise.
    """

    method: Method
    store: StoreIdentity
    keys: tuple[str, ...]
    key_count: int
    family: str
    started_ns: int
    duration_ns: int
    error: BaseException | None = None
    error_type: str = ""
    value_bytes: int = 0
    swapped: bool | None = None
    losses_in_a_row: int = 0
    attempts: Attempts | None = None
    thread_id: int = 0
    in_flight: int = 0
    slow: bool = False
    admitted: bool = False
    attributes: Mapping[str, Any] | None = None
    explained: Mapping[str, Any] | None = None
    trace_id: str = field(default="", init=False)
    span_id: str = field(default="", init=False)

    @property
    def seconds(self) -> float:
        """How long it took, in seconds."""
        return self.duration_ns / 1e9

    @property
    def retries(self) -> int:
        """Compare-and-sets repeated inside this one call."""
        return self.attempts.swaps_lost if self.attempts else 0
