"""Runs every command that README and docs show.

A test changes only the names of hosts, ports, and the number of processes.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

import tracedstore
from integration.harness import wait_until
from support import processes
from support.etcd import EtcdServer, free_port
from support.flight_entries import entry, write_dumps
from support.log_events import completed_event
from support.otlp_receiver import OTLPReceiver, resources_of
from support.pseudo_terminal import Terminal
from support.tools import ROOT
from support.torchrun import one_node
from tracedstore.common.identity import host_name
from tracedstore.tools.cli.main import COMMANDS, make_parser

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# One test below runs all commands of such a page.
WHOLE_PAGES = {
    "torchrun.md",
    "zero-code.md",
    "configuration.md",
    "otlp.md",
    "demo.md",
}
# The beginnings of the commands of other pages that tests below run.
RUN_BELOW = {
    "make demo",
    "make test",
    "make bench",
    "tracedstore-run torchrun",
    "torchrun --nnodes 2",
    "TRACEDSTORE_HTTP_PORT=27400 tracedstore-run torchrun",
    "tracedstore sd",
    "tracedstore stacks",
    "tracedstore status",
    "tracedstore top",
    "tracedstore report",
    "tracedstore dashboards",
}
# Without --store; integration/test_local_jobs.py runs these.
FOUND_STATUS, FOUND_STACKS = "tracedstore status", "tracedstore stacks"
FOUND_TOP = "tracedstore top"
# It needs a terminal. The other commands of its page do not.
DEMO_ON_TOP = "tracedstore demo --top"
# The tests have no Docker. tests/dashboards/test_compose.py checks the compose file
# against the files it mounts, and integration/test_stack.py runs the same programs.
# They have no Slurm and no Kubernetes either. integration/test_slurm.py runs the batch
# scripts with a fake of srun, and dashboards/test_kubernetes.py validates manifests.
NOT_RUN = {
    "docker compose up --build",
    "TARGETS=/shared/prometheus/targets sbatch many-nodes.sbatch",
    "kubectl apply -k manifests/",
    "kubectl apply --namespace team-a -f manifests/jobs/",
    "kubectl apply -f examples/kubernetes/indexed-job.yaml",
    (
        "kubectl exec $(kubectl get pods --selector app.kubernetes.io/instance=train"
        " --field-selector status.phase=Running --output name | head -n 1) --"
        " tracedstore status"
    ),
    "kubectl exec train-0-abcde -- tracedstore status",
    "kubectl port-forward pod/train-0-x7f9k 27400",
    "srun --jobid 4711 --overlap --nodes 1 --ntasks 1 tracedstore status",
    (
        "kubectl logs --selector app.kubernetes.io/instance=train --prefix --tail=-1"
        " --max-log-requests=64 > logs/train.log"
    ),
}
BIN = Path(sys.executable).parent

# Seconds. These tests start up to ten processes each, while other workers run tests.
_TIMEOUT = 240
SMALL_JOB = (
    "--ranks 2 --simulated-ranks 16 --capacity 0.01 --idle 1 --barrier-timeout 1"
    " --hang 1"
)

pytestmark = pytest.mark.processes


def blocks(page: Path) -> list[str]:
    """Return the console blocks of a page, without comments."""
    texts = re.findall(r"```console\n(.*?)\n```", page.read_text("utf-8"), re.DOTALL)
    return [re.sub(r"\s+#.*", "", block) for block in texts]


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page, a line each."""
    return [line for block in blocks(page) for line in block.splitlines()]


def commands(begin: str) -> list[str]:
    """Return the distinct commands of all pages that begin so; fail without any."""
    pages = [page for page in PAGES if page.name not in WHOLE_PAGES]
    matches = [
        line for page in pages for line in commands_of(page) if line.startswith(begin)
    ]
    assert matches, f"no page shows {begin!r}"
    return list(dict.fromkeys(matches))


