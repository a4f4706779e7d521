"""The build context has all that the Dockerfile needs.

The tests have no Docker. They evaluate .dockerignore, copy what the COPY instructions
copy, and build the wheel from the copy.
"""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from support.tools import ROOT
from support.wheel import build_wheel
from tracedstore.tools.cli.dashboards import shipped

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
# The sources and the target of each COPY instruction.
COPIES = [
    (sources.split(), target)
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", DOCKERFILE, re.MULTILINE)
]
# The image that has the package without torch, for an init container.
PACKAGE = (ROOT / "examples/kubernetes/tracedstore.Dockerfile").read_text("utf-8")
SOURCES = sorted(
    {source for sources, _ in COPIES for source in sources}
    | {
        source
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", PACKAGE, re.MULTILINE)
        for source in sources.split()
    }
)


class DockerIgnore:
    """The patterns of a .dockerignore file.

    See https://docs.docker.com/build/concepts/context/#dockerignore-files: the last
    pattern that matches a path or one of its parent folders decides.
    """

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._patterns = [
            (_expression(line.removeprefix("!")), not line.startswith("!"))
            for line in lines
            if line and not line.startswith("#")
        ]

    def excludes(self, path: str) -> bool:
        """Return whether a file is left out of the build context."""
        candidates = [path, *map(str, Path(path).parents)][:-1]
        excluded = False
        for expression, excludes in self._patterns:
            if any(expression.fullmatch(candidate) for candidate in candidates):
                excluded = excludes
        return excluded


def _expression(pattern: str) -> re.Pattern[str]:
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    return re.compile("".join(wildcards.get(part, re.escape(part)) for part in parts))


CONTEXT = DockerIgnore((ROOT / ".dockerignore").read_text("utf-8"))


def files(source: str) -> list[str]:
    """List a file, or the files below a folder, without bytecode."""
    path = ROOT / source
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    ]


@pytest.mark.parametrize(
    ("patterns", "path", "excluded"),
    [
        ("a", "a", True),
        ("a", "a/b", True),
        ("a", "b/a", False),
        ("**/a", "b/c/a", True),
        ("**/a", "a", True),
        ("*.md", "a.md", True),
        ("*.md", "b/a.md", False),
        ("a?", "ab", True),
        ("a/**", "a/b/c", True),
        ("*\n!a", "a/b", False),
        ("*\n!a/b", "a/c", True),
        ("!a\n*", "a", True),
        ("# a\n\n", "a", False),
    ],
)
def test_patterns(patterns: str, path: str, excluded: bool) -> None:
    """The evaluation agrees with Docker's documentation."""
    assert DockerIgnore(patterns).excludes(path) is excluded


@pytest.mark.parametrize("source", SOURCES)
def test_copied_files_are_in_the_context(source: str) -> None:
    """.dockerignore leaves out no file that COPY needs."""
    paths = files(source)

    assert paths
    assert [path for path in paths if CONTEXT.excludes(path)] == []


@pytest.mark.parametrize("name", [".git", ".venv", ".tools", "tests", "docs"])
def test_other_folders_are_not_in_the_context(name: str) -> None:
    """.dockerignore leaves out what the image does not need."""
    assert CONTEXT.excludes(f"{name}/file")


def test_wheel_from_the_context(tmp_path: Path) -> None:
    """The files that are copied before `pip install` are enough to build the wheel."""
    install = DOCKERFILE.index('".[otlp,tools]"')
    for sources, target in COPIES:
        if DOCKERFILE.index(f"{sources[-1]} {target}\n") > install:
            continue
        for source in sources:
            for name in files(source):
                copied = (
                    tmp_path
                    / target
                    / Path(name).relative_to(
                        source if (ROOT / source).is_dir() else Path(source).parent
                    )
                )
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copied)

    with build_wheel(tmp_path, tmp_path) as wheel:
        names = set(wheel.namelist())

    assert {f"tracedstore/tools/cli/shipped/{name}" for name in shipped()} <= names


def test_package_without_torch() -> None:
    """The image for an init container has all dependencies but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split("[<>=]", name)[0] for name in project["dependencies"]}
    (installed,) = re.findall(r"--target /package \\\n(.*?)\\\n", PACKAGE, re.DOTALL)

    assert set(installed.split()) == needed - {"torch"}
    assert "pip install --no-cache-dir --no-deps --target /package ." in PACKAGE
    images = re.findall("^FROM (.+)$", PACKAGE, re.MULTILINE)
    (built_on,) = re.findall("^FROM (.+)$", DOCKERFILE, re.MULTILINE)
    assert images == [f"{built_on} AS package", "busybox:1.37.0"]


def test_image_is_pinned_and_unprivileged() -> None:
    """The base image has an exact version, and the job does not run as root."""
    assert re.search(
        r"^FROM python:\d+\.\d+\.\d+-slim-bookworm$", DOCKERFILE, re.MULTILINE
    )
    assert re.search(r"^USER (?!root)", DOCKERFILE, re.MULTILINE)


def test_one_index_besides_the_default() -> None:
    """Only the index of torch's CPU wheels is named, and it is a build argument."""
    (argument,) = re.findall(r"^ARG (\w+)=https://\S+$", DOCKERFILE, re.MULTILINE)

    assert DOCKERFILE.count("https://") == 1
    assert re.findall(r"--(?:extra-)?index-url (\S+)", DOCKERFILE) == [f'"${argument}"']
    assert f'--extra-index-url "${argument}"' in DOCKERFILE
