"""Every command that README and docs show is run, as it stands there.

But for what a test has to change: names of hosts and ports, and how many processes
there are of a kind.
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
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

import tracedstore
from integration.harness import wait_until
from support.etcd import EtcdServer, free_port
from support.tools import ROOT
from tracedstore.cli.main import COMMANDS, make_parser

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
# Pages of which one test takes every command: below, and in test_debug_page.py.
WHOLE = {
    "torchrun.md",
    "zero-code.md",
    "configuration.md",
    "debug-server.md",
    "demo.md",
}
# What is run of other pages, by how it begins.
HERE = {
    "make demo",
    "make test",
    "make bench",
    "tracedstore-run torchrun",
    "torchrun --nnodes 2",
    "TRACEDSTORE_HTTP_PORT=9400 torchrun",
    "tracedstore sd",
    "tracedstore status",
    "tracedstore report",
    "tracedstore dashboards",
}
# There is no Docker here. tests/dashboards/test_compose.py holds the file against all
# that it mounts and names, and integration/test_stack.py runs what it would run.
NOT_RUN = {"docker compose up --build"}
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.processes


def blocks(page: Path) -> list[str]:
    """Give what a page shows to be typed, without the remarks behind it."""
    found = re.findall(r"```console\n(.*?)\n```", page.read_text("utf-8"), re.DOTALL)
    return [re.sub(r"\s+#.*", "", block) for block in found]


def shown(page: Path) -> list[str]:
    """Give the commands of a page."""
    return [line for block in blocks(page) for line in block.splitlines()]


def commands(begin: str) -> list[str]:
    """Give those of all pages that begin so, each once; there is at least one."""
    pages = [page for page in PAGES if page.name not in WHOLE]
    found = [line for page in pages for line in shown(page) if line.startswith(begin)]
    assert found, f"no page shows {begin!r}"
    return list(dict.fromkeys(found))


@contextmanager
def running(command: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a command as a shell does, and leave nothing of it."""
    process = subprocess.Popen(
        command,
        shell=True,
        executable="/bin/bash",
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun's workers are in sessions of their own; it ends them.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@contextmanager
def started(lines: list[str], folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start some commands at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(line, folder)) for line in lines]


