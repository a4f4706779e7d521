"""Kubernetes manifests: those that the command exports, and the examples.

There is no cluster here. Core kinds are validated against the published OpenAPI schemas
(kubernetes-validate, without network), custom kinds against the fields that their
documentation has. Both refuse unknown fields.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry

from support.kubernetes import (
    EXAMPLES,
    Workload,
    fields_below,
    load,
    of_kind,
    relabel,
    validate,
)
from support.tools import ROOT
from tracedstore.common.identity import ProcessIdentity, host_name
from tracedstore.export.http_endpoint import pages
from tracedstore.export.settings import PREFIX, Settings
from tracedstore.naming.decoders import auto
from tracedstore.tools.cli.dashboards import shipped
from tracedstore.tools.cli.main import main

# kubectl apply keeps the object in an annotation; annotations have 256 KiB at most.
_MAX_APPLIED = 256 * 1024
# Variables of the identity, which are no settings.
_NAMES = {"POD_NAME", "NODE_NAME", "RUN_ID", "JOBSET_REPLICAS"}

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture
def exported(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Export the manifests; return their documents by kind and name."""
    command = ["dashboards", "export", str(tmp_path), "--kubernetes"]
    assert main([*command, "--namespace", "monitoring", "--release", "7"]) == 0
    documents = [load(path) for path in sorted(tmp_path.iterdir())]
    return {
        f"{document['kind']}/{document['metadata']['name']}": document
        for (document,) in documents
    }


