"""README and docs keep their word."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

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

    def test_barrier_under_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other one, with what torchrun puts into the environment of a worker."""
        text = (ROOT / "docs/barriers.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(import os\n.*?)```", text, re.DOTALL)
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        worker = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**worker, "MASTER_PORT": str(server.port)}.items():
            monkeypatch.setenv(name, value)

        done = run(sys.executable, "-W", "ignore", "-c", example)

        assert done.returncode == 0, done.stderr
        assert server.check(["checkpoint/1/last_member"])

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
        from tracedstore import names

        known = {metric.name for metric in names.METRICS}
        for name in re.findall(
            r"\btracedstore_[a-z_]*[a-z]\b", page.read_text("utf-8")
        ):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert base in known, f"{page}: {name}"
