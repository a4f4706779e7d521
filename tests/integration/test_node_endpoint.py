"""The endpoint of a node: real torchrun jobs, whose agent serves their workers."""

import json
import os
import re
import signal
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families

from integration.conftest import StartCommand
from integration.harness import Running, pause, wait_until
from support.certificates import Authority
from support.torchrun import one_node
from tracedstore import names
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.job_reading import read_job
from tracedstore.tools.attach.rank_endpoints import scrape_ranks
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.processes

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SCRIPT = """\
import ctypes, os, signal, time
import prometheus_client
import torch.distributed as dist

def hold_the_gil(*_):
    ctypes.PyDLL(None).sleep(8)

signal.signal(signal.SIGUSR1, hold_the_gil)
dist.init_process_group("gloo")
steps = prometheus_client.Counter("app_steps", "Steps.", ["rank", "attempt"])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
steps.labels("mine", attempt).inc(3, exemplar={"trace_id": "abc"})
dist.barrier()
address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
# In one write: torchrun starts workers with -u, and they share standard error.
line = " ".join(["ready", os.environ["RANK"], str(os.getpid()), *address])
os.write(2, f"\\n{line}\\n".encode())
while True:
    time.sleep(0.05)
"""


class Job:
    """A torchrun job whose ranks are ready."""

    def __init__(self, process: Running, url: str) -> None:
        self.process = process
        self.url = url

    def pids(self) -> dict[int, int]:
        """Return the pids of the workers that were started last."""
        found = re.findall(r"^ready (\d) (\d+)", self.process.errors(), re.MULTILINE)
        return {int(rank): int(pid) for rank, pid in found}

    def store(self) -> str:
        """Return the address of the workers' store."""
        found = re.findall(
            r"^ready \d \d+ (\S+) (\d+)", self.process.errors(), re.MULTILINE
        )
        return "tcp://{}:{}".format(*found[-1])

    def get(self, page: str = "/metrics", accept: str = "") -> str:
        """Request a page of the agent."""
        return request(self.url.replace("/metrics", page), accept=accept)

    def families(self, accept: str = "", page: str = "/metrics") -> dict[str, Metric]:
        """Scrape the agent; fails if a family is there twice."""
        text = self.get(page, accept)
        parse = openmetrics_families if OPENMETRICS in accept else text_families
        found = list(parse(text))
        assert len({family.name for family in found}) == len(found)
        return {family.name: family for family in found}

    def up(self) -> dict[str, float]:
        """Scrape the agent; return whether each rank is up.

        The scrape ends, though a worker that is stopped never answers.
        """
        # Pages are cached by this header.
        unique = f"text/plain;n={time.monotonic_ns()}"
        family = self.families(unique).get(names.WORKER_UP.name)
        samples = family.samples if family else []
        return {sample.labels["rank"]: sample.value for sample in samples}


def request(url: str, *, accept: str = "", **options: Any) -> str:
    """Request a page."""
    headers = {"Accept": accept, **options.pop("headers", {})}
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=60, **options) as response:
        return str(response.read(), "utf-8")


StartJob = Callable[..., Job]


@pytest.fixture
def start_job(start_command: StartCommand, tmp_path: Path) -> StartJob:
    """Return a function that starts a job of two ranks below tracedstore-run."""

    def start(*options: str, **env: str) -> Job:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        environ = {
            **one_node(),
            "TRACEDSTORE_HTTP_PORT": "0",
            "TRACEDSTORE_RUN_ID": "job-7",
            "TRACEDSTORE_LOG_FORMAT": "json",
            "XDG_RUNTIME_DIR": str(tmp_path),
            # Without it, gloo reads addresses of the attempt before.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **env,
        }
        process = start_command(
            *("tracedstore-run", "torchrun", "--nproc-per-node", "2"),
            *("--monitor-interval", "5", *options, script),
            **environ,
        )
        wait_until(lambda: process.errors().count("\nready ") == 2)
        serving = process.events(names.TELEMETRY_SERVING)
        (agent,) = [event["url"] for event in serving if "rank" not in event]
        return Job(process, agent)

    return start


