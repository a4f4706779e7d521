"""Scenarios that run on a bare and on a wrapped store to compare their outcomes.

A scenario is a list of steps on a fresh store. The outcome has the result or the
exception of each step. A step that fails does not end the scenario, because an
operation that a store lacks must fail in the same way when the store is wrapped.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from contract.harness import Step, call
from support.stores import SHORT

MINUTE = timedelta(minutes=1)
# The public attributes of Store; all but the property `timeout` are methods.
PUBLIC = tuple(name for name in dir(Store) if not name.startswith("_"))

VALUES: Mapping[str, str | bytes] = {
    "str": "value",
    "not-ascii-str": "wärt",
    "bytes": b"value",
    "empty-str": "",
    "empty-bytes": b"",
    "binary": bytes(range(256)),
    "not-utf-8": b"\xff\xfe\x00",
    # Too large for etcd, and for a TCPStore with libuv.
    "10-megabytes": b"x" * 10_000_000,
}
KEYS: Mapping[str, str | bytes] = {
    "empty": "",
    "space": "a key",
    "slashes": "//a//b/",
    "not-ascii": "schlüssel",
    "bytes": b"key",
    "not-utf-8": b"\xff\xfe",
    "long": "k" * 1000,
}


def _in_clone(step: Step) -> Step:
    def clone(store: Any) -> Any:
        return step(store.clone())

    return clone


def _get_if_present(key: str | bytes) -> Step:
    # If set failed, get would block for the store's timeout of five minutes.
    return lambda store: store.get(key) if store.check([key]) else "missing"


def _list_keys(store: Any) -> list[str]:
    return sorted(store.list_keys())


_list_keys.__name__ = "list_keys"

_SET_A_AND_B = [call("set", "a", "1"), call("set", "b", b"2")]

SCENARIOS: Mapping[str, list[Step]] = {
    **{
        f"value-{name}": [call("set", "k", value), _get_if_present("k")]
        for name, value in VALUES.items()
    },
    **{
        f"key-{name}": [
            call("set", key, "v"),
            call("check", [key]),
            _get_if_present(key),
            call("delete_key", key),
            call("add", key, 1),
        ]
        for name, key in KEYS.items()
    },
    "set-twice": [call("set", "k", "1"), call("set", "k", "2"), call("get", "k")],
    "add": [call("add", "n", 2), call("add", "n", -5), call("get", "n")],
    "add-zero": [call("add", "n", 0), call("check", ["n"])],
    "add-too-big": [call("add", "n", 2**62), call("add", "n", 2**63)],
    "add-to-number": [call("set", "n", "41"), call("add", "n", 1)],
    "add-to-text": [call("set", "n", "many"), call("add", "n", 1)],
    "check": [
        *_SET_A_AND_B,
        call("check", ["a"]),
        call("check", ("a", "b")),
        call("check", ["a", "missing"]),
        call("check", ["missing"]),
        call("check", []),
    ],
    "wait-ready": [
        *_SET_A_AND_B,
        call("wait", ["a", "b"]),
        call("wait", ["a"], MINUTE),
        call("wait", ("a", "b"), MINUTE),
        call("wait", []),
    ],
    "keys-from-generator": [
        *_SET_A_AND_B,
        lambda store: store.check(key for key in ("a", "b")),
        lambda store: store.wait(key for key in ("a", "b")),
        lambda store: store.multi_get(key for key in ("a", "b")),
    ],
    "compare-set-won": [
        call("set", "k", "old"),
        call("compare_set", "k", "old", b"new"),
        call("get", "k"),
    ],
    "compare-set-lost": [
        call("set", "k", "other"),
        call("compare_set", "k", "old", "new"),
        call("get", "k"),
    ],
    "compare-set-missing-expecting-nothing": [
        call("compare_set", "k", "", "new"),
        call("check", ["k"]),
    ],
    "compare-set-missing-expecting-something": [
        call("compare_set", "k", "old", "new"),
        call("check", ["k"]),
    ],
    "compare-set-not-utf-8": [
        call("set", "k", b"\xff"),
        call("compare_set", "k", b"\xff", b"\xfe\x00"),
        call("get", "k"),
    ],
    "delete-key": [
        call("set", "k", "v"),
        call("delete_key", "k"),
        call("delete_key", "k"),
        call("check", ["k"]),
    ],
    "num-keys": [call("num_keys"), *_SET_A_AND_B, call("num_keys")],
    "append": [
        call("append", "k", "a"),
        call("append", "k", b"\xff\x00"),
        call("append", "k", ""),
        _get_if_present("k"),
    ],
    "multi-get": [
        *_SET_A_AND_B,
        call("multi_get", ["b", "a", "b"]),
        call("multi_get", ("a",)),
        call("multi_get", []),
    ],
    "multi-set": [
        call("multi_set", ["a", "b"], ["1", b"\xff\x00"]),
        call("multi_get", ["a", "b"]),
        # No step has fewer values than keys: torch reads past the end of the values.
        call("multi_set", [], []),
    ],
    "list-keys": [_list_keys, *_SET_A_AND_B, _list_keys],
    "queue": [
        call("queue_len", "q"),
        call("queue_push", "q", "first"),
        call("queue_push", "q", b"\xff\x00"),
        call("queue_len", "q"),
        call("queue_pop", "q"),
        call("queue_pop", "q", False),
        call("queue_pop", "q", False),
        call("queue_pop", key="q", block=False),
    ],
    "barrier-of-one": [
        call("barrier", "b", 1),
        call("barrier", "c", 1, MINUTE),
        call("barrier", key="d", world_size=1, timeout=MINUTE),
    ],
    "clone-shares-data": [
        # add and not set: a TCPStore's set returns before the server has stored it.
        _in_clone(call("add", "in-clone", 1)),
        call("check", ["in-clone"]),
        call("set", "in-origin", "2"),
        _in_clone(call("get", "in-origin")),
        lambda store: isinstance(store.clone(), Store),
    ],
    "clone-inherits-timeout": [
        call("set_timeout", MINUTE),
        _in_clone(call("timeout")),
    ],
    "has-extended-api": [call("has_extended_api")],
    "timeout": [
        call("timeout"),
        call("set_timeout", MINUTE),
        call("timeout"),
        # C++ stores whole milliseconds and reads a number as seconds.
        call("set_timeout", timedelta(microseconds=1999)),
        call("timeout"),
        call("set_timeout", 1.5),
        call("timeout"),
        call("set_timeout", timedelta(0)),
        call("timeout"),
    ],
    "keywords": [
        call("set", "r", "v"),
        call("set", key="k", value="v"),
        call("get", key="r"),
        call("add", key="n", num=3),
        call("check", keys=["r"]),
        call("wait", keys=["r"]),
        call("wait", ["r"], override_timeout=MINUTE),
        call("wait", ["r"], timeout=MINUTE),
        call("multi_get", keys=["r"]),
        call("delete_key", key="r"),
    ],
    "unknown-attribute": [call("no_such_attribute"), call("_no_such_attribute")],
}
# Calls on a PrefixStore above a wrapper that do not reach it: see test_limits.
NOT_FROM_CPP = {"list-keys", "queue", "key-not-utf-8"}

# Every method is called with too few, too many and wrong arguments.
_WITHOUT_PARAMETERS = {"clone", "has_extended_api", "list_keys", "num_keys"}
INVALID_CALLS: Mapping[str, list[Step]] = {
    name: [
        *([] if name in _WITHOUT_PARAMETERS else [call(name)]),
        call(name, *[None] * 9),
        call(name, object),
        call(name, None, None),
        call(name, no_such_keyword=1),
    ]
    for name in PUBLIC
    if name != "timeout"
}

# Calls that time out. FileStore takes a second or two for each.
TIMEOUTS: Mapping[str, list[Step]] = {
    "get": [call("set_timeout", SHORT), call("get", "missing")],
    "wait": [call("set_timeout", SHORT), call("wait", ["missing"])],
    "wait-explicit": [
        call("set", "present", ""),
        call("wait", ["present", "missing"], SHORT),
    ],
    "multi-get": [call("set_timeout", SHORT), call("multi_get", ["missing"])],
    "barrier-explicit": [call("barrier", "b", 2, SHORT)],
}
# A PrefixStore's barrier waits for the default timeout of five minutes, whatever
# set_timeout() was called with. A PrefixStore has queues only over a C++ store.
BARRIER_TIMEOUT = [call("set_timeout", SHORT), call("barrier", "b", 2)]
POP_TIMEOUT = [call("set_timeout", SHORT), call("queue_pop", "empty")]
