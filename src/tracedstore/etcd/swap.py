"""Compare-and-set of the content of a key, with a definite result after a lost answer.

The condition is on revisions, so it holds at most once, however often the request is
sent. After a lost answer the request is repeated. If it fails then, the first change of
the value since the read shows whether the lost one had been applied.
"""

from enum import Enum, auto

from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.etcd_errors import EtcdError, EtcdOutcomeUnknownError, WatchEnded
from tracedstore.etcd.gateway import Gateway
from tracedstore.etcd.layout import Content, content_of
from tracedstore.etcd.messages import (
    KeyValue,
    Message,
    delete,
    events,
    key_values,
    put,
    range_of,
    read,
    responses,
    revision,
)

_MAX_ATTEMPTS = 20


class Swap(Enum):
    """The result of a compare-and-set.

    Attributes:
        WON: It wrote.
        LOST: Another client wrote before it.
        SAME: An answer was lost, and the same value was written: by this client or by
            another one.
    """

    WON = auto()
    LOST = auto()
    SAME = auto()


def swap(
    transport: Gateway, old: Content, new: bytes, deadline: float
) -> tuple[Swap, Content]:
    """Replace the content of a key, unless it has changed.

    Returns:
        The result, and the content that was found if it is not `Swap.WON`.

    Raises:
        EtcdOutcomeUnknownError: The answer was lost, and etcd no longer has the history
            that shows the result.
    """
    request: Message = {
        "compare": old.unchanged(),
        "success": [delete(old.keys.additions), put(old.keys.value, new)],
        "failure": [read(old.keys.content)],
    }
    answer, lost = _send(transport, request, deadline)
    succeeded = bool(answer.get("succeeded"))
    now = old
    if not succeeded:
        (found,) = responses(answer, 1)
        now = content_of(old.keys, key_values(found), revision(answer))
    if lost is None:
        return (Swap.WON if succeeded else Swap.LOST), now
    if not succeeded and now.modified == old.modified != 0:
        return Swap.LOST, now  # only the counter or the chunks have changed
    if not succeeded and now.value is None and old.value is None:
        raise lost  # the history may have no change to wait for
    written = _first_change(transport, old, deadline)
    if written is None:
        raise lost
    is_put, change = written
    if succeeded:
        if change.modified != revision(answer):
            raise lost  # the lost one was applied, and then undone
        return Swap.WON, now
    same = is_put and change.value == new
    return (Swap.SAME if same else Swap.LOST), now


def _send(
    transport: Gateway, request: Message, deadline: float
) -> tuple[Message, EtcdOutcomeUnknownError | None]:
    """Send a transaction until it is answered; return whether an answer was lost."""
    lost: EtcdOutcomeUnknownError | None = None
    for _ in range(_MAX_ATTEMPTS):
        try:
            answer = transport.call("kv/txn", request, deadline, repeatable=False)
        except EtcdOutcomeUnknownError as error:
            lost = error
        except EtcdError as error:
            # Whatever fails now, an earlier one may have been applied.
            raise lost or error from error.__cause__
        else:
            return answer, lost
    raise lost or EtcdOutcomeUnknownError


def _first_change(
    transport: Gateway, old: Content, deadline: float
) -> tuple[bool, KeyValue] | None:
    """Return the first change of a value since it was read; None if it is forgotten."""
    request = range_of(old.keys.value, start_revision=str(old.revision + 1))
    for _ in range(_MAX_ATTEMPTS):
        try:
            with transport.watch(request, deadline) as messages:
                for message in messages:
                    if message.get("canceled"):
                        return None
                    if found := events(message):
                        return found[0]
        except WatchEnded:
            continue
        except (TimeoutError, EtcdError) as error:
            if raised_by_handler(error):
                raise
            return None
    return None