def run(command: str, folder: Path, within: float = 50) -> tuple[int, str, str]:
    """Run a command to its end: exit code, and what it wrote."""
    with running(command, folder) as process:
        out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def fetched(url: str) -> str:
    """Ask something on this machine; nothing while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_all_of_them() -> None:
    """None is shown that is not run."""
    for page in PAGES:
        if page.name not in WHOLE:
            for line in shown(page):
                known = any(line.startswith(begin) for begin in HERE)
                assert known or line in NOT_RUN, f"{page.name}: {line}"
    for begin in [*HERE, *NOT_RUN]:
        assert commands(begin)


class TestOfALine:
    """What is shown within a text, or by ``--help``: it makes sense to the parser."""

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_in_pages(self, page: Path) -> None:
        """Whatever has options or arguments."""
        for line in re.findall(
            r"`(tracedstore [a-z]+ [^`]+)`", page.read_text("utf-8")
        ):
            self._parse(line)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_in_help(self, command: str) -> None:
        """The examples."""
        said = str(import_module(f"tracedstore.cli.{command}").__doc__)
        lines = re.findall(r"^  (.*?)(?: {4}\(.*\))?$", said, re.MULTILINE)

        assert lines
        for line in lines:
            (found,) = re.findall(r"tracedstore [^'|)]*", line)
            self._parse(found)

    @staticmethod
    def _parse(line: str) -> None:
        words = shlex.split(re.split(r" [|>] ?| \|\| ", line)[0])[1:]
        make_parser(loaded=words[:1]).parse_args(words)


class TestMake:
    """The targets."""

    @pytest.mark.parametrize("target", ["make test", "make bench"])
    def test_dry(self, target: str) -> None:
        """What runs this test, and what takes minutes; it is run in small below."""
        for command in commands(target):
            assert run(f"{command} --dry-run", ROOT)[0] == 0

    @pytest.mark.parametrize(
        "script",
        [
            "overhead.py --rounds 20",
            "barriers.py --repeats 1 --naming-repeats 1",
            "exposition.py --times 1",
            "report.py --ranks 10 --barriers 10",
        ],
        ids=lambda script: script.partition(".")[0],
    )
    def test_benchmarks(self, script: str, tmp_path: Path) -> None:
        """Each runs to its end; what so few rounds measure is held to no bar."""
        output = tmp_path / "results.json"
        _, _, err = run(
            f"python {ROOT}/benchmarks/{script} --output {output}", tmp_path
        )

        assert "Traceback" not in err
        assert json.loads(output.read_text("utf-8"))

    @pytest.mark.timeout(150)
    def test_demo(self, tmp_path: Path) -> None:
        """All of docs/demo.md at once; make has the environment of this test."""
        (make,) = commands("make demo")
        scripts = blocks(ROOT / "docs/demo.md")
        assert make in scripts
        venv = f"VENV={BIN.parent} --assume-old={BIN.parent}/.ready"
        lines = [
            # What they leave in the folder for temporary files goes with this one.
            f"export TMPDIR={tmp_path}; set -e\n"
            + (f"{make} -C {ROOT} {venv}" if script == make else script)
            for script in scripts
        ]
        with started(lines, tmp_path) as demos:
            for demo in demos:
                out, err = demo.communicate(timeout=120)
                assert (demo.returncode, err) == (0, ""), (demo.args, out)
                assert "sim-node-1" in out
        assert (tmp_path / "here/report.html").is_file()


class TestTorchrun:
    """Real jobs."""

    def test_two_nodes(self, tmp_path: Path) -> None:
        """Both of them on this machine, each with one rank."""
        (command,) = commands("torchrun --nnodes 2")
        command = command.replace("node1:29400", f"localhost:{free_port()}")
        command = command.replace("-node 8", "-node 1")
        (tmp_path / "train.py").write_text(train())
        with started([command, command], tmp_path) as nodes:
            ended = [node.communicate(timeout=50) for node in nodes]

        assert [node.returncode for node in nodes] == [0, 0], ended
        assert all("the sum is 1.0" in out for out, _ in ended)

    def test_command_in_front(self, tmp_path: Path) -> None:
        """With two ranks."""
        (command,) = commands("tracedstore-run torchrun")
        (tmp_path / "train.py").write_text(train())
        code, out, err = run(command.replace("-node 8", "-node 2"), tmp_path)

        assert (code, out.count("the sum is 1.0")) == (0, 2), err

    def test_zero_code(self, tmp_path: Path) -> None:
        """All of docs/zero-code.md at once, on its train.py."""
        (tmp_path / "train.py").write_text(train())
        lines = shown(ROOT / "docs/zero-code.md")
        with started(lines, tmp_path) as jobs:
            plain, told, otel = [job.communicate(timeout=50) for job in jobs]

        assert [job.returncode for job in jobs] == [0, 0, 0], (told, otel)
        for printed, _ in (plain, told, otel):
            assert printed.count("the sum is 1.0") == 2
        assert "tracedstore.rank" not in plain[0]
        assert re.search(r'"event": "store.operation.slow".*"rank": 1', told[1])
        for printed, _ in (told, otel):
            assert '"name": "set tracedstore/RANKS/*"' in printed
            assert '"tracedstore.rank": 1' in printed
            # The agent's, which is no rank.
            assert "torchelastic/role_info" in printed

    @pytest.mark.etcd
    def test_rendezvous(self, etcd_server: EtcdServer) -> None:
        """All of docs/torchrun.md at once, on ports of their own."""
        page = ROOT / "docs/torchrun.md"
        lines = [
            line.replace("localhost:29400", f"localhost:{free_port()}").replace(
                "localhost:2379", f"localhost:{etcd_server.port}"
            )
            for line in shown(page)
        ]
        with started(lines, ROOT) as jobs:
            done = [job.communicate(timeout=50) for job in jobs]

        assert [job.returncode for job in jobs] == [0, 0, 1], done
        for out, _ in done[:2]:
            assert len(re.findall(r"rank [01] of 2: done after 10 steps", out)) == 2
        _, errors = done[2]
        assert "rendezvous.timeout" in errors
        text = page.read_text("utf-8")
        printed = re.search(r"```\n(RendezvousTimeoutError: .*)\n```", text)
        assert printed
        # As it stands there, but for ports, names, process ids and times.
        words = re.split(r"[\d.]+ s|:\d+|\S+ \(pid \d+\)", printed[1])
        assert re.search(".*".join(map(re.escape, words)), errors), errors

    def test_endpoint(self, tmp_path: Path) -> None:
        """The first of two ranks serves its metrics while it trains."""
        (command,) = commands("TRACEDSTORE_HTTP_PORT=9400 torchrun")
        port, stop = free_port(), tmp_path / "stop"
        command = command.replace("9400", str(port)).replace("-node 4", "-node 2")
        (tmp_path / "train.py").write_text(
            "import runpy, sys, tracedstore\n"
            "tracedstore.instrument()\n"
            f"sys.argv[1:] = ['--steps=99999', '--pause=0.01', '--stop-file={stop}']\n"
            f"runpy.run_path('{ROOT}/examples/train_ddp.py', run_name='__main__')\n"
        )
        with running(command, tmp_path) as job:
            url = f"http://127.0.0.1:{port}/metrics"
            metrics = wait_until(lambda: fetched(url), 40)
            stop.touch()
            _, err = job.communicate(timeout=40)

        assert job.returncode == 0, err
        assert "tracedstore_build_info{" in metrics


class TestTracedstore:
    """The commands, on what a job leaves in its store and in its logs."""

    def test_status(self, store_url: str, tmp_path: Path) -> None:
        """Rank 0 of 2 is missing."""
        (command,) = commands("tracedstore status")
        code, out, err = run(command.replace("tcp://node1:29400", store_url), tmp_path)

        assert (code, err) == (2, "")
        assert "checkpoint/7: 1 of 2 arrived" in out
        assert "missing 1 of 2" in out

    def test_sd(self, store_url: str, tmp_path: Path) -> None:
        """The file is there while it goes on, until Ctrl-C."""
        (command,) = commands("tracedstore sd")
        command = command.replace("tcp://node1:29400", store_url)
        targets = tmp_path / "targets.json"
        with running(f"exec {command}", tmp_path) as watching:
            wait_until(targets.exists, 30)
            watching.send_signal(signal.SIGINT)
            _, err = watching.communicate(timeout=20)

        assert (watching.returncode, err) == (130, "")
        assert json.loads(targets.read_text("utf-8")) == []

    def test_report(self, tmp_path: Path) -> None:
        """Of the log of one rank that waited for another."""
        (tmp_path / "logs").mkdir()
        script = (
            "import torch.distributed as dist, tracedstore\n"
            "store = tracedstore.wrap(dist.HashStore())\n"
            "tracedstore.barrier(store, 2, 'checkpoint/7', 0.1, rank=1)\n"
        )
        run(f"python -c {shlex.quote(script)} 2> logs/rank1.log", tmp_path)
        for command in commands("tracedstore report"):
            code, out, err = run(command, tmp_path)

            assert (code, err) == (0, "")
            assert "1 incident" in out
        assert "checkpoint/7" in (tmp_path / "report.html").read_text("utf-8")

    def test_dashboards(self, tmp_path: Path) -> None:
        """Into a folder that is made for them."""
        for command in commands("tracedstore dashboards"):
            code, out, err = run(command, tmp_path)

            assert (code, err) == (0, "")
            assert all((tmp_path / line).is_file() for line in out.splitlines())
        assert (tmp_path / "monitoring/rules/prometheus.yaml").is_file()


def test_traces_on_the_console(tmp_path: Path) -> None:
    """The command of docs/configuration.md, on a train.py."""
    (command,) = shown(ROOT / "docs/configuration.md")
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
    """Serve a store in which rank 1 of 2 came to a barrier, and gave up."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(tracedstore.BarrierTimeout):
        tracedstore.barrier(server, 2, "checkpoint/7", 0.1, rank=1)
    yield f"tcp://127.0.0.1:{server.port}"
    del server  # not before: it serves as long as it is there


def train() -> str:
    """Give the program that docs/zero-code.md calls train.py."""
    text = (ROOT / "docs/zero-code.md").read_text("utf-8")
    program: str = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    return program