class TestNode:
    """One target a node."""

    def test_pages(
        self, start_job: StartJob, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The agent's pages have all ranks, and the commands read them."""
        job = start_job()

        # Only the agent serves.
        assert len(job.process.events(names.TELEMETRY_SERVING)) == 1
        assert job.up() == {"0": 1, "1": 1}
        for accept in ("", OPENMETRICS):
            families = job.families(accept)
            ranks = {
                sample.labels.get("rank")
                for sample in families[names.BUILD_INFO.name].samples
            }
            assert ranks >= {"0", "1"}
            # The waits of all ranks, and those of each.
            waits = families[names.WAIT_DURATION.name].samples
            assert not any("rank" in sample.labels for sample in waits)
            of_ranks = job.families(accept, "/metrics/ranks")
            by_rank = of_ranks[names.WAIT_DURATION.name].samples
            assert {sample.labels.get("rank") for sample in by_rank} >= {"0", "1"}
            # The agent's own.
            (state,) = families[names.RENDEZVOUS_COMPLETE.name].samples
            assert state.labels == {"backend": "c10d"}
            steps = [s for s in families["app_steps"].samples if s.value == 3]
            assert [sample.labels for sample in steps] == [
                {
                    "rank": rank,
                    "local_rank": rank,
                    # As Prometheus renames a label that the target has too.
                    "exported_rank": "mine",
                    "attempt": "0",
                }
                for rank in ("0", "1")
            ]
            exemplars = [sample.exemplar and sample.exemplar.labels for sample in steps]
            expected = {"trace_id": "abc"} if accept else None
            assert exemplars == [expected] * 2

        (target,) = json.loads(job.get("/sd"))
        netloc = job.url.removeprefix("http://").removesuffix("/metrics")
        assert target["targets"] == [netloc]
        assert set(target["labels"]) == {"__scheme__", "run_id", "host"}
        assert target["labels"]["run_id"] == "job-7"
        assert main(["sd", "--store", job.store()]) == 0
        assert json.loads(capsys.readouterr().out) == [target]

        status = read_job(Address(job.store()), TokenPolicy())
        pids = {info.rank: info.pid for info in status.replies}
        assert pids == job.pids()
        assert {reply.state for reply in status.replies.values()} == {"answered"}
        pages = scrape_ranks(status.replies, TokenPolicy())
        assert {info.rank: _ranks(page) for info, page in pages.items()} == {
            0: {"0"},
            1: {"1"},
        }

    def test_silent_workers(self, start_job: StartJob) -> None:
        """Workers that cannot answer are samples; those started next are served."""
        job = start_job("--max-restarts", "1")
        pids = job.pids()

        pause(pids[1])
        assert job.up() == {"0": 1, "1": 0}
        assert "0" not in _missing(job)
        assert "1" in _missing(job)
        status = read_job(Address(job.store()), TokenPolicy())
        errors = {info.rank: reply.error for info, reply in status.replies.items()}
        assert errors == {0: "", 1: "it does not answer its agent"}
        os.kill(pids[1], signal.SIGCONT)
        wait_until(lambda: job.up() == {"0": 1, "1": 1})

        os.kill(pids[0], signal.SIGUSR1)
        wait_until(lambda: job.up() == {"0": 0, "1": 1})
        wait_until(lambda: job.up() == {"0": 1, "1": 1})

        os.kill(pids[1], signal.SIGKILL)
        # torchrun looks after its workers every five seconds.
        assert job.up() == {"0": 1, "1": 0}
        wait_until(lambda: job.process.errors().count("\nready ") == 4)
        assert job.pids().values() != pids.values()

        def attempts() -> set[str]:
            family = job.families().get("app_steps")
            samples = family.samples if family else []
            return {sample.labels["attempt"] for sample in samples}

        wait_until(lambda: attempts() == {"1"})
        assert job.up() == {"0": 1, "1": 1}
        assert len(json.loads(job.get("/sd"))) == 1


def _missing(job: Job) -> set[str]:
    """Return the ranks without a status on the agent's page."""
    workers = json.loads(job.get("/inflight"))["workers"]
    return {rank for rank, status in workers.items() if status is None}


def _ranks(page: bytes) -> set[str]:
    return set(re.findall(r'[{,]rank="(\d)"', page.decode()))


def test_scope_rank(start_job: StartJob) -> None:
    """With `http_scope=rank` each worker serves itself, and the agent only itself."""
    job = start_job(TRACEDSTORE_HTTP_SCOPE="rank")

    serving = job.process.events(names.TELEMETRY_SERVING)
    ranks = {event["rank"]: event["url"] for event in serving if "rank" in event}
    assert ranks.keys() == {0, 1}
    assert job.up() == {}
    assert "app_steps" not in job.families()
    assert "workers" not in json.loads(job.get("/inflight"))
    for rank, url in ranks.items():
        assert "app_steps_total" in request(url)
        listed = json.loads(request(url.replace("/metrics", "/sd")))
        assert [target["labels"]["rank"] for target in listed] == ["0", "1"]
        assert listed[rank]["targets"][0] in url


def test_access(start_job: StartJob, tmp_path: Path) -> None:
    """Token and TLS apply to the endpoint of a node."""
    authority = Authority(tmp_path, "authority")
    pair = authority.sign("server")
    job = start_job(
        TRACEDSTORE_HTTP_TOKEN="s3cret",
        TRACEDSTORE_HTTP_CERT=str(pair.certificate),
        TRACEDSTORE_HTTP_KEY=str(pair.key),
    )
    tls = ssl.create_default_context(cafile=str(authority.certificate))

    assert job.url.startswith("https://")
    with pytest.raises(HTTPError, match="401"):
        request(job.url, context=tls)
    bearer = {"Authorization": "Bearer s3cret"}
    page = request(job.url, context=tls, headers=bearer)
    assert _ranks(page.encode()) == {"0", "1"}
    (target,) = json.loads(
        request(job.url.replace("/metrics", "/sd"), context=tls, headers=bearer)
    )
    assert target["labels"]["__scheme__"] == "https"