def running(
    command: str, folder: Path
) -> "AbstractContextManager[subprocess.Popen[str]]":
    """Run a command in a shell, and end its processes afterwards."""
    environ = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    shell = ["/bin/bash", "-c", command]
    return processes.running(shell, folder, environ, errors=subprocess.PIPE)


@contextmanager
def running_all(
    lines: list[str], folder: Path
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Run several commands at the same time."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(line, folder)) for line in lines]


def run(command: str, folder: Path, timeout: float = _TIMEOUT) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    with running(command, folder) as process:
        out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def fetch(url: str) -> str:
    """Return the body of a response, and "" if no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def test_all_commands_are_run() -> None:
    """A page shows no command that no test runs."""
    for page in PAGES:
        if page.name not in WHOLE_PAGES:
            for line in commands_of(page):
                known = any(line.startswith(begin) for begin in RUN_BELOW)
                assert known or line in NOT_RUN, f"{page.name}: {line}"
    for begin in [*RUN_BELOW, *NOT_RUN]:
        assert commands(begin)


class TestInline:
    """The argument parser accepts commands in running text and in ``--help``."""

    def test_in_pages(self, subtests: pytest.Subtests) -> None:
        """Commands with options or arguments in the text of a page."""
        for page in PAGES:
            with subtests.test(page=page.name):
                for line in re.findall(
                    r"`(tracedstore [a-z-]+ [^`]+)`", page.read_text("utf-8")
                ):
                    self._parse(line)

    def test_in_help(self, subtests: pytest.Subtests) -> None:
        """The examples of a command's help."""
        for command in COMMANDS:
            with subtests.test(command=command):
                module = import_module(
                    f"tracedstore.tools.cli.{command.replace('-', '_')}"
                )
                text = str(module.__doc__)
                lines = re.findall(r"^  (.*?)(?: {4}\(.*\))?$", text, re.MULTILINE)

                assert lines
                for line in lines:
                    (command_line,) = re.findall(r"tracedstore [^'|)]*", line)
                    self._parse(command_line)

    @staticmethod
    def _parse(line: str) -> None:
        arguments = shlex.split(re.split(r" [|>] ?| \|\| ", line)[0])[1:]
        make_parser(loaded=arguments[:1]).parse_args(arguments)


class TestMake:
    """The targets of the Makefile."""

    @pytest.mark.parametrize("target", ["make test", "make bench"])
    def test_dry(self, target: str) -> None:
        """`make test` runs this test, and `make bench` takes minutes: dry runs."""
        for command in commands(target):
            assert run(f"{command} --dry-run", ROOT)[0] == 0

    @pytest.mark.parametrize(
        "script",
        [
            "overhead.py --rounds 20",
            "report.py --ranks 10 --barriers 10",
            *(
                pytest.param(script, marks=pytest.mark.soak)
                for script in (
                    "barriers.py --max-ranks 8 --repeats 2 --sets 2 --naming-repeats 1",
                    "exposition.py --times 1",
                    "fleet.py --nodes 2 --interval 1",
                    f"job_traffic.py {SMALL_JOB}",
                )
            ),
        ],
        ids=lambda script: script.partition(".")[0],
    )
    def test_benchmarks(self, script: str, tmp_path: Path) -> None:
        """Each benchmark writes results; with so few rounds the bars do not count."""
        output = tmp_path / "results.json"
        _, _, err = run(
            f"python {ROOT}/benchmarks/{script} --output {output}", tmp_path
        )

        assert "Traceback" not in err
        assert json.loads(output.read_text("utf-8"))

    def test_demo(self, tmp_path: Path) -> None:
        """All commands of docs/demo.md at the same time; make uses this environment."""
        (make,) = commands("make demo")
        scripts = blocks(ROOT / "docs/demo.md")
        assert make in scripts
        scripts.remove(DEMO_ON_TOP)
        venv = f"VENV={BIN.parent} --assume-old={BIN.parent}/.ready"
        lines = [
            # pytest removes the temporary files of the demo with its own folder.
            f"export TMPDIR={tmp_path}; set -e\n"
            + (f"{make} -C {ROOT} {venv}" if script == make else script)
            for script in scripts
        ]
        with running_all(lines, tmp_path) as demos:
            for demo in demos:
                out, err = demo.communicate(timeout=_TIMEOUT)
                assert (demo.returncode, err) == (0, ""), (demo.args, out)
                assert host_name() in out
        assert (tmp_path / "here/report.html").is_file()

    def test_demo_on_top(self, tmp_path: Path) -> None:
        """The demo on the screen of top ends on `q`, and prints its lines."""
        environ = {"PATH": f"{BIN}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        with Terminal(["bash", "-c", DEMO_ON_TOP], tmp_path, environ) as screen:
            screen.wait_for("Scenario 1 of 6")
            screen.press(b"q")

            assert screen.end() == 0
            printed = screen.output.rpartition("\x1b[?1049l")[2]
            assert "Scenario 1 of 6: healthy steps" in printed


class TestTorchrun:
    """Commands that start real jobs."""

    def test_two_nodes(self, tmp_path: Path) -> None:
        """Both nodes run on this machine, with one rank each."""
        (command,) = commands("torchrun --nnodes 2")
        command = command.replace("node1:29400", f"localhost:{free_port()}")
        command = command.replace("-node 8", "-node 1")
        (tmp_path / "train.py").write_text(train())
        with running_all([command, command], tmp_path) as nodes:
            outputs = [node.communicate(timeout=_TIMEOUT) for node in nodes]

        assert [node.returncode for node in nodes] == [0, 0], outputs
        assert all("the sum is 1.0" in out for out, _ in outputs)

    def test_command_in_front(self, tmp_path: Path) -> None:
        """`tracedstore-run torchrun` with two ranks."""
        (command,) = commands("tracedstore-run torchrun")
        (tmp_path / "train.py").write_text(train())
        code, out, err = run(command.replace("-node 8", "-node 2"), tmp_path)

        assert (code, out.count("the sum is 1.0")) == (0, 2), err

    def test_zero_code(self, tmp_path: Path) -> None:
        """All commands of docs/zero-code.md at the same time, with its train.py."""
        (tmp_path / "train.py").write_text(train())
        lines = [
            "".join(f"{name}={value} " for name, value in one_node().items()) + line
            for line in commands_of(ROOT / "docs/zero-code.md")
        ]
        with running_all(lines, tmp_path) as jobs:
            plain, traced, otel = [job.communicate(timeout=_TIMEOUT) for job in jobs]

        assert [job.returncode for job in jobs] == [0, 0, 0], (traced, otel)
        for printed, _ in (plain, traced, otel):
            assert printed.count("the sum is 1.0") == 2
        assert "tracedstore.rank" not in plain[0]
        assert re.search(r'"event": "store.operation.slow".*"rank": 1', traced[1])
        for printed, _ in (traced, otel):
            assert '"name": "set tracedstore/RANKS/*"' in printed
            assert '"tracedstore.rank": 1' in printed
            # A key of the agent, which has no rank.
            assert "torchelastic/role_info" in printed

    @pytest.mark.etcd
    def test_rendezvous(self, etcd_server: EtcdServer) -> None:
        """All commands of docs/torchrun.md at the same time, on free ports."""
        page = ROOT / "docs/torchrun.md"
        lines = [
            line.replace("localhost:29400", f"localhost:{free_port()}").replace(
                "localhost:2379", f"localhost:{etcd_server.port}"
            )
            for line in commands_of(page)
        ]
        with running_all(lines, ROOT) as jobs:
            outputs = [job.communicate(timeout=_TIMEOUT) for job in jobs]

        assert [job.returncode for job in jobs] == [0, 0, 0, 1], outputs
        for out, _ in outputs[:3]:
            assert len(re.findall(r"rank [01] of 2: done after 10 steps", out)) == 2
        _, errors = outputs[3]
        assert "rendezvous.timeout" in errors
        text = page.read_text("utf-8")
        printed = re.search(r"```\n(RendezvousTimeoutError: .*)\n```", text)
        assert printed
        # Ports, host names, process ids and durations differ.
        parts = re.split(r"[\d.]+ s|:\d+|\S+ \(pid \d+\)", printed[1])
        assert re.search(".*".join(map(re.escape, parts)), errors), errors

    def test_endpoint(self, tmp_path: Path) -> None:
        """The agent serves the metrics of its ranks while they train."""
        (command,) = commands("TRACEDSTORE_HTTP_PORT=27400 tracedstore-run torchrun")
        port, stop = free_port(), tmp_path / "stop"
        command = command.replace("27400", str(port)).replace("-node 4", "-node 2")
        (tmp_path / "train.py").write_text(
            "import runpy, sys\n"
            f"sys.argv[1:] = ['--steps=99999', '--pause=0.01', '--stop-file={stop}']\n"
            f"runpy.run_path('{ROOT}/examples/train_ddp.py', run_name='__main__')\n"
        )
        with running(command, tmp_path) as job:
            url = f"http://127.0.0.1:{port}/metrics"
            served = 'tracedstore_worker_up{local_rank="1",rank="1"} 1.0'
            metrics = wait_until(
                lambda: page if (page := fetch(url)) and served in page else None,
                _TIMEOUT,
            )
            stop.touch()
            _, err = job.communicate(timeout=_TIMEOUT)

        assert job.returncode == 0, err
        assert "tracedstore_build_info{" in metrics


class TestTracedstore:
    """The tracedstore commands, on the store and the logs of a job."""

    def test_status(self, store_url: str, tmp_path: Path) -> None:
        """`tracedstore status` reports that rank 0 of 2 is missing."""
        found, command = sorted(commands("tracedstore status"))
        assert found == FOUND_STATUS
        code, out, err = run(command.replace("tcp://node1:29400", store_url), tmp_path)

        assert (code, err) == (2, "")
        assert "checkpoint/7: 1 of 2 arrived" in out
        assert "missing 1 of 2" in out

    def test_top(self, store_url: str, tmp_path: Path) -> None:
        """`tracedstore top` shows both on a terminal: a running job, and logs."""
        found, live, replay, _ = commands("tracedstore top")
        assert found == FOUND_TOP
        (tmp_path / "logs").mkdir()
        event = completed_event(0, 20, 10)
        (tmp_path / "logs/rank0.log").write_text(json.dumps(event) + "\n")
        for command, text in (
            (live.replace("tcp://node1:29400", store_url), "missing 1 of 2"),
            (replay, "no long wait"),
        ):
            # A terminal of 80x24, until the text is there and `q` is pressed.
            path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
            with Terminal(["bash", "-c", command], tmp_path, path) as screen:
                screen.wait_for(text)
                screen.press(b"q")

                assert screen.end() == 0

    def test_top_in_a_browser(self, store_url: str, tmp_path: Path) -> None:
        """`tracedstore top --web` serves a page, until Ctrl-C."""
        *_, command = commands("tracedstore top")
        command = command.replace("tcp://node1:29400", store_url)
        assert command.endswith("--web 8080")
        with running(f"exec {command.replace('8080', '0')}", tmp_path) as server:
            assert server.stdout is not None
            (url,) = re.findall("serving on (http.*) until", server.stdout.readline())
            with urllib.request.urlopen(url, timeout=60) as page:
                assert b"tracedstore top tcp://" in page.read()
            server.send_signal(signal.SIGINT)
            _, err = server.communicate(timeout=240)

        assert (server.returncode, err) == (130, "")

    def test_stacks(self, store_url: str, tmp_path: Path) -> None:
        """`tracedstore stacks` shows that rank 0 of 2 never registered."""
        found, command = sorted(commands("tracedstore stacks"))
        assert found == FOUND_STACKS
        code, out, err = run(command.replace("tcp://node1:29400", store_url), tmp_path)

        assert (code, err) == (2, "")
        assert "never registered in this store: 0" in out

    def test_sd(self, store_url: str, tmp_path: Path) -> None:
        """`tracedstore sd --watch` writes the file, and ends on Ctrl-C."""
        (command,) = commands("tracedstore sd")
        command = command.replace("tcp://node1:29400", store_url)
        targets = tmp_path / "targets.json"
        with running(f"exec {command}", tmp_path) as watcher:
            wait_until(targets.exists, _TIMEOUT)
            watcher.send_signal(signal.SIGINT)
            _, err = watcher.communicate(timeout=240)

        assert (watcher.returncode, err) == (130, "")
        assert json.loads(targets.read_text("utf-8")) == []

    def test_report(self, tmp_path: Path) -> None:
        """`tracedstore report` reads the log of a rank that waited for another."""
        (tmp_path / "logs").mkdir()
        script = (
            "import torch.distributed as dist, tracedstore\n"
            "store = tracedstore.wrap(dist.HashStore())\n"
            "tracedstore.barrier(store, 2, 'checkpoint/7', 0.1, rank=1)\n"
        )
        run(f"python -c {shlex.quote(script)} 2> logs/rank1.log", tmp_path)
        dumps = tmp_path / ".cache/torch/comm_lib_trace_rank_"
        dumps.parent.mkdir(parents=True)
        write_dumps(dumps, {0: [entry(1)], 1: [entry(1)]}, {"0": [0, 1]})
        for command in commands("tracedstore report"):
            code, out, err = run(command.replace("~", "."), tmp_path)

            assert (code, err) == (0, "")
            assert "1 incident" in out
        assert "checkpoint/7" in (tmp_path / "report.html").read_text("utf-8")

    def test_dashboards(self, tmp_path: Path) -> None:
        """`tracedstore dashboards export` creates the folder."""
        for command in commands("tracedstore dashboards"):
            code, out, err = run(command, tmp_path)

            # What to set for links in pages, unless the command sets it.
            assert code == 0
            assert ("--runbook-url" in err) == ("--runbook-url" not in command)
            assert all((tmp_path / line).is_file() for line in out.splitlines())
        assert (tmp_path / "monitoring/rules/prometheus.yaml").is_file()


def test_push_to_a_collector(tmp_path: Path) -> None:
    """The command of docs/otlp.md, with a train.py and a collector."""
    (command,) = commands_of(ROOT / "docs/otlp.md")
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    )
    receiver = OTLPReceiver()
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 2")
    code, _, err = run(command.replace("http://collector:4318", receiver.url), tmp_path)
    receiver.close()

    assert code == 0, err
    ranks = {resources_of(one)[0].get("tracedstore.rank") for one in receiver.metrics}
    # The agent has no rank.
    assert ranks == {None, 0, 1}


def test_traces_on_the_console(tmp_path: Path) -> None:
    """The command of docs/configuration.md, with a train.py."""
    (command,) = commands_of(ROOT / "docs/configuration.md")
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist, tracedstore\n"
        "tracedstore.wrap(dist.HashStore()).set('key', 'value')\n"
    )
    code, out, err = run(command, tmp_path)

    assert code == 0, err
    assert '"name": "set key"' in out
    assert '"service.name": "my-job"' in out


@pytest.fixture
def store_url() -> Iterator[str]:
    """Serve a store in which rank 1 of 2 arrived at a barrier and timed out."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(tracedstore.BarrierTimeout):
        tracedstore.barrier(server, 2, "checkpoint/7", 0.1, rank=1)
    yield f"tcp://127.0.0.1:{server.port}"
    del server  # it serves until it is deleted


def train() -> str:
    """Return the program that docs/zero-code.md calls train.py."""
    text = (ROOT / "docs/zero-code.md").read_text("utf-8")
    program: str = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    return program
