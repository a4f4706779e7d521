"""Jobs of examples/kubernetes, run on this machine with the variables of their pods.

There is no cluster: each pod is a process, and what its controller would set comes from
`Workload`. Addresses of the rendezvous and the number of workers are changed.
"""

import json
import os
import re
import sys
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.harness import wait_until
from support.etcd import free_port
from support.kubernetes import Workload, load
from support.processes import running
from support.tools import ROOT

_TIMEOUT = 240
# Ranks stay until the test lets them go.
TRAIN = """\
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
while not os.path.exists("go"):
    time.sleep(0.1)
print("rank", dist.get_rank(), "is done", flush=True)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", ["pytorchjob", "leaderworkerset"])
def test_job(name: str, tmp_path: Path) -> None:
    """Two pods find each other; their agents are no ranks, and serve at localhost.

    The list for Prometheus has the addresses of the pods.
    """
    workload = Workload(load(ROOT / f"examples/kubernetes/{name}.yaml"))
    port = str(free_port())
    (tmp_path / "train.py").write_text(TRAIN)
    command = [*workload.container["command"], *workload.container["args"]]
    with ExitStack() as stack:
        pods = []
        for index in range(2):
            environ = {
                **os.environ,
                **workload.environment(index),
                # The program unsets these: here they are set, as in the pod.
                **(
                    {"RANK": str(index), "WORLD_SIZE": "16"} if "env" in command else {}
                ),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": port,
                "PET_NPROC_PER_NODE": "1",
                "TRACEDSTORE_HTTP_PORT": "0",
                "TRACEDSTORE_LOG_FORMAT": "json",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "TMPDIR": str(tmp_path),
            }
            log = stack.enter_context((tmp_path / f"{index}.log").open("w"))
            pods.append(
                stack.enter_context(
                    running(command, tmp_path, environ, errors=log.fileno())
                )
            )

        def serving(index: int) -> dict[str, Any] | None:
            text = (tmp_path / f"{index}.log").read_text("utf-8")
            found = re.search(r'\{.*"event": "telemetry.serving".*', text)
            event: dict[str, Any] | None = json.loads(found[0]) if found else None
            return event

        events = [wait_until(partial(serving, i), _TIMEOUT) for i in range(2)]
        ports = [event["url"].split(":")[2].partition("/")[0] for event in events]

        def targets() -> list[dict[str, Any]]:
            url = f"http://localhost:{ports[0]}/sd"
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
                found: list[dict[str, Any]] = json.load(response)
            return found if len(found) == 2 else []

        listed = wait_until(targets, _TIMEOUT)
        (tmp_path / "go").touch()
        outputs = [pod.communicate(timeout=_TIMEOUT)[0] for pod in pods]

    assert [pod.returncode for pod in pods] == [0, 0], outputs
    for rank, output in enumerate(outputs):
        assert f"rank {rank} is done" in output
    for index, (event, target) in enumerate(zip(events, listed, strict=True)):
        host = f"{workload.pod_name(index)}@gpu-{index}"
        run_id = workload.environment(index)["TRACEDSTORE_RUN_ID"]
        assert (event["host"], event["run_id"]) == (host, run_id)
        assert "rank" not in event
        assert target == {
            "targets": [f"10.0.0.{index + 1}:{ports[index]}"],
            "labels": {"__scheme__": "http", "run_id": run_id, "host": host},
        }
