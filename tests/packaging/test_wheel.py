"""What people install."""

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)),
            str(ROOT),
        ],
        check=True,
        timeout=50,
    )
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


class TestWheel:
    """The wheel has what is needed, and nothing else."""

    def test_contents(self, wheel: zipfile.ZipFile) -> None:
        """Every module, the types marker, the schema; no tests, no benchmarks."""
        source = ROOT / "src"
        expected = {
            str(path.relative_to(source))
            for path in (source / "tracedstore").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}

        assert packed == expected
        assert {"tracedstore/py.typed", "tracedstore/signals/events.schema.json"} <= (
            packed
        )

    def test_start_up(self, wheel: zipfile.ZipFile) -> None:
        """The folder for PYTHONPATH has one module and is no package."""
        folder = "tracedstore/auto/startup/"
        packed = [name for name in wheel.namelist() if name.startswith(folder)]

        assert packed == [folder + "sitecustomize.py"]

    def test_entry_points(self, wheel: zipfile.ZipFile) -> None:
        """The commands and the plug-ins point at what is there."""
        (name,) = [name for name in wheel.namelist() if "entry_points" in name]
        found = ConfigParser()
        found.read_string(wheel.read(name).decode())

        assert found["console_scripts"]["tracedstore-run"] == (
            "tracedstore.auto.command:main"
        )
        assert found["opentelemetry_instrumentor"]["torch_store"] == (
            "tracedstore.auto.otel:TracedStoreInstrumentor"
        )
        for group in found.sections():
            for entry in found[group].values():
                module, _, attribute = entry.partition(":")
                assert hasattr(import_module(module), attribute), entry

    def test_torch_has_a_floor_and_no_pin(self, wheel: zipfile.ZipFile) -> None:
        """The job chooses its torch."""
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
        required = metadata.get_all("Requires-Dist") or []

        assert "torch>=2.6" in required
        assert metadata["Requires-Python"] == ">=3.11"
        assert set(metadata.get_all("Provides-Extra") or []) == {"otlp", "instrument"}
