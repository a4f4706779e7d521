"""EtcdV3Store: a torch.distributed.Store in an etcd cluster, over the v3 API."""

import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import inf
from operator import attrgetter
from typing import TypeAlias, TypeVar

from torch.distributed import DistStoreError, QueueEmptyError, Store

from tracedstore.common.errors import ConfigurationError
from tracedstore.common.keys import shown
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.etcd_errors import (
    EtcdOutcomeUnknownError,
    EtcdUnreachableError,
    WatchEnded,
)
from tracedstore.etcd.gateway import (
    INT64,
    MAX_OPERATIONS,
    Gateway,
    KeyValue,
    Range,
    events,
    range_of,
)
from tracedstore.etcd.http_pool import Tls, parse_endpoints
from tracedstore.etcd.namespace import (
    KeyRange,
    Namespace,
    Swap,
    content_of,
    deadline_of_call,
    number_in,
    split,
    swap,
    to_bytes,
    wrapped,
)
from tracedstore.recording.counters import Probe

T = TypeVar("T")
Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes

# The values of one transaction: a set takes two of its operations.
_MAX_SETS, _MAX_SET_BYTES = MAX_OPERATIONS // 2, 1024 * 1024
_NOTHING = (b"", b"")
# A key that exists is returned with a timeout of 0, too.
_FIRST_READ_SECONDS = 0.25
# A member that hangs leaves its watches silent. So a wait reads after this many
# seconds, then after twice as many, up to a maximum.
_READ_AGAIN_SECONDS, _MAX_READ_AGAIN_SECONDS = 5.0, 40.0
# Seconds between two watches that end at once, from the second one on.
_SHORT_WATCH_PAUSE = 0.2
_timeout_of: Callable[[Store], timedelta] = attrgetter("timeout")


