"""The compose file is consistent with the files that it mounts.

The tests cannot pull images, so they start no service and check the files only.
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
# The images of these services have no HTTP client; the health check of `ready` covers
# them.
CHECKED_BY_READY = {"loki": 3100, "tempo": 3200, "otel-collector": 13133}
# The ports of each service, by default or by configuration.
PORTS = {
    "etcd": {2379},
    "job": {27400},
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
    """Parse a YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the files of the repository that a service mounts, with their targets."""
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    return [(part[0], part[1]) for part in parts if part[0].startswith(".")]


@every_service
class TestService:
    """Rules for every service."""

    def test_image_is_pinned(self, name: str) -> None:
        """An image has an exact version, or is built from this repository."""
        image, _, tag = SERVICES[name]["image"].rpartition(":")

        if "build" in SERVICES[name]:
            assert (image, tag) == ("tracedstore-job", "dev")
        else:
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), tag

    def test_limits(self, name: str) -> None:
        """Every service has limits for CPU, memory, processes and logs."""
        service = SERVICES[name]

        assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
        assert service["logging"]["options"]["max-size"]

    def test_ports_are_published_on_loopback_only(self, name: str) -> None:
        """A published port is on 127.0.0.1, and the service listens on it."""
        assert "network_mode" not in SERVICES[name]
        for port in SERVICES[name].get("ports", []):
            address, _, inside = port.split(":")
            assert address == "127.0.0.1"
            assert int(inside) in PORTS[name]

    def test_health(self, name: str) -> None:
        """Every service has a health check, or `ready` checks it."""
        if name in CHECKED_BY_READY:
            urls = SERVICES["ready"]["healthcheck"]["test"]
            assert any(
                f"http://{name}:{CHECKED_BY_READY[name]}/" in url for url in urls
            )
        else:
            assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"

    def test_mounts_exist(self, name: str) -> None:
        """Mounted files exist and are read-only; mounted volumes are declared."""
        for source, _ in mounts(SERVICES[name]):
            assert (ROOT / source).exists(), source
        for volume in SERVICES[name].get("volumes", []):
            source, _, *mode = volume.split(":")
            if source.startswith("."):
                assert mode == ["ro"], volume
            else:
                assert source in COMPOSE["volumes"], volume

    def test_dependencies(self, name: str) -> None:
        """A service depends on services that exist, and that have a health check."""
        needs = SERVICES[name].get("depends_on", {})
        for other in needs:
            assert other in SERVICES
            if isinstance(needs, dict):
                assert needs[other] == {"condition": "service_healthy"}
                assert "healthcheck" in SERVICES[other]

    def test_configuration_is_mounted(self, name: str) -> None:
        """A configuration file on the command line is mounted."""
        for argument in map(str, SERVICES[name].get("command", [])):
            if match := re.fullmatch(r"--?config(?:\.file)?=(.*)", argument):
                assert match[1] in [target for _, target in mounts(SERVICES[name])]


class TestAddresses:
    """The addresses that services connect to."""

    @pytest.mark.parametrize(
        "path",
        [*CONFIGURATIONS, ROOT / "docker-compose.yml"],
        ids=lambda path: path.name,
    )
    def test_ports(self, path: Path) -> None:
        """Every address names a service and one of its ports."""
        text = path.read_text("utf-8")
        pattern = rf"\b({'|'.join(SERVICES)}):(\d{{4,5}})\b(?!:)"
        for name, port in re.findall(pattern, text):
            assert int(port) in PORTS[name], f"{path}: {name}:{port}"
        for name in re.findall(r"https?://([a-z-]+):\d", text):
            assert name in SERVICES, f"{path}: {name}"

    def test_listeners(self) -> None:
        """The configured ports are those that other services connect to."""
        assert read("deploy/tempo/tempo.yaml")["server"]["http_listen_port"] == 3200
        assert read("deploy/loki/loki.yaml")["server"]["http_listen_port"] == 3100
        collector = read("deploy/otel-collector/config.yaml")
        assert collector["extensions"]["health_check"]["endpoint"].endswith(":13133")
        http = collector["receivers"]["otlp"]["protocols"]["http"]
        assert http["endpoint"].endswith(":4318")
        assert SERVICES["pager"]["command"][-1] == "8080"
        # The job is one agent, which serves its ranks.
        assert SERVICES["job"]["environment"]["TRACEDSTORE_HTTP_PORT"] == "27400"

    def test_collector_pipelines(self) -> None:
        """The pipelines use all configured components, and no others."""
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
    """The example job."""

    def test_settings(self) -> None:
        """The job's settings exist and have valid values."""
        given = {
            name: value
            for name, value in SERVICES["job"]["environment"].items()
            if name.startswith(PREFIX) and name != f"{PREFIX}RUN_ID"
        }

        settings = Settings.load({}, given)

        assert settings.http_port == 27400
        assert settings.tracing
        assert {name.removeprefix(PREFIX).lower() for name in given} <= set(
            Settings.__dataclass_fields__
        )

    def test_backend(self) -> None:
        """The rendezvous backend is registered, and etcd has the API for it."""
        from importlib.metadata import entry_points

        command = " ".join(SERVICES["job"]["command"])
        (backend,) = re.findall(r"--rdzv-backend (\S+)", command)

        assert backend in {
            entry.name for entry in entry_points(group="torchrun.handlers")
        }
        assert backend == "traced-etcd"
        assert SERVICES["etcd"]["image"].rpartition(":")[2].startswith("v3.6.")
        assert not any("v2" in option for option in SERVICES["etcd"]["command"])

    def test_scripts(self) -> None:
        """The scripts that services run are in the image."""
        for name in ("job", "pager", "ready"):
            service = SERVICES[name]
            text = " ".join(service["command"] + service["healthcheck"]["test"])
            for script in re.findall(r"\bjob/\w+\.py", text):
                assert (ROOT / "deploy" / script).exists()

    def test_logs_reach_the_collector(self) -> None:
        """The collector reads the job's log files, with the job's service name."""
        collector = read("deploy/otel-collector/config.yaml")
        volume = "job-logs:/var/log/job"

        assert volume in SERVICES["job"]["volumes"]
        assert f"{volume}:ro" in SERVICES["otel-collector"]["volumes"]
        files = collector["receivers"]["file_log"]
        assert files["include"] == ["/var/log/job/**/stderr.log"]
        service = SERVICES["job"]["environment"]["OTEL_SERVICE_NAME"]
        assert files["resource"] == {"service.name": service}


