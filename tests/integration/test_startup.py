"""tracedstore-run, and how Python starts below it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tracedstore import __version__
from tracedstore.auto.command import STARTUP, environment

pytestmark = pytest.mark.processes

RUN = str(Path(sys.executable).with_name("tracedstore-run"))


def run(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, with nothing on PYTHONPATH but what is given."""
    environ = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    return subprocess.run(
        command,
        env={**environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def reported(script: str, *options: str, **env: str) -> Any:
    """What a script prints as JSON, run by Python below tracedstore-run."""
    done = run(RUN, sys.executable, *options, "-c", script, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def below(script: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script as a child of tracedstore-run, which is a Python program itself."""
    return run(sys.executable, "-c", script, env=environment(env))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a torch that is quickly imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    return tmp_path


WAITS = """
import json, sys
hooks = [hook.__name__ for hook in sys.meta_path if hasattr(hook, "__name__")]
print(json.dumps("_UntilTorch" in hooks))
"""


class TestCommand:
    """The command becomes the one it is given."""

    def test_exit_code_and_streams(self) -> None:
        """They are the command's own."""
        done = run(RUN, "sh", "-c", "echo out; echo err >&2; exit 7")

        assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")

    def test_help(self) -> None:
        """It says how it is used."""
        done = run(RUN, "--help")

        assert done.returncode == 0
        assert done.stdout.startswith("usage: tracedstore-run")
        assert "Examples:\n  tracedstore-run torchrun" in done.stdout
        assert "Exit codes: " in done.stdout

    def test_version(self) -> None:
        """The package's."""
        assert run(RUN, "--version").stdout == f"tracedstore-run {__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "status", "says"),
        [
            ([], 125, "no command to run was given; try tracedstore-run --help"),
            (["--"], 125, "no command to run was given; try tracedstore-run --help"),
            (["-x"], 125, "'-x' is no option of it; it has --help, --version"),
            (
                ["no-such-command"],
                127,
                "there is no command 'no-such-command' on PATH; give its path",
            ),
            (
                ["train.py"],
                127,
                "there is no command 'train.py' on PATH; give python train.py",
            ),
            (["/"], 126, "'/' cannot be run: Permission denied"),
        ],
    )
    def test_what_cannot_be_run(
        self, arguments: list[str], status: int, says: str
    ) -> None:
        """One sentence, and a shell's exit code."""
        done = run(RUN, *arguments)

        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr == f"tracedstore-run: {says}\n"

    def test_dashes_end_its_options(self) -> None:
        """What follows is the command."""
        done = run(RUN, "--", "sh", "-c", "echo $1", "sh", "--help")

        assert done.stdout == "--help\n"

    def test_is_light(self) -> None:
        """It loads no torch to become something else."""
        done = run(
            sys.executable, "-X", "importtime", "-m", "tracedstore.auto.command", "true"
        )

        assert done.returncode == 0
        assert "tracedstore.auto" in done.stderr
        assert "torch" not in done.stderr

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (None, [STARTUP]),
            ("", [STARTUP]),
            ("/a:/b", [STARTUP, "/a", "/b"]),
            # An empty entry is the working directory, and stays.
            (":/a", [STARTUP, "", "/a"]),
            (f"/a:{STARTUP}:/b", [STARTUP, "/a", "/b"]),
        ],
    )
    def test_python_path(self, before: str | None, after: list[str]) -> None:
        """The user's entries stay, in their order; ours is first, once."""
        env = {} if before is None else {"PYTHONPATH": before}

        done = run(RUN, RUN, "printenv", "PYTHONPATH", env=env)

        assert done.stdout.removesuffix("\n").split(os.pathsep) == after


class TestStart:
    """A Python process below it starts as it would without."""

    def test_nothing_is_loaded(self) -> None:
        """Until torch is, no module is there that was not there before."""
        script = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
        bare = json.loads(run(sys.executable, "-c", script).stdout)

        assert reported(script) == bare

    def test_torch_is_waited_for(self, folder: Path) -> None:
        """Its import takes the places, and asking whether it exists does no harm."""
        script = """
import importlib.util, json, sys
first = "tracedstore" in sys.modules
importlib.util.find_spec("torch")
import torch
from tracedstore.auto import patches
print(json.dumps([first, patches._on, len(sys.meta_path)]))
"""
        bare = run(sys.executable, "-c", "import sys; print(len(sys.meta_path))").stdout

        found = reported(script, PYTHONPATH=str(folder))

        assert found == [False, True, int(bare) + 1]

    def test_a_python_without_the_package(self, folder: Path, tmp_path: Path) -> None:
        """One that cannot import it imports torch all the same, and says nothing."""
        (tmp_path / "tracedstore.py").write_text("raise ImportError('not here')")

        done = below("import torch; print(torch.__name__)", {"PYTHONPATH": str(folder)})

        assert (done.stdout, done.stderr) == ("torch\n", "")

    @pytest.mark.parametrize("option", ["-S", "-E", "-I"])
    def test_options_that_forbid_it(self, option: str) -> None:
        """Such a process is not traced, and not disturbed."""
        assert reported(WAITS) is True
        assert reported(WAITS, option) is False

    def test_children(self) -> None:
        """The children of children, too, whatever is between."""
        script = (
            "import subprocess, sys;"
            "subprocess.run(['sh', '-c', '\"$0\" -c \"$1\"', sys.executable,"
            f" {WAITS!r}], check=True)"
        )

        assert reported(script) is True


class TestSitecustomize:
    """The user's own runs as if ours were not there."""

    def user_has(self, folder: Path, text: str) -> dict[str, str]:
        """An environment with a sitecustomize of the user's."""
        (folder / "sitecustomize.py").write_text(text)
        return {"PYTHONPATH": str(folder)}

    def test_runs_once(self, tmp_path: Path) -> None:
        """Under its own name, from its own file."""
        env = self.user_has(tmp_path, "print('here', __name__, __file__)")
        script = "import sitecustomize; print(sitecustomize.__file__)"

        bare = run(sys.executable, "-c", script, env=env)
        traced = below(script, env)

        file = tmp_path / "sitecustomize.py"
        assert bare.stdout == f"here sitecustomize {file}\n{file}\n"
        assert (traced.stdout, traced.stderr) == (bare.stdout, bare.stderr)

    def test_sees_what_it_would_see(self, tmp_path: Path) -> None:
        """The path, and that nothing is imported yet."""
        env = self.user_has(
            tmp_path, "import sys; print(sys.path, sorted(sys.modules))"
        )

        bare = run(sys.executable, "-c", "pass", env=env)
        traced = below("pass", env)

        assert bare.stdout.startswith("['")
        assert (traced.stdout, traced.stderr) == (bare.stdout, bare.stderr)

    @pytest.mark.parametrize(
        "text",
        ["raise ValueError('mine')", "import no_such_module", "raise SystemExit(3)"],
    )
    def test_that_fails(self, tmp_path: Path, text: str) -> None:
        """It fails as it does alone, with the same words."""
        env = self.user_has(tmp_path, text)

        bare = run(sys.executable, "-c", "print('ran')", env=env)
        traced = below("print('ran')", env)

        # Where Python prints a traceback, ours is one of the frames.
        assert bare.stderr.splitlines()
        assert traced.stderr.splitlines()[-1] == bare.stderr.splitlines()[-1]
        assert (traced.returncode, traced.stdout) == (bare.returncode, bare.stdout)

    def test_that_fails_is_no_hindrance(self, tmp_path: Path, folder: Path) -> None:
        """The import of torch is waited for still."""
        env = self.user_has(folder, "raise ValueError('mine')")

        assert reported(WAITS, **env) is True
