"""The relay of benchmarks/job_traffic.py, between a real client and a real server."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from harness import tcp_server
from store_requests import counting_relay

# The requests of a call, after those that connect.
REQUESTS = {
    "job set": 1,
    "job wait": 4,  # of wait, get, multi_get and queue_pop
    "job get": 1,
    "job add": 1,
    "job check": 2,
    "job compare_set": 1,
    "job append": 1,
    "job multi_set": 2,
    "job multi_get": 1,
    "num_keys num_keys": 1,
    "job delete_key": 1,
    "job queue_push": 1,
    "job queue_pop": 1,
    "job queue_len": 1,
    "cancel_wait cancel_wait": 1,
    "registration set": 1,
}


@pytest.mark.processes
def test_all_requests_of_torch_are_counted() -> None:
    """A request whose length is misread would hide those after it."""
    many = [f"key/{number}" for number in range(5000)]  # arrive in several parts
    with tcp_server() as port, counting_relay(port) as relay:
        # torch's stubs lack some methods.
        store: Any = dist.TCPStore("127.0.0.1", relay.port, None, is_master=False)
        relay.begin("calls")
        store.set("a", "1")
        store.get("a")
        store.add("number", 1)
        store.check(["a", "b"])
        store.compare_set("a", "1", "2")
        store.append("a", "3")
        store.multi_set(["c", "d"], ["1", "2"])
        store.multi_set(many, ["value"] * len(many))
        store.multi_get(["c", "d"])
        store.check(many)
        store.num_keys()
        store.delete_key("c")
        store.queue_push("queue", "1")
        store.queue_pop("queue")
        store.queue_len("queue")
        with pytest.raises(dist.DistStoreError):
            store.wait(["absent"], timedelta(milliseconds=10))
        store.set("tracedstore/RANKS/0", "{}")
        store.check([])  # has a reply: everything before is counted
        counted = relay.requests().summary("calls")["types"]

    assert counted.pop("check check", 0) <= 1
    assert counted == REQUESTS