class TestGrafana:
    """The provisioning of Grafana."""

    SOURCES = read("deploy/grafana/provisioning/datasources/datasources.yaml")[
        "datasources"
    ]

    def test_sources(self) -> None:
        """Every data source type of the dashboards is there, and links have targets."""
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
        """The exemplars' trace id label links to Tempo."""
        (prometheus,) = [s for s in self.SOURCES if s["type"] == "prometheus"]
        (link,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]

        assert link == {"name": "trace_id", "datasourceUid": "tempo"}
        assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]

    def test_trace_ids_in_logs(self) -> None:
        """The expression finds the trace id in a line as events are written."""
        (loki,) = [s for s in self.SOURCES if s["type"] == "loki"]
        label, field = loki["jsonData"]["derivedFields"]
        assert (label["matcherType"], label["matcherRegex"]) == ("label", "trace_id")
        line = f'{{"event": "{names.BARRIER_TIMEOUT}", "trace_id": "{"ab" * 16}"}}'

        match = re.search(field["matcherRegex"], line)

        assert match is not None
        assert match[1] == "ab" * 16

    def test_links_in_pages(self) -> None:
        """Links of alerts are to published ports, and visitors may follow them."""
        grafana = SERVICES["grafana"]
        base = f"http://{grafana['ports'][0].removesuffix(':3000')}"

        for name in ("prometheus", "alertmanager"):
            address = SERVICES[name]["ports"][0].rpartition(":")[0]
            option = f"--web.external-url=http://{address}"
            assert option in SERVICES[name]["command"]
        ruler = read("deploy/loki/loki.yaml")["ruler"]
        assert ruler["external_url"] == base
        assert ruler["datasource_uid"] in {source["uid"] for source in self.SOURCES}
        # Explore is not for viewers; nobody else reaches the port.
        assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Editor"

    def test_dashboards(self) -> None:
        """Every dashboard is in the provisioned folder, and one is the home page."""
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
    """Rule files are mounted where the servers read them."""

    def test_prometheus(self) -> None:
        """Prometheus reads the path in its configuration."""
        (path,) = read("deploy/prometheus/prometheus.yml")["rule_files"]

        assert ("./dashboards/rules/prometheus.yaml", path) in mounts(
            SERVICES["prometheus"]
        )

    def test_loki(self) -> None:
        """Loki without authentication reads the folder of the tenant `fake`."""
        config = read("deploy/loki/loki.yaml")
        folder = config["ruler"]["storage"]["local"]["directory"]

        assert config["auth_enabled"] is False
        targets = dict(mounts(SERVICES["loki"]))
        path = targets["./dashboards/rules/loki.yaml"]
        assert path.startswith(f"{folder}/fake/")


def test_metrics_have_no_target_labels() -> None:
    """Prometheus would rename such a label of a metric to exported_host, or drop it."""
    target_labels = {"job", "instance", "run_id", "rank", "local_rank", "host"}

    for metric in names.METRICS:
        # Only the target of a node has it, which has no such labels.
        if metric is not names.WORKER_UP:
            assert not target_labels & {*metric.labels}, metric.name
