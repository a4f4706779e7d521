"""tracedstore-run, and the start-up of Python below it."""

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
    """Run a command, with PYTHONPATH only from env."""
    environ = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    return subprocess.run(
        command,
        env={**environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def output_of(script: str, *options: str, **env: str) -> Any:
    """Run a script below tracedstore-run; return the JSON that it prints."""
    done = run(RUN, sys.executable, *options, "-c", script, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def below(script: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in the environment that tracedstore-run creates."""
    return run(sys.executable, "-c", script, env=environment(env))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with an empty torch package."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    return tmp_path


HAS_HOOK = """
import json, sys
hooks = [hook.__name__ for hook in sys.meta_path if hasattr(hook, "__name__")]
print(json.dumps("_TorchImportHook" in hooks))
"""


class TestCommand:
    """tracedstore-run executes the command."""

    def test_exit_code_and_streams(self) -> None:
        """Exit code, stdout and stderr are the command's."""
        done = run(RUN, "sh", "-c", "echo out; echo err >&2; exit 7")

        assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")

    def test_help(self) -> None:
        """The help has usage, examples and exit codes."""
        done = run(RUN, "--help")

        assert done.returncode == 0
        assert done.stdout.startswith("usage: tracedstore-run")
        assert "Examples:\n  tracedstore-run torchrun" in done.stdout
        assert "Exit codes: " in done.stdout

    def test_version(self) -> None:
        """The version is the package's."""
        assert run(RUN, "--version").stdout == f"tracedstore-run {__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            ([], 125, "no command given; try tracedstore-run --help"),
            (["--"], 125, "no command given; try tracedstore-run --help"),
            (["-x"], 125, "unknown option '-x'; known are --help, --version"),
            (
                ["no-such-command"],
                127,
                "command 'no-such-command' is not on PATH; try its path",
            ),
            (
                ["train.py"],
                127,
                "command 'train.py' is not on PATH; try python train.py",
            ),
            (["/"], 126, "'/' cannot be run: Permission denied"),
        ],
    )
    def test_errors(self, arguments: list[str], status: int, message: str) -> None:
        """Errors have one sentence and the exit code of a shell."""
        done = run(RUN, *arguments)

        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr == f"tracedstore-run: {message}\n"

    def test_dashes(self) -> None:
        """The command follows two dashes."""
        done = run(RUN, "--", "sh", "-c", "echo $1", "sh", "--help")

        assert done.stdout == "--help\n"

    def test_imports(self) -> None:
        """tracedstore-run does not import torch."""
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
            # An empty entry is the working directory.
            (":/a", [STARTUP, "", "/a"]),
            (f"/a:{STARTUP}:/b", [STARTUP, "/a", "/b"]),
        ],
    )
    def test_python_path(self, before: str | None, after: list[str]) -> None:
        """The start-up directory is first, once; the other entries are kept."""
        env = {} if before is None else {"PYTHONPATH": before}

        done = run(RUN, RUN, "printenv", "PYTHONPATH", env=env)

        assert done.stdout.removesuffix("\n").split(os.pathsep) == after


class TestStartUp:
    """A Python process below tracedstore-run starts as without it."""

    def test_nothing_is_loaded(self) -> None:
        """No additional module is loaded before torch."""
        script = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
        bare = json.loads(run(sys.executable, "-c", script).stdout)

        assert output_of(script) == bare

    def test_import_of_torch(self, folder: Path) -> None:
        """The import of torch instruments it, also after find_spec()."""
        script = """
import importlib.util, json, sys
first = "tracedstore" in sys.modules
importlib.util.find_spec("torch")
import torch
from tracedstore.auto import patches
print(json.dumps([first, patches._enabled, len(sys.meta_path)]))
"""
        bare = run(sys.executable, "-c", "import sys; print(len(sys.meta_path))").stdout

        output = output_of(script, PYTHONPATH=str(folder))

        assert output == [False, True, int(bare) + 1]

    def test_python_without_the_package(self, folder: Path, tmp_path: Path) -> None:
        """The import of torch works, untraced and without a message."""
        (tmp_path / "tracedstore.py").write_text("raise ImportError('not here')")

        done = below("import torch; print(torch.__name__)", {"PYTHONPATH": str(folder)})

        assert (done.stdout, done.stderr) == ("torch\n", "")

    @pytest.mark.parametrize("option", ["-S", "-E", "-I"])
    def test_options_that_skip_the_hook(self, option: str) -> None:
        """With -S, -E or -I a process is not traced."""
        assert output_of(HAS_HOOK) is True
        assert output_of(HAS_HOOK, option) is False

    def test_grandchildren(self) -> None:
        """Processes below other programs have the hook too."""
        script = (
            "import subprocess, sys;"
            "subprocess.run(['sh', '-c', '\"$0\" -c \"$1\"', sys.executable,"
            f" {HAS_HOOK!r}], check=True)"
        )

        assert output_of(script) is True


class TestSitecustomize:
    """The user's sitecustomize runs as without tracedstore-run."""

    def write(self, folder: Path, text: str) -> dict[str, str]:
        """Write a sitecustomize; return an environment that has it."""
        (folder / "sitecustomize.py").write_text(text)
        return {"PYTHONPATH": str(folder)}

    def test_runs_once(self, tmp_path: Path) -> None:
        """It runs once, with its name and file."""
        env = self.write(tmp_path, "print('here', __name__, __file__)")
        script = "import sitecustomize; print(sitecustomize.__file__)"

        bare = run(sys.executable, "-c", script, env=env)
        traced = below(script, env)

        file = tmp_path / "sitecustomize.py"
        assert bare.stdout == f"here sitecustomize {file}\n{file}\n"
        assert (traced.stdout, traced.stderr) == (bare.stdout, bare.stderr)

    def test_path_and_modules(self, tmp_path: Path) -> None:
        """sys.path and sys.modules are as without the hook."""
        env = self.write(tmp_path, "import sys; print(sys.path, sorted(sys.modules))")

        bare = run(sys.executable, "-c", "pass", env=env)
        traced = below("pass", env)

        assert bare.stdout.startswith("['")
        assert (traced.stdout, traced.stderr) == (bare.stdout, bare.stderr)

    @pytest.mark.parametrize(
        "text",
        ["raise ValueError('mine')", "import no_such_module", "raise SystemExit(3)"],
    )
    def test_failure(self, tmp_path: Path, text: str) -> None:
        """It fails with the same exit code and message."""
        env = self.write(tmp_path, text)

        bare = run(sys.executable, "-c", "print('ran')", env=env)
        traced = below("print('ran')", env)

        # A traceback has an additional frame of the hook.
        assert bare.stderr.splitlines()
        assert traced.stderr.splitlines()[-1] == bare.stderr.splitlines()[-1]
        assert (traced.returncode, traced.stdout) == (bare.returncode, bare.stdout)

    def test_hook_after_failure(self, tmp_path: Path, folder: Path) -> None:
        """The hook remains installed."""
        env = self.write(folder, "raise ValueError('mine')")

        assert output_of(HAS_HOOK, **env) is True
