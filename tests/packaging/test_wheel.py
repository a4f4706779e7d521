"""The wheel: contents, entry points, metadata, and the files it ships."""

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from importlib import import_module
from pathlib import Path

import pytest

from support.etcd import free_port
from support.kubernetes import load, of_kind
from support.tools import ROOT
from support.wheel import build_wheel
from tracedstore.tools.cli.dashboards import shipped

# A program that does not know of the package.
_TRAIN = """\
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
while type(store) is dist.PrefixStore:
    store = store.underlying_store
print(sys.modules["tracedstore"].__file__, type(store).__name__)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this source tree."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


class TestWheel:
    """Contents and metadata of the wheel."""

    def test_contents(self, wheel: zipfile.ZipFile) -> None:
        """It has the package and the shipped files, and nothing else."""
        source = ROOT / "src"
        expected = {
            str(path.relative_to(source))
            for path in (source / "tracedstore").rglob("*")
            if path.is_file()
            # "builds" has the native base of this checkout.
            and not {"__pycache__", "builds"}.intersection(path.parts)
        }
        originals = {
            f"tracedstore/tools/cli/shipped/{name}": path
            for name, path in shipped().items()
        }
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}

        assert packed == expected | originals.keys()
        for name, path in originals.items():
            assert wheel.read(name) == path.read_bytes()
        assert {"tracedstore/py.typed", "tracedstore/signals/events.schema.json"} <= (
            packed
        )

    def test_export(self, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
        """`tracedstore dashboards export` writes the files of the installed wheel."""
        installed, exported = tmp_path / "installed", tmp_path / "exported"
        wheel.extractall(installed)
        script = (
            "import sys, tracedstore.tools.cli.main as main\n"
            "print(main.__file__, file=sys.stderr)\n"
            f"sys.exit(main.main(['dashboards', 'export', '{exported}']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            # In front of the editable installation.
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        assert Path(done.stderr.strip()).is_relative_to(installed)
        for name, original in shipped().items():
            assert (exported / name).read_bytes() == original.read_bytes()

    def test_start_up(self, wheel: zipfile.ZipFile) -> None:
        """The folder that tracedstore-run puts on PYTHONPATH holds one module."""
        folder = "tracedstore/auto/startup/"
        packed = [name for name in wheel.namelist() if name.startswith(folder)]

        assert packed == [folder + "sitecustomize.py"]

    def test_unmodified_image(self, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
        """The commands of the example trace a program beside which it is not installed.

        The package is that of the volume, and not the editable installation here.
        """
        path = ROOT / "examples/kubernetes/unmodified-image.yaml"
        job = of_kind(load(path), "Job")["spec"]["template"]["spec"]
        (init,), (container,) = job["initContainers"], job["containers"]
        package, volume = tmp_path / "package", tmp_path / "volume"
        wheel.extractall(package)
        volume.mkdir()
        targets = {"/package/.": f"{package}/.", "/tracedstore": str(volume)}
        copy = [targets.get(word, word) for word in init["command"]]
        subprocess.run(copy, check=True, timeout=240)
        (tmp_path / "train.py").write_text(_TRAIN)
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(volume),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [*container["command"], *container["args"]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        file, kind = done.stdout.split()
        assert Path(file).is_relative_to(volume)
        assert kind == "TracedStore"

    def test_entry_points(self, wheel: zipfile.ZipFile) -> None:
        """Commands and plug-ins refer to existing functions and classes."""
        (name,) = [name for name in wheel.namelist() if "entry_points" in name]
        entry_points = ConfigParser()
        entry_points.read_string(wheel.read(name).decode())

        assert entry_points["console_scripts"]["tracedstore-run"] == (
            "tracedstore.auto.command:main"
        )
        assert entry_points["opentelemetry_instrumentor"]["torch_store"] == (
            "tracedstore.auto.otel:TracedStoreInstrumentor"
        )
        assert dict(entry_points["torchrun.handlers"]) == {
            "traced-c10d": "tracedstore.rendezvous.plugins:traced_c10d",
            "traced-etcd": "tracedstore.rendezvous.plugins:traced_etcd",
            "traced-etcd-v2": "tracedstore.rendezvous.plugins:traced_etcd_v2",
        }
        for group in entry_points.sections():
            for entry in entry_points[group].values():
                module, _, attribute = entry.partition(":")
                assert hasattr(import_module(module), attribute), entry

    @pytest.mark.parametrize("first", ["tracedstore.rendezvous", "torchs"])
    def test_imports(self, first: str) -> None:
        """Importing the package does not import elastic; either can be first."""
        torchs = "torch.distributed.elastic.rendezvous"
        script = f"""
import importlib, sys, tracedstore
foreign = [m for m in sys.modules if m == "etcd" or m.startswith("{torchs}")]
assert foreign == [], foreign
importlib.import_module("{first if first != "torchs" else torchs}")
import tracedstore.rendezvous
from {torchs} import rendezvous_handler_registry as registry
assert {{"traced-c10d", "traced-etcd", "traced-etcd-v2"}} <= registry._registry.keys()
assert "etcd" not in sys.modules
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_torch_has_a_floor_and_no_pin(self, wheel: zipfile.ZipFile) -> None:
        """The job chooses the version of torch, above a lower bound."""
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
        required = metadata.get_all("Requires-Dist") or []

        assert "torch>=2.10" in required
        assert metadata["Requires-Python"] == ">=3.11"
        extras = set(metadata.get_all("Provides-Extra") or [])
        assert extras == {"otlp", "instrument", "tools"}
