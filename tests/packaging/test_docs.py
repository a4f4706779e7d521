"""README and docs keep their word."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.etcd import EtcdServer, free_port

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )


class TestTables:
    """The tables are what the code says."""

    def test_up_to_date(self) -> None:
        """`make docs` would change nothing."""
        done = run(sys.executable, "scripts/update_docs.py", "--check")

        assert (done.returncode, done.stdout) == (0, ""), done.stderr

    def test_the_check_can_fail(self) -> None:
        """A table that was changed by hand is noticed."""
        sys.path.insert(0, str(ROOT / "scripts"))
        import update_docs

        text = (ROOT / "docs/metrics.md").read_text("utf-8")
        changed = text.replace("| histogram |", "| summary |")

        assert changed != text
        assert update_docs.fill(changed) == text


class TestExamples:
    """What the README shows runs as it stands."""

    def test_python(self) -> None:
        """The first example, which is also ten lines long at most."""
        text = (ROOT / "README.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

        done = run(sys.executable, "-W", "ignore", "-c", example)

        assert done.returncode == 0, done.stderr
        assert re.search(
            r'duration_seconds_count{.*operation="set",store="tcp_store"} [1-9]',
            done.stdout,
        )
        assert len([line for line in example.splitlines() if line.strip()]) <= 10

    def test_barrier(self) -> None:
        """The example of docs/barriers.md prints what stands below it."""
        text = (ROOT / "docs/barriers.md").read_text("utf-8")
        example, printed = re.findall(
            r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL
        )[0]

        done = run(sys.executable, "-W", "ignore", "-c", example)

        assert done.stdout == printed, done.stderr
        assert printed.splitlines()[1] in (ROOT / "README.md").read_text("utf-8")

    def test_console(self) -> None:
        """Every make target that is shown exists."""
        shown = {
            target
            for page in PAGES
            for target in re.findall(
                r"(?:`|^)make ([a-z]+)", page.read_text("utf-8"), re.MULTILINE
            )
        }

        assert shown
        for target in shown:
            done = run("make", "--dry-run", target)
            assert done.returncode == 0, done.stderr

    def test_traces_on_the_console(self, tmp_path: Path) -> None:
        """The command of docs/configuration.md, on a train.py."""
        text = (ROOT / "docs/configuration.md").read_text("utf-8")
        (command,) = re.findall(r"```console\n(.*)\n```", text)
        (tmp_path / "train.py").write_text(
            "import torch.distributed as dist, tracedstore\n"
            "tracedstore.wrap(dist.HashStore()).set('key', 'value')\n"
        )
        command = command.replace("python ", f"{sys.executable} -W ignore ")

        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        assert '"name": "set key"' in done.stdout
        assert '"service.name": "my-job"' in done.stdout

    def test_zero_code(self, tmp_path: Path) -> None:
        """The commands of docs/zero-code.md, as written, on its train.py."""
        text = (ROOT / "docs/zero-code.md").read_text("utf-8")
        train = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
        commands = re.findall(r"```console\n(.*)\n```", text)
        (tmp_path / "train.py").write_text(train)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        running = [
            subprocess.Popen(
                command,
                shell=True,
                cwd=tmp_path,
                env={**os.environ, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command in commands
        ]
        try:
            plain, told, otel = [each.communicate(timeout=50) for each in running]
        finally:
            for each in running:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)
                    each.communicate()

        assert [each.returncode for each in running] == [0, 0, 0], (told, otel)
        for printed, _ in (plain, told, otel):
            assert printed.count("the sum is 1.0") == 2
        assert "tracedstore.rank" not in plain[0]
        assert re.search(r'"event": "store.operation.slow".*"rank": 1', told[1])
        for printed, _ in (told, otel):
            assert '"name": "set tracedstore/RANKS/*"' in printed
            assert '"tracedstore.rank": 1' in printed
            # The agent's, which is no rank.
            assert "torchelastic/role_info" in printed

    def test_explicit_init_method(self) -> None:
        """The last example of docs/zero-code.md runs."""
        text = (ROOT / "docs/zero-code.md").read_text("utf-8")
        example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
        example += (
            "group_store = dist.distributed_c10d._get_default_store()\n"
            "print(type(group_store.underlying_store.underlying_store))\n"
        )

        done = run(sys.executable, "-W", "ignore", "-c", example)

        assert done.stdout == "<class 'tracedstore.store.TracedStore'>\n", done.stderr

    @pytest.mark.etcd
    @pytest.mark.processes
    def test_torchrun(self, etcd_server: EtcdServer) -> None:
        """The commands of docs/torchrun.md, all at once, on ports of their own."""
        text = (ROOT / "docs/torchrun.md").read_text("utf-8")
        torchrun = f"{sys.executable} -W ignore -m torch.distributed.run "
        running = []
        for shown in re.findall(r"```console\n(.*)\n```", text):
            command = (
                shown.replace("torchrun ", torchrun, 1)
                .replace("localhost:29400", f"localhost:{free_port()}")
                .replace("localhost:2379", f"localhost:{etcd_server.port}")
            )
            running.append(
                subprocess.Popen(
                    command.split(),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            done = [process.communicate(timeout=50) for process in running]
        finally:
            for process in running:
                process.kill()

        assert [process.returncode for process in running] == [0, 0, 1], done
        for out, _ in done[:2]:
            assert len(re.findall(r"rank [01] of 2: done after 10 steps", out)) == 2
        _, errors = done[2]
        assert "rendezvous.timeout" in errors
        printed = re.search(r"```\n(RendezvousTimeoutError: .*)\n```", text)
        assert printed
        # As it stands there, but for ports, names, process ids and times.
        words = re.split(r"[\d.]+ s|:\d+|\S+ \(pid \d+\)", printed[1])
        assert re.search(".*".join(map(re.escape, words)), errors), errors

    def test_rendezvous_backend(self) -> None:
        """The example of docs/torchrun.md."""
        text = (ROOT / "docs/torchrun.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

        done = run(sys.executable, "-W", "ignore", "-c", example)

        assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr

    def test_links(self) -> None:
        """Every link to a file has a file."""
        for page in PAGES:
            for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text("utf-8")):
                assert (page.parent / link).exists(), f"{page}: {link}"

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_metric_names(self, page: Path) -> None:
        """Every metric that is mentioned exists."""
        from tracedstore.signals import names

        known = {metric.name for metric in names.METRICS}
        for name in re.findall(
            r"\btracedstore_[a-z_]*[a-z]\b", page.read_text("utf-8")
        ):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert base in known, f"{page}: {name}"
