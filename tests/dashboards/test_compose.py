"""The compose file and what it mounts fit together.

No image can be pulled where tests run, so nothing here is started: this is what can
be told from the files.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import FILES, load
from support.tools import ROOT
from tracedstore import names
from tracedstore.export.settings import PREFIX, Settings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# Their images have nothing to ask with; `ready` asks for them.
ASKED_BY_READY = {"loki": 3100, "tempo": 3200, "otel-collector": 13133}
# Where each listens, by its own default or by what is configured here.
LISTENS = {
    "etcd": {2379},
    "job": {9400, 9401},
    "prometheus": {9090},
    "alertmanager": {9093},
    "pager": {8080},
    "grafana": {3000},
    "tempo": {3200, 4318},
    "loki": {3100},
    "otel-collector": {4318, 8888, 13133},
}
CONFIGURATIONS = sorted(
    path for path in (ROOT / "deploy").rglob("*.y*ml") if path.is_file()
)

every_service = pytest.mark.parametrize("name", SERVICES)


def read(path: str) -> Any:
    """Read a configuration."""
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Give what is mounted of this folder, and where."""
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    return [(part[0], part[1]) for part in parts if part[0].startswith(".")]


@every_service
class TestService:
    """What every service keeps to."""

    def test_image_is_pinned(self, name: str) -> None:
        """By its exact version, or built from what is here."""
        image, _, tag = SERVICES[name]["image"].rpartition(":")

        if "build" in SERVICES[name]:
            assert (image, tag) == ("tracedstore-job", "dev")
        else:
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), tag

    def test_limits(self, name: str) -> None:
        """None can take the machine down."""
        service = SERVICES[name]

        assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
        assert service["logging"]["options"]["max-size"]

    def test_nothing_listens_beyond_loopback(self, name: str) -> None:
        """Every port that is published is loopback's, and one it listens at."""
        assert "network_mode" not in SERVICES[name]
        for port in SERVICES[name].get("ports", []):
            address, _, inside = port.split(":")
            assert address == "127.0.0.1"
            assert int(inside) in LISTENS[name]

    def test_health(self, name: str) -> None:
        """It is asked how it is, by itself or by another one."""
        if name in ASKED_BY_READY:
            asked = SERVICES["ready"]["healthcheck"]["test"]
            assert any(f"http://{name}:{ASKED_BY_READY[name]}/" in url for url in asked)
        else:
            assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"

    def test_mounts_exist(self, name: str) -> None:
        """What is mounted is there, and only to be read."""
        for source, _ in mounts(SERVICES[name]):
            assert (ROOT / source).exists(), source
        for volume in SERVICES[name].get("volumes", []):
            source, _, *mode = volume.split(":")
            if source.startswith("."):
                assert mode == ["ro"], volume
            else:
                assert source in COMPOSE["volumes"], volume

    def test_depends_on_what_is_there(self, name: str) -> None:
        """And waits for health only where there is some to wait for."""
        needs = SERVICES[name].get("depends_on", {})
        for other in needs:
            assert other in SERVICES
            if isinstance(needs, dict):
                assert needs[other] == {"condition": "service_healthy"}
                assert "healthcheck" in SERVICES[other]

    def test_configuration_is_mounted(self, name: str) -> None:
        """A file that the command names is a file that is mounted."""
        for word in map(str, SERVICES[name].get("command", [])):
            if found := re.fullmatch(r"--?config(?:\.file)?=(.*)", word):
                assert found[1] in [target for _, target in mounts(SERVICES[name])]


class TestAddresses:
    """Who talks to whom."""

    @pytest.mark.parametrize(
        "path",
        [*CONFIGURATIONS, ROOT / "docker-compose.yml"],
        ids=lambda path: path.name,
    )
    def test_ports(self, path: Path) -> None:
        """Every service that is named is one, at a port where it listens."""
        text = path.read_text("utf-8")
        pattern = rf"\b({'|'.join(SERVICES)}):(\d{{4,5}})\b(?!:)"
        for name, port in re.findall(pattern, text):
            assert int(port) in LISTENS[name], f"{path}: {name}:{port}"
        for name in re.findall(r"https?://([a-z-]+):\d", text):
            assert name in SERVICES, f"{path}: {name}"

    def test_listeners(self) -> None:
        """They listen where the others expect it."""
        assert read("deploy/tempo/tempo.yaml")["server"]["http_listen_port"] == 3200
        assert read("deploy/loki/loki.yaml")["server"]["http_listen_port"] == 3100
        collector = read("deploy/otel-collector/config.yaml")
        assert collector["extensions"]["health_check"]["endpoint"].endswith(":13133")
        http = collector["receivers"]["otlp"]["protocols"]["http"]
        assert http["endpoint"].endswith(":4318")
        assert SERVICES["pager"]["command"][-1] == "8080"
        # Compose's job is one agent and its ranks, from that port on.
        assert SERVICES["job"]["environment"]["TRACEDSTORE_HTTP_PORT"] == "9400"

    def test_the_pipelines_are_complete(self) -> None:
        """What a pipeline of the collector names is configured, and nothing is idle."""
        collector = read("deploy/otel-collector/config.yaml")
        for kind in ("receivers", "processors", "exporters"):
            used = {
                name
                for pipeline in collector["service"]["pipelines"].values()
                for name in pipeline[kind]
            }
            assert used == set(collector[kind])
        assert collector["service"]["extensions"] == list(collector["extensions"])


