"""The rooms of the package, and which doors there are between them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tracedstore

ROOT = Path(tracedstore.__file__).parent

# Each room, and the rooms below it that it may import. What is not listed may not.
BELOW = {
    "names": set[str](),
    "core": {"names"},
    "signals": {"names", "core"},
    "coordination": {"names", "core"},
    "etcd": {"core"},
    "export": {"names", "core", "signals", "coordination"},
    "testing": {"core"},
    "store": {"core", "etcd", "export"},
    "rendezvous": {"names", "core", "coordination", "store"},
    "auto": {
        "names",
        "core",
        "signals",
        "coordination",
        "export",
        "rendezvous",
        "store",
    },
    "report": {"names", "coordination"},
    "terminal": set[str](),
    "attach": {"core", "coordination", "export", "rendezvous", "terminal"},
    "demo": {"names", "core", "signals", "coordination", "export", "store", "terminal"},
    "cli": {"core", "coordination", "export", "report", "demo", "attach", "terminal"},
    "_public": {"core", "signals", "coordination", "export", "store", "auto"},
    "__init__": {"auto", "_public"},
}
# Which modules may import these, because each of them is a choice to be kept small.
ONLY_IN = {
    "etcd": {
        "etcd/counting_client.py",
        "attach/store_connection.py",
        "demo/store_servers.py",
    },
    "prometheus_client": {
        "demo/outputs.py",
        "signals/metrics.py",
        "export/endpoint.py",
        "export/pages.py",
        "export/setup.py",
    },
    "opentelemetry.sdk": {
        "demo/rank.py",
        "export/tracing.py",
        "export/setup.py",
    },
    "structlog": {"signals/events.py"},
    "rich": {"terminal.py", "cli/status.py", "demo/rank_table.py"},
    # Private to torch, and in need of packages that nothing else here needs.
    "torch.distributed.debug": {
        "auto/debug_page/install.py",
        "auto/debug_page/handler.py",
    },
    "opentelemetry.instrumentation": {"auto/otel.py"},
}
# What every Python process below tracedstore-run or opentelemetry-instrument loads.
LIGHT = ("auto/patches.py", "auto/command.py", "auto/otel.py", "__init__.py")


_NO_EXTRA = "import sys; sys.modules['opentelemetry.instrumentation'] = None\n"


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python of its own."""
    return subprocess.run(
        # Without the extra, whose own import is not light.
        [sys.executable, "-W", "ignore", "-c", _NO_EXTRA + script],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def imports(module: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert getattr(node, "level", 0) == 0, f"{module}: relative import"
            found |= imports_of(node)
    return found


def imports_of(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Every module, or name in a module, that a statement imports."""
    if isinstance(statement, ast.Import):
        return {name.name for name in statement.names}
    return {f"{statement.module}.{name.name}" for name in statement.names}


def room(path: Path) -> str:
    """The first part of a module's path below the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize(
    "module", MODULES, ids=lambda path: str(path.relative_to(ROOT))
)
class TestModules:
    """What every module keeps to."""

    def test_imports_point_downwards(self, module: Path) -> None:
        """A room knows its own and those below it."""
        own = room(module)
        if own == "_version":
            return
        allowed = BELOW[own] | {own, "_version"}

        for name in imports(module):
            if name.startswith("tracedstore."):
                assert name.split(".")[1] in allowed, f"{module} imports {name}"

    def test_signals_do_not_know_each_other(self, module: Path) -> None:
        """Each is an observer of its own; `names` is what they share."""
        if room(module) != "signals":
            return
        for name in imports(module):
            if name.startswith("tracedstore.signals"):
                assert name == "tracedstore.names", f"{module} imports {name}"

    def test_heavy_imports_stay_where_they_are(self, module: Path) -> None:
        """A library is used from as few modules as can be."""
        path = str(module.relative_to(ROOT))
        for name in imports(module):
            for library, users in ONLY_IN.items():
                if name == library or name.startswith(library + "."):
                    assert path in users, f"{path} imports {name}"

    def test_light_modules_load_nothing(self, module: Path) -> None:
        """At their top they import the standard library, and each other."""
        if str(module.relative_to(ROOT)) not in LIGHT:
            return
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in imports_of(node):
                    assert name.split(".")[
                        0
                    ] in sys.stdlib_module_names or name.startswith(
                        ("tracedstore.auto.", "tracedstore._version")
                    ), f"{module} imports {name}"

    def test_size(self, module: Path) -> None:
        """A module past 400 lines holds two ideas."""
        assert len(module.read_text().splitlines()) <= 400

    def test_names_are_spelled_once(self, module: Path) -> None:
        """Metric, attribute and event names stand in names.py alone."""
        from tracedstore import names

        if module.name == "names.py":
            return
        known = {metric.name for metric in names.METRICS}
        known |= {*names.ATTRIBUTES, *names.EVENT_NAMES}
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in known, f"{module}:{node.lineno}"


class TestPublicSurface:
    """What users import."""

    def test_all_is_what_is_there(self) -> None:
        """Sorted, complete, and everything in it is documented."""
        modules = {"coordination", "core", "etcd", "export", "names", "signals"}
        modules |= {"auto", "cli", "demo", "rendezvous", "report", "store", "testing"}
        modules |= {"attach", "terminal"}
        public = {name for name in vars(tracedstore) if not name.startswith("_")}

        assert tracedstore.__all__ == sorted(tracedstore.__all__)
        assert public - modules == set(tracedstore.__all__) - {"__version__"}
        for name in tracedstore.__all__:
            if name != "__version__":
                assert getattr(tracedstore, name).__doc__, name

    def test_torch_comes_with_the_first_name(self) -> None:
        """Neither importing the package nor its light modules loads torch."""
        light = [
            "tracedstore." + path.removesuffix(".py").replace("/", ".")
            for path in LIGHT
            if path != "__init__.py"
        ]
        script = (
            f"import sys, tracedstore, {', '.join(light)}\n"
            "heavy = {'torch', 'structlog', 'prometheus_client', 'logging'}\n"
            "print(heavy & set(sys.modules))\n"
            "tracedstore.instrument()\n"
            "print(heavy & set(sys.modules))\n"
            "print(tracedstore.wrap.__name__, 'torch' in sys.modules)\n"
            "print(hasattr(tracedstore, 'no_such_name'))\n"
        )

        done = run_alone(script)

        assert done.stdout.splitlines() == ["set()", "set()", "wrap True", "False"], (
            done.stderr
        )

    def test_a_report_needs_no_torch(self) -> None:
        """Logs are read where no job runs: of coordination, only words for ranks."""
        words = ("ranges.", "decoders.nameless")
        for module in (ROOT / "report").glob("*.py"):
            for name in imports(module):
                if name.startswith("tracedstore.coordination"):
                    below = name.removeprefix("tracedstore.coordination.")
                    assert below.startswith(words), f"{module} imports {name}"
        script = (
            "import sys, tracedstore.cli.report\n"
            "heavy = {'torch', 'structlog', 'prometheus_client', 'opentelemetry'}\n"
            "print(heavy & set(sys.modules))\n"
        )

        done = run_alone(script)

        assert done.stdout == "set()\n", done.stderr

    def test_doctest_of_the_helpers(self) -> None:
        """The example in tracedstore.testing runs."""
        import doctest

        from tracedstore import testing

        results = doctest.testmod(testing)
        assert (results.failed, results.attempted) == (0, 10)