class EtcdV3Store(Store):
    """A Store whose keys are in an etcd cluster (3.4 or newer).

    It has every operation of a Store, and talks to etcd's JSON API with the standard
    library. Creating one makes no request. Threads may share it, and a forked child may
    use its parent's.

    Reads and compare-and-sets are repeated when a server or the leader fails. A write
    whose answer is lost is not: it raises `EtcdOutcomeUnknownError`.

    Args:
        endpoints: The members of the cluster: ``"host:port"``, also with ``http://`` or
            ``https://``, several with commas or as a list. The port is 2379 by default.
        namespace: The name of the job. All stores with this name share their keys.
        timeout: How long a call blocks for a missing key; torch's default is five
            minutes.
        tls: The files for TLS, or a context of Python's ``ssl``. An endpoint without a
            scheme is reached over TLS if it is given.
        user: The user, where etcd has authentication enabled.
        password: The password of the user.

    Raises:
        ConfigurationError: An argument cannot be used.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        namespace: str,
        *,
        timeout: timedelta | None = None,
        tls: Tls | ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        super().__init__()
        if timeout is not None:
            self.set_timeout(timeout)
        self._endpoints = parse_endpoints(endpoints, secure=tls is not None)
        if isinstance(tls, Tls):
            tls = tls.context()
        elif tls is None and any(each.secure for each in self._endpoints):
            tls = Tls().context()
        if not isinstance(tls, ssl.SSLContext | None):
            raise ConfigurationError(
                f"tls must be a Tls or an ssl.SSLContext, not {type(tls).__name__}"
            )
        self._connect(
            namespace,
            Gateway(self._endpoints, context=tls, user=user, password=password),
        )

    def _connect(self, namespace: str, gateway: Gateway) -> None:
        self.namespace = namespace
        self._gateway = gateway
        self._namespace = Namespace(namespace, gateway)
        # torch's C++ clones stores and keeps no Python object alive.
        self._clones: list[EtcdV3Store] = []

    @property
    def host(self) -> str:
        """The host of the first endpoint."""
        return self._endpoints[0].host

    @property
    def port(self) -> int:
        """The port of the first endpoint."""
        return self._endpoints[0].port

    @property
    def scheme(self) -> str:
        """``https`` if the endpoints are reached over TLS, else ``http``."""
        return "https" if self._endpoints[0].secure else "http"

    def __repr__(self) -> str:
        servers = ",".join(map(str, self._endpoints))
        return f"EtcdV3Store({servers!r}, {self.namespace!r})"

    def clone(self) -> "EtcdV3Store":
        """Return another client of the same namespace, with the same timeout."""
        other = EtcdV3Store.__new__(EtcdV3Store)
        Store.__init__(other)
        other.set_timeout(_timeout_of(self))
        other._endpoints = self._endpoints  # noqa: SLF001 - of the same class
        other._connect(self.namespace, self._gateway.clone())  # noqa: SLF001
        self._clones.append(other)
        return other

    def close(self) -> None:
        """Close the connections; calls that are blocked in other threads raise.

        A clone is not closed with its original.
        """
        self._gateway.close()
        self._clones.clear()

    @property
    def transport(self) -> Gateway:
        """The connection to etcd, which others may share."""
        return self._gateway

    @property
    def probe(self) -> Probe:
        """Counts the requests inside the calls of a thread."""
        return self._gateway.traffic

    def has_extended_api(self) -> bool:
        """Return that append, multi_get and multi_set are there."""
        return True

    def set(self, key: Key, value: Value) -> None:
        """Write a value."""
        keys = self._namespace.range(key)
        self._namespace.set([(keys, to_bytes(value, "value"))])

    def get(self, key: Key) -> bytes:
        """Return the value of a key; blocks until it exists."""
        keys = self._namespace.range(key)

        def read(until: float) -> tuple[bytes | None, Range, int]:
            content = self._namespace.read(keys, until)
            data = content.data() if content.exists else None
            return data, keys.content, content.revision

        def from_events(found: list[KeyValue]) -> bytes:
            return content_of(keys, found, 0).data()

        return self._block([keys], read, from_events)

    def add(self, key: Key, num: int) -> int:
        """Add to the number in a key, 0 if it is missing; return the sum."""
        given: object = num
        if not isinstance(given, int) or not -INT64 <= num < INT64:
            raise TypeError("add() takes a whole number of 64 bits")
        keys = self._namespace.range(key)
        deadline = deadline_of_call()
        if num == 1:
            counted = self._namespace.count_up(keys)
            if isinstance(counted, int):
                return counted
            content = counted
        else:
            content = self._namespace.read(keys, deadline)
        while True:
            data = content.data()
            number = number_in(data)
            if number is None:
                raise ValueError("add() on a key whose value is no number")
            total = wrapped(number + num)
            # A read, unless the value is another text than that of its number.
            if num == 0 and data == b"%d" % total:
                return total
            result, content = swap(self._gateway, content, b"%d" % total, deadline)
            self._gateway.traffic.add_swap(won=result is Swap.WON)
            if result is Swap.WON:
                return total
            if result is Swap.SAME:
                raise EtcdOutcomeUnknownError(
                    "it is unknown whether etcd applied an add(): the answer was lost,"
                    " and another client may have written the same sum"
                )

    def compare_set(
        self, key: Key, expected_value: Value, desired_value: Value
    ) -> bytes:
        """Write the desired value if the key has the expected one.

        Returns the value of the key after that. As in torch's stores, an empty expected
        value matches a missing key, and a missing key that is not matched returns the
        expected value.
        """
        keys = self._namespace.range(key)
        expected = to_bytes(expected_value, "value")
        desired = to_bytes(desired_value, "value")
        deadline = deadline_of_call()
        content = self._namespace.read(keys, deadline)
        while True:
            if content.exists:
                data = content.data()
                if data != expected or data == desired:
                    return data
            elif expected:
                return expected
            result, content = swap(self._gateway, content, desired, deadline)
            if result is not Swap.LOST:
                return desired

    def append(self, key: Key, value: Value) -> None:
        """Append to the value of a key."""
        chunk = self._namespace.range(key).new_chunk()
        self._namespace.put(chunk, to_bytes(value, "value"))

    def check(self, keys: Iterable[Key]) -> bool:
        """Return whether all keys exist."""
        ranges = self._namespace.ranges(keys)
        missing, _ = self._namespace.missing(ranges, deadline_of_call())
        return not missing

    def wait(
        self, keys: Iterable[Key], override_timeout: timedelta | None = None
    ) -> None:
        """Block until all keys exist.

        Raises:
            DistStoreError: Some do not exist within the timeout; the text has them.
        """
        missing = self._namespace.ranges(keys)

        def read(until: float) -> tuple[bool | None, Range, int]:
            missing[:], at = self._namespace.missing(missing, until)
            return (
                (None, missing[0].everything, at) if missing else (True, _NOTHING, at)
            )

        self._block(missing, read, timeout=override_timeout)

    def delete_key(self, key: Key) -> bool:
        """Delete a key; return whether it existed."""
        return self._namespace.delete(self._namespace.range(key))

    # torch's C++ calls these two by its own spelling.
    def deleteKey(self, key: Key) -> bool:  # noqa: N802 - torch's spelling
        """Delete a key; return whether it existed."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802 - torch's spelling
        """Return the number of keys."""
        return self.num_keys()

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return all keys, without those that are queues only."""
        names: dict[str, None] = {}
        for key in self._namespace.scan():
            parts = split(self._namespace.prefix, key)
            if parts is not None and parts[1] != b"q":
                names[parts[0]] = None
        return list(names)

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the values of several keys; blocks until all exist."""
        ranges = self._namespace.ranges(keys)

        def read(until: float) -> tuple[list[bytes] | None, Range, int]:
            found = self._namespace.read_all(ranges, until)
            for content in found:
                if not content.exists:
                    return None, content.keys.content, content.revision
            return [content.data() for content in found], _NOTHING, 0

        return self._block(ranges, read)

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Write several keys; 64 keys or 1 MiB of values are one transaction."""
        # etcd refuses a transaction that writes a key twice: the last value counts.
        pairs = {
            self._namespace.range(key): to_bytes(value, "value")
            for key, value in zip(keys, values, strict=True)
        }
        batch: list[tuple[KeyRange, bytes]] = []
        size = 0
        for pair in pairs.items():
            size += len(pair[1])
            if batch and (len(batch) == _MAX_SETS or size > _MAX_SET_BYTES):
                self._namespace.set(batch)
                batch, size = [], len(pair[1])
            batch.append(pair)
        if batch:
            self._namespace.set(batch)

    def queue_push(self, key: Key, value: Value) -> None:
        """Append an entry to a queue."""
        entry = self._namespace.range(key).new_entry()
        self._namespace.put(entry, to_bytes(value, "value"))

    def queue_len(self, key: Key) -> int:
        """Return the number of entries in a queue."""
        return self._namespace.queue_length(self._namespace.range(key))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Remove and return the oldest entry of a queue.

        Raises:
            QueueEmptyError: It is empty, and the call must not block.
        """
        keys = self._namespace.range(key)

        def pop(until: float) -> tuple[bytes | None, Range, int]:
            data, at = self._namespace.pop(keys, until)
            return data, keys.queue, at

        if block:
            return self._block([keys], pop)
        data, _, _ = pop(deadline_of_call())
        if data is None:
            raise QueueEmptyError("queue is empty")
        return data

    def _block(
        self,
        keys: Sequence[KeyRange],
        read: Callable[[float], tuple[T | None, Range, int]],
        from_events: Callable[[list[KeyValue]], T] | None = None,
        timeout: timedelta | None = None,
    ) -> T:
        """Read until there is a result, and watch in between.

        The watch begins at the revision after the read, so that no change is lost
        between the two. When it breaks, because a server restarts, the leader changes
        or the revision is compacted, this reads again.

        Args:
            keys: What the call waits for, for the text of its exception.
            read: Reads within a deadline. Returns the result, or None, the range whose
                next change may bring one, and the revision of the read.
            from_events: Returns the result from the first write to a range that was
                empty.
            timeout: When to give up; by default the timeout of the store.

        Raises:
            DistStoreError: The timeout has passed.
        """
        deadline = _Deadline(_timeout_of(self) if timeout is None else timeout, keys)
        traffic = self._gateway.traffic
        pause, until = _READ_AGAIN_SECONDS, deadline.first_read_at
        ended = -inf
        while True:
            try:
                result, unread, revision = read(until)
            except EtcdUnreachableError as error:
                deadline.check(str(error))
                raise
            if result is not None:
                return result
            deadline.check()
            until = deadline.at
            watch_until = min(deadline.at, time.monotonic() + pause)
            try:
                found = next_puts(self._gateway, unread, revision + 1, watch_until)
                if from_events is not None:
                    return from_events(found)
            except TimeoutError as error:
                if raised_by_handler(error):
                    raise
                traffic.add_watch_timeout()
                pause = min(2 * pause, _MAX_READ_AGAIN_SECONDS)
                deadline.check()
            except WatchEnded:
                traffic.add_recovery("watch_restart")
                deadline.check()
                now = time.monotonic()
                if now - ended < _SHORT_WATCH_PAUSE:
                    time.sleep(max(0.0, min(_SHORT_WATCH_PAUSE, deadline.at - now)))
                ended = time.monotonic()