class TestExport:
    """`tracedstore dashboards export --kubernetes`."""

    def test_valid(self, exported: dict[str, dict[str, Any]]) -> None:
        """There is an object for each file, in the namespace, with its labels."""
        assert sorted(exported) == [
            "ConfigMap/dashboard-tracedstore-coordination",
            "ConfigMap/dashboard-tracedstore-health",
            "ConfigMap/dashboard-tracedstore-internals",
            "PodMonitor/tracedstore",
            "PrometheusRule/tracedstore",
        ]
        for document in exported.values():
            validate(document)
            selected_by = {"release": "7"}
            if document["kind"] == "ConfigMap":
                selected_by = {"grafana_dashboard": "1"}
            labels = document["metadata"]["labels"]
            assert labels == {"app.kubernetes.io/name": "tracedstore"} | selected_by
            assert document["metadata"]["namespace"] == "monitoring"

    def test_content(self, exported: dict[str, dict[str, Any]]) -> None:
        """Rules and dashboards are those of the other export, with their templates."""
        files = shipped()
        rules = yaml.safe_load(files["rules/prometheus.yaml"].read_text("utf-8"))
        assert exported["PrometheusRule/tracedstore"]["spec"] == rules
        assert "{{ $labels.run_id }}" in json.dumps(rules)
        for name, path in files.items():
            if path.suffix == ".json":
                config_map = exported[f"ConfigMap/dashboard-{path.stem}"]
                text = path.read_text("utf-8")
                assert config_map["data"] == {Path(name).name: text.rstrip("\n") + "\n"}

    def test_sizes(self, exported: dict[str, dict[str, Any]]) -> None:
        """Each object fits into a ConfigMap, and into kubectl's annotation."""
        for document in exported.values():
            assert len(json.dumps(document)) < _MAX_APPLIED

    def test_options(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Without options there is no namespace and no release; a bad name fails."""
        command = ["dashboards", "export", str(tmp_path)]
        assert main([*command, "--kubernetes"]) == 0
        (monitor,) = load(tmp_path / "podmonitor.yaml")
        validate(monitor)
        assert set(monitor["metadata"]) == {"name", "labels"}
        assert "release" not in monitor["metadata"]["labels"]

        capsys.readouterr()
        assert main([*command, "--release", "prometheus"]) == 1
        message = "tracedstore: --release is for --kubernetes\n"
        assert capsys.readouterr().err == message
        with pytest.raises(SystemExit):
            main([*command, "--kubernetes", "--namespace", "a: b"])
        assert "'a: b' is no name of Kubernetes" in capsys.readouterr().err

    @every_example
    def test_monitor_finds_pods(
        self, path: Path, exported: dict[str, dict[str, Any]]
    ) -> None:
        """The PodMonitor selects the pods, and has the labels that events have."""
        spec = exported["PodMonitor/tracedstore"]["spec"]
        (endpoint,) = spec["podMetricsEndpoints"]
        workload = Workload(load(path))
        ports = {port["name"]: port for port in workload.container["ports"]}
        environ = workload.environment(1)

        assert spec["selector"]["matchLabels"].items() <= workload.labels.items()
        assert (
            str(ports[endpoint["port"]]["containerPort"])
            == (environ[f"{PREFIX}HTTP_PORT"])
        )
        assert relabel(workload.discovered(1), endpoint["relabelings"]) == {
            "run_id": ProcessIdentity.from_environment(environ).run_id,
            "host": host_name(environ),
            "node": "gpu-1",
        }


class TestExamples:
    """The files in examples/kubernetes."""

    @every_example
    def test_valid(self, path: Path) -> None:
        """All documents are valid, and the pod that results from them."""
        documents = load(path)
        for document in documents:
            validate(document)
        validate(Workload(documents).as_pod())

    @every_example
    def test_typos_are_found(self, path: Path) -> None:
        """A field with another name is refused, at any depth of the manifest."""
        for document in load(path):
            # Every sixth object: a validation takes 20 ms.
            for number in range(0, len(list(fields_below(document))), 6):
                changed = copy.deepcopy(document)
                target = list(fields_below(changed))[number]
                if not _is_free(document, target):
                    target["unknownField"] = "x"
                    with pytest.raises(jsonschema.ValidationError):
                        validate(changed)

    @every_example
    def test_secure(self, path: Path) -> None:
        """Pods do not run as root, and are bounded."""
        workload = Workload(load(path))
        pod, container = workload.pod["spec"], workload.container

        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert container["command"] == ["tracedstore-run", "torchrun"]

    @every_example
    def test_probes(self, path: Path) -> None:
        """The readiness probe asks a page without credentials; no probe ends a job."""
        container = Workload(load(path)).container
        probed = container["readinessProbe"]["httpGet"]

        assert probed["path"] == "/healthz"
        assert probed["path"] in pages(CollectorRegistry())
        assert probed["port"] in {port["name"] for port in container["ports"]}
        assert not {"livenessProbe", "startupProbe"} & set(container)

    @every_example
    def test_settings(self, path: Path) -> None:
        """Every variable of tracedstore exists, and its value is accepted."""
        environ = Workload(load(path)).environment(0)
        ours = {
            name.removeprefix(PREFIX): value
            for name, value in environ.items()
            if name.startswith(PREFIX)
        }
        settings = {
            name.lower(): value for name, value in ours.items() if name not in _NAMES
        }

        assert set(settings) == {"http_port", "http_host"}
        assert Settings.load(settings).http_host == "10.0.0.1"
        assert {"POD_NAME", "NODE_NAME", "RUN_ID"} <= set(ours)

    @every_example
    def test_network(self, path: Path) -> None:
        """Names, ports and selectors of the objects agree."""
        documents = load(path)
        workload = Workload(documents)
        environ = workload.environment(0)
        port = int(environ[f"{PREFIX}HTTP_PORT"])
        policy = of_kind(documents, "NetworkPolicy")["spec"]
        peers, prometheus = policy["ingress"]
        master = environ["PET_MASTER_ADDR"]

        selected = policy["podSelector"]["matchLabels"]
        assert selected.items() <= workload.labels.items()
        assert peers == {"from": [{"podSelector": {"matchLabels": selected}}]}
        # One endpoint serves all workers of a pod.
        assert prometheus["ports"] == [{"protocol": "TCP", "port": port}]
        assert f"{master}.".startswith(f"{workload.hostname}-0.{workload.run}.")

    def test_headless_service(self) -> None:
        """The Service of the Indexed Job gives its pods the names that they use."""
        documents = load(ROOT / "examples/kubernetes/indexed-job.yaml")
        service, workload = of_kind(documents, "Service"), Workload(documents)

        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"].items() <= workload.labels.items()
        assert workload.pod["spec"]["subdomain"] == service["metadata"]["name"]

    @every_example
    def test_names_of_ranks(self, path: Path) -> None:
        """From any worker, each rank has the name of its pod."""
        workload = Workload(load(path))
        for index in range(2):
            for local_rank in (0, workload.workers - 1):
                environ = workload.worker_environment(index, local_rank)
                decoder = auto(environ)

                assert host_name(environ) == f"{workload.pod_name(index)}@gpu-{index}"
                for rank in range(2 * workload.workers):
                    pod = rank // workload.workers
                    assert decoder(rank) == f"{workload.hostname}-{pod}"
                    assert workload.pod_name(pod).startswith(decoder(rank))


def _is_free(document: dict[str, Any], target: dict[str, Any]) -> bool:
    """Return whether an object may have any key: labels, selectors and resources."""
    free = {"labels", "matchLabels", "selector", "requests", "limits"}
    # What a TrainJob merges into the container is validated there.
    merged = {"resourcesPerNode", "env"} if document["kind"] == "TrainJob" else set()
    for parent in fields_below(document):
        for name, value in parent.items():
            inside = name in merged and target in list(fields_below(value))
            if inside or (name in free and value == target):
                return True
    return False
