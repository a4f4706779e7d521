"""Rules for the package's modules: allowed imports, size, names and public API."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tracedstore

ROOT = Path(tracedstore.__file__).parent

# The subpackages and top-level modules that each one may import.
ALLOWED_IMPORTS = {
    "names": set[str](),
    "common": {"names"},
    "recording": {"names", "common"},
    "naming": {"common"},
    "signals": {"names", "common", "recording"},
    "coordination": {"names", "common", "recording", "naming"},
    "local": {"names", "common", "recording", "naming", "signals", "coordination"},
    "diagnosis": {"names", "common", "recording", "naming", "coordination", "local"},
    "etcd": {"names", "common", "recording"},
    "native": {"names", "common", "recording"},
    "export": {
        "names",
        "common",
        "recording",
        "naming",
        "signals",
        "coordination",
        "diagnosis",
        "local",
    },
    "testing": {"common", "recording"},
    "store": {"names", "common", "recording", "etcd", "export", "native"},
    "elastic": {
        "names",
        "common",
        "recording",
        "coordination",
        "diagnosis",
        "export",
    },
    "rendezvous": {
        "names",
        "common",
        "recording",
        "naming",
        "coordination",
        "diagnosis",
        "etcd",
        "export",
        "store",
        "elastic",
        "local",
    },
    "auto": {
        "names",
        "common",
        "recording",
        "naming",
        "signals",
        "coordination",
        "diagnosis",
        "export",
        "rendezvous",
        "store",
        "elastic",
        "local",
    },
    "_public": {
        "common",
        "recording",
        "signals",
        "coordination",
        "export",
        "store",
        "elastic",
        "auto",
    },
    "__init__": {"auto", "_public"},
    # Below: what people run at a terminal. No package above may import it.
    "tools/__init__": set[str](),
    "tools/terminal": set[str](),
    "tools/job_view": {"common", "coordination"},
    "tools/report": {
        "names",
        "common",
        "naming",
        "diagnosis",
        "local",
        "tools/job_view",
    },
    "tools/attach": {
        "names",
        "common",
        "recording",
        "naming",
        "coordination",
        "diagnosis",
        "etcd",
        "export",
        "rendezvous",
        "tools/job_view",
        "tools/terminal",
        "local",
    },
    "tools/top": {
        "names",
        "common",
        "recording",
        "naming",
        "coordination",
        "diagnosis",
        "export",
        "tools/attach",
        "tools/report",
        "tools/job_view",
        "tools/terminal",
        "local",
    },
    "tools/demo": {
        "names",
        "common",
        "recording",
        "naming",
        "signals",
        "coordination",
        "elastic",
        "etcd",
        "export",
        "store",
        "tools/attach",
        "tools/terminal",
        "tools/top",
        "local",
    },
    "tools/cli": {
        "common",
        "recording",
        "naming",
        "coordination",
        "export",
        "native",
        "tools/attach",
        "tools/demo",
        "tools/report",
        "tools/terminal",
        "tools/top",
    },
}
# The only modules that may import these libraries. Each list is kept short.
ALLOWED_USERS = {
    "etcd": {
        "etcd/request_counts.py",
        "tools/attach/store_snapshot.py",
        "tools/demo/store_servers.py",
    },
    "prometheus_client": {
        "tools/demo/outputs.py",
        "signals/metrics.py",
        "export/http_endpoint.py",
        "export/node_metrics.py",
        "export/node_sums.py",
        "export/setup.py",
    },
    "opentelemetry.sdk": {
        "tools/demo/rank.py",
        "export/tracer_provider.py",
        "export/otlp.py",
        "export/own_exporters.py",
    },
    "structlog": {"signals/events.py"},
    "rich": {
        "tools/terminal.py",
        "tools/cli/status.py",
        "tools/top/rows.py",
        "tools/top/app.py",
    },
    # In the extra `tools`.
    "textual": {
        "tools/top/app.py",
        "tools/top/live.py",
        "tools/top/replay.py",
    },
    "textual_serve": {"tools/top/web.py"},
    "aiohttp": {"tools/top/web.py"},
    "jinja2": {"tools/report/page.py"},
    "opentelemetry.instrumentation": {"auto/otel.py"},
}
# Modules that every Python process under tracedstore-run or
# opentelemetry-instrument loads.
LIGHT_MODULES = ("auto/patches.py", "auto/command.py", "auto/otel.py", "__init__.py")


_NO_EXTRA = "import sys; sys.modules['opentelemetry.instrumentation'] = None\n"


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new Python process."""
    return subprocess.run(
        # The instrument extra is hidden, because importing it loads many modules.
        [sys.executable, "-W", "ignore", "-c", _NO_EXTRA + script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@cache
def imports(module: Path) -> set[str]:
    """Return every module that a file imports, at any level of the file."""
    modules = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert getattr(node, "level", 0) == 0, f"{module}: relative import"
            modules |= imports_of(node)
    return modules


def imports_of(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Return every module, or name in a module, that a statement imports."""
    if isinstance(statement, ast.Import):
        return {name.name for name in statement.names}
    return {f"{statement.module}.{name.name}" for name in statement.names}


def package_of(path: Path) -> str:
    """Return the subpackage or top-level module of a file."""
    return package_in(path.relative_to(ROOT).parts)


def package_in(parts: Sequence[str]) -> str:
    """Return the subpackage of a path or a dotted name; `tools` has two levels."""
    depth = 2 if parts[0] == "tools" else 1
    return "/".join(parts[:depth]).removesuffix(".py")


MODULES = sorted(ROOT.rglob("*.py"))


def path_of(module: Path) -> str:
    """Return the path of a module in the package."""
    return str(module.relative_to(ROOT))


class TestModules:
    """Rules for every module. A test reports all modules that break its rule."""

    def test_imports_point_downwards(self) -> None:
        """A module imports only its own package and the allowed ones below."""
        offenders = [
            f"{path_of(module)} imports {name}"
            for module in MODULES
            if (package := package_of(module)) != "_version"
            for name in imports(module)
            if name.startswith("tracedstore.")
            and package_in(name.split(".")[1:])
            not in ALLOWED_IMPORTS[package] | {package, "_version", "common"}
        ]

        assert offenders == []

    def test_signals_do_not_import_each_other(self) -> None:
        """The signals are independent observers that share only `names`."""
        offenders = [
            f"{path_of(module)} imports {name}"
            for module in MODULES
            if package_of(module) == "signals"
            for name in imports(module)
            if name.startswith("tracedstore.signals")
        ]

        assert offenders == []

    def test_libraries_are_imported_in_few_modules(self) -> None:
        """Each of these libraries is imported only in its allowed modules."""
        offenders = [
            f"{path_of(module)} imports {name}"
            for module in MODULES
            for name in imports(module)
            for library, users in ALLOWED_USERS.items()
            if (name == library or name.startswith(library + "."))
            and path_of(module) not in users
        ]

        assert offenders == []

    def test_light_modules_import_little(self) -> None:
        """At module level they import only the standard library and each other."""
        offenders = [
            f"{path} imports {name}"
            for path in LIGHT_MODULES
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in imports_of(node)
            if name.split(".")[0] not in sys.stdlib_module_names
            and not name.startswith(("tracedstore.auto.", "tracedstore._version"))
        ]

        assert offenders == []

    def test_size(self) -> None:
        """A module has at most 800 lines: one idea is one file."""
        sizes = {
            path_of(module): len(module.read_text().splitlines()) for module in MODULES
        }

        assert {path: size for path, size in sizes.items() if size > 800} == {}

    def test_names_are_given_once(self) -> None:
        """No two classes have one name, and no two modules but ``__init__.py``."""
        places: dict[str, list[str]] = {}
        for module in MODULES:
            if module.name != "__init__.py":
                places.setdefault(module.name, []).append(path_of(module))
            for node in ast.parse(module.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(path_of(module))

        assert {name: found for name, found in places.items() if len(found) > 1} == {}

    def test_names_are_spelled_once(self) -> None:
        """Only one module has the names of metrics, attributes and events."""
        from tracedstore import names

        known = {metric.name for metric in names.METRICS}
        known |= {*names.ATTRIBUTES, *names.EVENT_NAMES}
        known |= {metric.otel for metric in names.METRICS}
        offenders = [
            f"{path_of(module)}:{node.lineno} {node.value}"
            for module in MODULES
            if module.name != "names.py"
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.Constant) and node.value in known
        ]

        assert offenders == []


class TestPublicSurface:
    """The names that users import."""

    def test_all(self) -> None:
        """__all__ is sorted and complete, and every name is documented."""
        modules = {"auto", "common", "coordination", "diagnosis"}
        modules |= {"elastic", "etcd", "export", "local", "names", "naming", "native"}
        modules |= {"recording", "rendezvous", "signals", "store"}
        modules |= {"testing", "tools"}

        assert tracedstore.__all__ == sorted(tracedstore.__all__)
        for name in tracedstore.__all__:
            # Names are in the package once they are used.
            if name != "__version__":
                assert getattr(tracedstore, name).__doc__, name
        public = {name for name in vars(tracedstore) if not name.startswith("_")}
        assert public - modules == set(tracedstore.__all__) - {"__version__"}

    def test_torch_is_loaded_with_first_name(self) -> None:
        """Importing the package and its light modules does not load torch."""
        light = [
            "tracedstore." + path.removesuffix(".py").replace("/", ".")
            for path in LIGHT_MODULES
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

        done = run_script(script)

        assert done.stdout.splitlines() == ["set()", "set()", "wrap True", "False"], (
            done.stderr
        )

    def test_report_needs_no_torch(self) -> None:
        """`report` does not load torch, because logs are read on other machines.

        Of `naming` it imports only the formatting of ranks.
        """
        allowed = ("ranges.", "decoders.default_name")
        for module in (ROOT / "tools" / "report").glob("*.py"):
            for name in imports(module):
                if name.startswith("tracedstore.naming"):
                    local_name = name.removeprefix("tracedstore.naming.")
                    assert local_name.startswith(allowed), f"{module} imports {name}"
        script = (
            "import sys, tracedstore.tools.cli.report\n"
            "heavy = {'torch', 'structlog', 'prometheus_client', 'opentelemetry'}\n"
            "print(heavy & set(sys.modules))\n"
        )

        done = run_script(script)

        assert done.stdout == "set()\n", done.stderr

    def test_screen_needs_no_torch(self) -> None:
        """The process that draws `top` does not load torch, which takes seconds."""
        script = (
            "import sys, tracedstore.tools.top.live\n"
            "print({'torch', 'structlog', 'opentelemetry'} & set(sys.modules))\n"
        )

        done = run_script(script)

        assert done.stdout == "set()\n", done.stderr

    def test_doctest_of_testing(self) -> None:
        """The example in tracedstore.testing runs without failures."""
        import doctest

        from tracedstore import testing

        results = doctest.testmod(testing)
        assert (results.failed, results.attempted) == (0, 10)
