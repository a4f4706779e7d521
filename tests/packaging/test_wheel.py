"""What people install."""

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from importlib import import_module
from pathlib import Path

import pytest

from tracedstore.cli.dashboards import SHIPPED

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
        shipped = {
            f"tracedstore/cli/shipped/{name}": path for name, path in SHIPPED.items()
        }
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}

        assert packed == expected | shipped.keys()
        for name, path in shipped.items():
            assert wheel.read(name) == (ROOT / path).read_bytes()
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
        assert dict(found["torchrun.handlers"]) == {
            "traced-c10d": "tracedstore.rendezvous.plugins:traced_c10d",
            "traced-etcd-v2": "tracedstore.rendezvous.plugins:traced_etcd_v2",
        }
        for group in found.sections():
            for entry in found[group].values():
                module, _, attribute = entry.partition(":")
                assert hasattr(import_module(module), attribute), entry

    @pytest.mark.parametrize("first", ["tracedstore.rendezvous", "torchs"])
    def test_imports(self, first: str) -> None:
        """Ours imports nothing of elastic's by itself; both may come first."""
        torchs = "torch.distributed.elastic.rendezvous"
        script = f"""
import importlib, sys, tracedstore
foreign = [m for m in sys.modules if m == "etcd" or m.startswith("{torchs}")]
assert foreign == [], foreign
importlib.import_module("{first if first != "torchs" else torchs}")
import tracedstore.rendezvous
from {torchs} import rendezvous_handler_registry as registry
assert {{"traced-c10d", "traced-etcd-v2"}} <= registry._registry.keys()
assert "etcd" not in sys.modules
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_torch_has_a_floor_and_no_pin(self, wheel: zipfile.ZipFile) -> None:
        """The job chooses its torch."""
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
        required = metadata.get_all("Requires-Dist") or []

        assert "torch>=2.6" in required
        assert metadata["Requires-Python"] == ">=3.11"
        assert set(metadata.get_all("Provides-Extra") or []) == {"otlp", "instrument"}