class _Deadline:
    """When a blocking call times out, and with which exception."""

    def __init__(self, timeout: timedelta, keys: Sequence[KeyRange]) -> None:
        self._timeout = timeout
        self._keys = keys
        started = time.monotonic()
        self.at = started + timeout.total_seconds()
        self.first_read_at = max(self.at, started + _FIRST_READ_SECONDS)

    def check(self, cause: str = "") -> None:
        """Raise the exception of the call if its time is over."""
        if time.monotonic() < self.at:
            return
        milliseconds = round(self._timeout.total_seconds() * 1000)
        keys = ", ".join(shown(each.name for each in self._keys))
        text = f"Wait timeout after {milliseconds}ms, keys: {keys}"
        raise DistStoreError(f"{text}; {cause}" if cause else text)


def next_puts(
    transport: Gateway, keys: Range, revision: int, until: float
) -> list[KeyValue]:
    """Return the keys of the next write in a range.

    Raises:
        TimeoutError: There was none.
        WatchEnded: The watch broke, or the revision was compacted.
    """
    request = range_of(keys, start_revision=str(revision), filters=["NODELETE"])
    with transport.watch(request, until) as messages:
        for message in messages:
            if message.get("canceled"):
                raise WatchEnded(str(message.get("cancel_reason", "canceled")))
            if found := events(message):
                # One transaction may write several keys of the range.
                first = min(each.modified for _, each in found)
                return [each for _, each in found if each.modified == first]
    raise WatchEnded
