"""The tables, examples and links of README and docs are correct."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from support.fork_server import run_python

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/tracedstore"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root directory of the repository."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates from the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


class TestTables:
    """The generated tables match the code."""

    def test_up_to_date(self) -> None:
        """`make docs` changes nothing."""
        completed = run(sys.executable, "scripts/update_docs.py", "--check")

        assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr

    def test_check_detects_manual_edit(self) -> None:
        """A table that was edited by hand is out of date."""
        sys.path.insert(0, str(ROOT / "scripts"))
        import update_docs

        text = (ROOT / "docs/metrics.md").read_text("utf-8")
        edited = text.replace("| histogram |", "| summary |")

        assert edited != text
        assert update_docs.fill(edited) == text


class TestExamples:
    """The examples run exactly as printed."""

    def test_readme(self) -> None:
        """The README's example runs and has at most ten lines."""
        text = (ROOT / "README.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

        completed = run_python("-c", example)

        assert completed.returncode == 0, completed.stderr
        assert re.search(
            r'duration_seconds_count{.*operation="set",store="tcp_store"} [1-9]',
            completed.stdout,
        )
        assert len([line for line in example.splitlines() if line.strip()]) <= 10

    def test_barrier(self) -> None:
        """The example of docs/barriers.md prints the output shown below it."""
        text = (ROOT / "docs/barriers.md").read_text("utf-8")
        example, printed = re.findall(
            r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL
        )[0]

        completed = run_python("-c", example)

        assert completed.stdout == printed, completed.stderr
        assert printed.splitlines()[1] in (ROOT / "README.md").read_text("utf-8")

    def test_barrier_under_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The torchrun example of docs/barriers.md runs in a worker's environment."""
        text = (ROOT / "docs/barriers.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(import os\n.*?)```", text, re.DOTALL)
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        worker = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**worker, "MASTER_PORT": str(server.port)}.items():
            monkeypatch.setenv(name, value)

        completed = run_python("-c", example)

        assert completed.returncode == 0, completed.stderr
        assert server.check(["checkpoint/1/last_member"])

    def test_make_targets(self) -> None:
        """Every make target in README and docs exists."""
        targets = {
            target
            for page in PAGES
            for target in re.findall(
                r"(?:`|^)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE
            )
        }

        assert targets
        for target in targets:
            completed = run("make", "--dry-run", target, "TORCH=2.13.0")
            assert completed.returncode == 0, completed.stderr

    def test_explicit_init_method(self) -> None:
        """The last example of docs/zero-code.md runs."""
        text = (ROOT / "docs/zero-code.md").read_text("utf-8")
        example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
        example += (
            "group_store = dist.distributed_c10d._get_default_store()\n"
            "print(type(group_store.underlying_store.underlying_store))\n"
        )

        completed = run_python("-c", example)

        assert completed.stdout.splitlines() == [
            "<class 'tracedstore.store.TracedStore'>"
        ], completed.stderr

    def test_rendezvous_backend(self) -> None:
        """The Python example of docs/torchrun.md runs."""
        text = (ROOT / "docs/torchrun.md").read_text("utf-8")
        (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

        completed = run_python("-c", example)

        assert (completed.stdout, completed.returncode) == ("True\n", 0), (
            completed.stderr
        )

    def test_configuration_error(self) -> None:
        """docs/configuration.md quotes the error for an invalid setting."""
        from tracedstore import ConfigurationError, Settings

        text = (ROOT / "docs/configuration.md").read_text("utf-8")
        with pytest.raises(ConfigurationError) as raised:
            Settings.load({}, {"TRACEDSTORE_SLOW_AFTER": "10ms"})

        assert f"```\n{raised.value}\n```" in text

    def test_links(self) -> None:
        """Every link to a file refers to an existing file."""
        for page in PAGES:
            for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text("utf-8")):
                assert (page.parent / link).exists(), f"{page}: {link}"

    def test_anchors(self) -> None:
        """Every link to a section refers to an existing heading."""
        for page in PAGES:
            text = page.read_text("utf-8")
            for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text):
                target = page.parent / link if link else page
                assert anchor in anchors(target), f"{page}: {link}#{anchor}"

    def test_metric_names(self, subtests: pytest.Subtests) -> None:
        """Every metric in README and docs exists."""
        from tracedstore import names

        known = {metric.name for metric in names.METRICS}
        for page in PAGES:
            with subtests.test(page=page.name):
                for name in re.findall(
                    r"\btracedstore_[a-z_]*[a-z]\b", page.read_text("utf-8")
                ):
                    base = re.sub(r"_(bucket|count|sum)$", "", name)
                    assert base in known, f"{page}: {name}"


def test_site() -> None:
    """The site has every page of docs/ once."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"\b([\w-]+\.md)$", text, re.MULTILINE)

    assert sorted(listed) == [
        page.name for page in sorted((ROOT / "docs").glob("*.md"))
    ]


def _is_in_package(name: str) -> bool:
    """Return whether a dotted name begins with a module, and goes on inside of it."""
    parts = name.removeprefix("tracedstore.").split(".")
    place = SOURCE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    else:
        place /= "__init__.py"
    text = place.read_text("utf-8")
    return all(re.search(rf"\b{part}\b", text) for part in parts)


def test_names_of_modules() -> None:
    """What prose calls a module, or something in one, is there under this name."""
    rooms = {place.parent.name for place in SOURCE.glob("*/__init__.py")}
    # Some signals have names that look like those of modules.
    signals = set(re.findall(r'"([\w.]+)"', (SOURCE / "names.py").read_text("utf-8")))
    signals.add("etcd.request")
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    offenders = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*pages, *SOURCE.rglob("*.py")]
        for name in re.findall(
            r"(?<!`)`((?:tracedstore\.)?\w+(?:\.\w+)+)(?:\(\))?`",
            file.read_text("utf-8"),
        )
        if name.removeprefix("tracedstore.").split(".")[0] in rooms
        and name not in signals
        and not _is_in_package(name)
    ]

    assert offenders == []


# What is not prose: code, headings and tables.
_NO_PROSE = re.compile(r"^( *)```.*?^\1```$|^#.*?$|^ *\|.*?$", re.DOTALL | re.MULTILINE)


def test_lines_of_prose() -> None:
    """A line of prose has at most 100 characters, so that a change shows its words."""
    offenders = []
    for page in PAGES:
        text = page.read_text("utf-8")
        prose = _NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
        offenders += [
            f"{page.name}:{number}: {len(line)} characters"
            for number, line in enumerate(prose.splitlines(), 1)
            if len(line) > 100
        ]

    assert offenders == []