class TestJob:
    """The job that misbehaves."""

    def test_settings(self) -> None:
        """Its settings are settings, with values that are accepted."""
        given = {
            name: value
            for name, value in SERVICES["job"]["environment"].items()
            if name.startswith(PREFIX) and name != f"{PREFIX}RUN_ID"
        }

        settings = Settings.load({}, given)

        assert settings.http_port == 9400
        assert settings.tracing
        assert {name.removeprefix(PREFIX).lower() for name in given} <= set(
            Settings.__dataclass_fields__
        )

    def test_backend(self) -> None:
        """The traced rendezvous is one of torchrun's, and etcd has the API for it."""
        from importlib.metadata import entry_points

        command = " ".join(SERVICES["job"]["command"])
        (backend,) = re.findall(r"--rdzv-backend (\S+)", command)

        assert backend in {
            found.name for found in entry_points(group="torchrun.handlers")
        }
        assert "--enable-v2=true" in SERVICES["etcd"]["command"]
        assert SERVICES["etcd"]["image"].rpartition(":")[2].startswith("v3.5.")

    def test_scripts(self) -> None:
        """The scripts that services run are in the image."""
        for name in ("job", "pager", "ready"):
            service = SERVICES[name]
            text = " ".join(service["command"] + service["healthcheck"]["test"])
            for script in re.findall(r"\bjob/\w+\.py", text):
                assert (ROOT / "deploy" / script).exists()

    def test_logs_reach_the_collector(self) -> None:
        """It reads where the job writes, under the service's name."""
        collector = read("deploy/otel-collector/config.yaml")
        volume = "job-logs:/var/log/job"

        assert volume in SERVICES["job"]["volumes"]
        assert f"{volume}:ro" in SERVICES["otel-collector"]["volumes"]
        files = collector["receivers"]["filelog"]
        assert files["include"] == ["/var/log/job/**/stderr.log"]
        service = SERVICES["job"]["environment"]["OTEL_SERVICE_NAME"]
        assert files["resource"] == {"service.name": service}


class TestGrafana:
    """Grafana has everything from files."""

    SOURCES = read("deploy/grafana/provisioning/datasources/datasources.yaml")[
        "datasources"
    ]

    def test_sources(self) -> None:
        """One of each kind that dashboards ask for, and links among them that lead."""
        uids = {source["uid"]: source["type"] for source in self.SOURCES}
        kinds = {
            variable["query"]
            for path in FILES
            for variable in load(path)["templating"]["list"]
            if variable["type"] == "datasource"
        }

        assert set(uids.values()) == kinds
        linked = re.findall(r"datasourceUid': '(\w+)'", str(self.SOURCES))
        assert set(linked) == {"tempo", "loki"} <= set(uids)

    def test_exemplars(self) -> None:
        """The label that exemplars have is the one that is linked."""
        (prometheus,) = [s for s in self.SOURCES if s["type"] == "prometheus"]
        (link,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]

        assert link == {"name": "trace_id", "datasourceUid": "tempo"}
        assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]

    def test_trace_ids_in_lines(self) -> None:
        """Are found in the lines as they are written."""
        (loki,) = [s for s in self.SOURCES if s["type"] == "loki"]
        (field,) = loki["jsonData"]["derivedFields"]
        line = f'{{"event": "{names.BARRIER_TIMEOUT}", "trace_id": "{"ab" * 16}"}}'

        found = re.search(field["matcherRegex"], line)

        assert found is not None
        assert found[1] == "ab" * 16

    def test_dashboards(self) -> None:
        """Every one is where Grafana looks, and one of them is what it opens with."""
        (provider,) = read("deploy/grafana/provisioning/dashboards/dashboards.yaml")[
            "providers"
        ]
        folder = provider["options"]["path"]
        mounted = dict(mounts(SERVICES["grafana"]))

        for path in FILES:
            source = f"./{path.relative_to(ROOT)}"
            assert mounted[source] == f"{folder}/{path.name}"
        home = SERVICES["grafana"]["environment"][
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
        ]
        assert home in mounted.values()


class TestRules:
    """Rules are where their programs look."""

    def test_prometheus(self) -> None:
        """By the path in its configuration."""
        (path,) = read("deploy/prometheus/prometheus.yml")["rule_files"]

        assert ("./dashboards/rules/prometheus.yaml", path) in mounts(
            SERVICES["prometheus"]
        )

    def test_loki(self) -> None:
        """In the folder of the only tenant there is without authentication."""
        config = read("deploy/loki/loki.yaml")
        folder = config["ruler"]["storage"]["local"]["directory"]

        assert config["auth_enabled"] is False
        targets = dict(mounts(SERVICES["loki"]))
        found = targets["./dashboards/rules/loki.yaml"]
        assert found.startswith(f"{folder}/fake/")


def test_labels_of_targets_are_left_to_targets() -> None:
    """A metric's label of the same name would be lost, or be called exported_host."""
    of_targets = {"job", "instance", "run_id", "rank", "local_rank", "host"}

    for metric in names.METRICS:
        assert not of_targets & {*metric.labels}, metric.name
