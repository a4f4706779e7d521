"""A rank that waits at a barrier until the test ends."""

import sys
import threading

import torch.distributed as dist

import tracedstore
from integration.harness import report, wait_until
from tracedstore.common.identity import process_identity

identity = process_identity()
assert identity.rank is not None
assert identity.world_size is not None
store = tracedstore.wrap(dist.TCPStore("127.0.0.1", int(sys.argv[1])))
threading.Thread(
    target=tracedstore.barrier,
    args=(store, identity.world_size, "first", 600),
    kwargs={"rank": identity.rank},
    daemon=True,
).start()
# Not on the connection that waits.
other = dist.TCPStore("127.0.0.1", int(sys.argv[1]))
wait_until(lambda: other.check([f"tracedstore/RANKS/{identity.rank}"]))
report()
sys.stdin.read()
