"""Kubernetes manifests: those that the command exports, and the examples.

There is no cluster here. Core kinds are validated against the published OpenAPI schemas
(kubernetes-validate, without network), custom kinds against the definitions of their
operators. Both refuse unknown fields.
"""

import copy
import json
import re
from pathlib import Path
from string import Template
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry

from support.kubernetes import (
    CUSTOM,
    EXAMPLES,
    UID,
    VERSIONS,
    Workload,
    defaults_in_lists,
    fields_below,
    load,
    of_kind,
    relabel,
    validate,
)
from support.tools import ROOT, run
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


LABELS = {
    "app.kubernetes.io/name": "tracedstore",
    "app.kubernetes.io/component": "monitoring",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Export the manifests into a folder."""
    target = tmp_path / "manifests"
    command = ["dashboards", "export", str(target), "--kubernetes"]
    assert main([*command, "--namespace", "observability", "--release", "7"]) == 0
    return target


@pytest.fixture
def exported(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the exported documents by kind and name."""
    paths = set(folder.rglob("*.yaml")) - {folder / "kustomization.yaml"}
    documents = [load(path) for path in sorted(paths)]
    return {
        f"{document['kind']}/{document['metadata']['name']}": document
        for (document,) in documents
    }


class TestExport:
    """`tracedstore dashboards export --kubernetes`."""

    def test_valid(self, exported: dict[str, dict[str, Any]]) -> None:
        """There is an object for each file, in the namespace, with its labels."""
        assert sorted(exported) == [
            "ConfigMap/dashboard-tracedstore-fleet",
            "ConfigMap/dashboard-tracedstore-health",
            "ConfigMap/dashboard-tracedstore-internals",
            "ConfigMap/dashboard-tracedstore-job",
            "ConfigMap/tracedstore-loki-rules",
            "NetworkPolicy/tracedstore",
            "PodMonitor/tracedstore",
            "PrometheusRule/tracedstore",
        ]
        policy = exported.pop("NetworkPolicy/tracedstore")
        for name, document in exported.items():
            validate(document)
            metadata = document["metadata"]
            selected_by, annotations = {"release": "7"}, {}
            if "dashboard" in name:
                selected_by = {"grafana_dashboard": "1"}
                annotations = {"grafana_folder": "tracedstore"}
            elif "loki" in name:
                selected_by = {"loki_rule": ""}
                annotations = {"k8s-sidecar-target-directory": "/rules/fake"}
            assert metadata["labels"] == LABELS | selected_by
            assert metadata.get("annotations", {}) == annotations
            assert metadata["namespace"] == "observability"
        # That of the jobs is chosen when it is applied.
        assert policy["metadata"] == {"name": "tracedstore", "labels": LABELS}
        validate(policy)

    def test_applied_again(self, exported: dict[str, dict[str, Any]]) -> None:
        """Applying a file again changes nothing: the API server adds no defaults."""
        for document in exported.values():
            if document["kind"] in CUSTOM["kinds"]:
                assert defaults_in_lists(document) == []

        monitor = exported["PodMonitor/tracedstore"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        del endpoint["relabelings"][0]["action"]
        below = ".spec.podMetricsEndpoints[].relabelings[].action"
        assert defaults_in_lists(monitor) == [below]

    def test_kustomize(self, folder: Path) -> None:
        """As a kustomization it has the same objects; a namespace reaches all."""
        names = set(folder.glob("*.yaml")) - {folder / "kustomization.yaml"}
        (kustomization,) = load(folder / "kustomization.yaml")
        assert set(kustomization["resources"]) == {path.name for path in names}

        done = run("kubectl", "kustomize", folder)
        assert done.returncode == 0, done.stderr
        rendered = list(yaml.safe_load_all(done.stdout))
        for document in rendered:
            validate(document)
        assert _sorted(rendered) == _sorted([load(path)[0] for path in names])

        with (folder / "kustomization.yaml").open("a") as file:
            file.write("namespace: elsewhere\n")
        done = run("kubectl", "kustomize", folder)
        assert done.returncode == 0, done.stderr
        moved = list(yaml.safe_load_all(done.stdout))
        assert {one["metadata"]["namespace"] for one in moved} == {"elsewhere"}
        assert len(moved) == len(rendered)

    def test_network_policy(self, exported: dict[str, dict[str, Any]]) -> None:
        """Pods of the namespace reach a job, and Prometheus its endpoints only."""
        policy = exported["NetworkPolicy/tracedstore"]["spec"]
        monitor = exported["PodMonitor/tracedstore"]["spec"]
        (endpoint,) = monitor["podMetricsEndpoints"]
        name = "kubernetes.io/metadata.name"
        prometheus = {"namespaceSelector": {"matchLabels": {name: "observability"}}}

        assert policy == {
            "podSelector": monitor["selector"],
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {}}]},
                {
                    "from": [prometheus],
                    "ports": [{"protocol": "TCP", "port": endpoint["port"]}],
                },
            ],
        }

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
        loki = exported["ConfigMap/tracedstore-loki-rules"]["data"]
        text = files["rules/loki.yaml"].read_text("utf-8")
        assert loki == {"tracedstore.yaml": text}

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
        (policy,) = load(tmp_path / "jobs/networkpolicy.yaml")
        validate(policy)
        (prometheus,) = policy["spec"]["ingress"][1]["from"]
        selected = prometheus["namespaceSelector"]["matchLabels"]
        assert selected == {"kubernetes.io/metadata.name": "monitoring"}

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

        selected = spec["selector"]["matchLabels"].items()
        assert selected <= workload.labels(1).items()
        assert (
            str(ports[endpoint["port"]]["containerPort"])
            == (environ[f"{PREFIX}HTTP_PORT"])
        )
        assert relabel(workload.discovered(1), endpoint["relabelings"]) == {
            "run_id": ProcessIdentity.from_environment(environ).run_id,
            "host": host_name(environ),
            "node": "gpu-1",
        }

    def test_runs(self, exported: dict[str, dict[str, Any]]) -> None:
        """The run of each example has its namespace, and its uid where pods have it."""
        spec = exported["PodMonitor/tracedstore"]["spec"]
        (endpoint,) = spec["podMetricsEndpoints"]
        found = {}
        for path in EXAMPLES:
            workload = Workload(load(path), namespace="team-b")
            labels = relabel(workload.discovered(0), endpoint["relabelings"])
            assert workload.environment(0)["TRACEDSTORE_RUN_ID"] == labels["run_id"]
            found[path.stem] = labels["run_id"]

        job, jobset = f"team-b/train/{UID}", f"team-b/train/{UID}/0"
        assert found == {
            "indexed-job": job,
            "indexed-job-restricted": job,
            "unmodified-image": job,
            "jobset": jobset,
            "trainjob": jobset,
            "pytorchjob": "team-b/train",
            "leaderworkerset": "team-b/train/0",
        }


class TestExamples:
    """The files in examples/kubernetes."""

    @every_example
    @pytest.mark.parametrize("infiniband", [False, True], ids=["plain", "infiniband"])
    def test_valid(self, path: Path, infiniband: bool) -> None:
        """All documents are valid, and the pod that results from them."""
        documents = load(path, infiniband=infiniband)
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
                        validate(changed, VERSIONS[-1:])

    def test_removed_field(self) -> None:
        """What a version of an operator has removed is refused, as it does."""
        documents = load(ROOT / "examples/kubernetes/trainjob.yaml")
        runtime = of_kind(documents, "TrainingRuntime")
        runtime["spec"]["mlPolicy"]["torch"] = {"numProcPerNode": "auto"}

        with pytest.raises(jsonschema.ValidationError, match="numProcPerNode"):
            validate(runtime)

    @every_example
    def test_volume(self, path: Path) -> None:
        """The volume for reports fits into each manifest: a folder for each run."""
        page = (ROOT / "docs/kubernetes.md").read_text("utf-8")
        (block,) = re.findall(r"```yaml\n(containers:.*?)```", page, re.DOTALL)
        given = yaml.safe_load(block)
        (added,) = given["containers"]
        workload = Workload(load(path), namespace="team-b")
        names = ("env", "volumeMounts")
        container = workload.container
        container |= {name: container[name] + added[name] for name in names}
        pod = workload.as_pod()
        pod["spec"]["volumes"] = pod["spec"]["volumes"] + given["volumes"]

        validate(pod)
        (mount,) = added["volumeMounts"]
        environ = workload.environment(0)
        # It must not begin with a slash, nor contain "..".
        folder = re.sub(
            r"\$\((\w+)\)", lambda found: environ[found[1]], mount["subPathExpr"]
        )
        assert folder.startswith("team-b/train")
        assert environ["TRACEDSTORE_REPORT_DIR"] == mount["mountPath"]

    @every_example
    def test_labels(self, path: Path) -> None:
        """One selector finds the objects and the pods of each kind."""
        documents = load(path)
        instance = {"app.kubernetes.io/instance": "train"}

        assert instance.items() <= Workload(documents).labels(0).items()
        for document in documents:
            if document["kind"] != "TrainingRuntime":
                assert instance.items() <= document["metadata"]["labels"].items()
            else:
                label = {"trainer.kubeflow.org/framework": "torch"}
                assert document["metadata"]["labels"] == label

    @every_example
    def test_pods(self, path: Path) -> None:
        """Pods have no token, bounded memory, shared memory, and fail as a whole."""
        documents = load(path)
        workload = Workload(documents)
        pod, container = workload.pod["spec"], workload.container
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        retries = {
            value
            for document in documents
            for part in fields_below(document)
            for name, value in part.items()
            if name == "backoffLimit"
        }

        # Names of Jobs and pods have it in them, and 63 characters at most.
        for document in documents:
            for part in fields_below(document):
                for job in part.get("replicatedJobs", []):
                    assert len(job["name"]) <= 20
        assert pod["automountServiceAccountToken"] is False
        assert pod["tolerations"][0]["key"] in container["resources"]["limits"]
        assert "memory" in container["resources"]["limits"]
        assert "/dev/shm" in mounts
        assert retries == (set() if workload.kind == "LeaderWorkerSet" else {0})

    @every_example
    def test_infiniband(self, path: Path) -> None:
        """The lines for InfiniBand add a device, a capability and variables of NCCL."""
        plain = Workload(load(path)).container
        container = Workload(load(path, infiniband=True)).container
        if path.stem == "indexed-job-restricted":
            assert container == plain
            return

        assert container.pop("securityContext") == {
            "capabilities": {"add": ["IPC_LOCK"]}
        }
        device = {"rdma/hca_shared_devices_a": "1"}
        limits = plain["resources"]["limits"]
        assert container["resources"]["limits"] == limits | device
        added = [entry for entry in container["env"] if entry not in plain["env"]]
        assert {entry["name"] for entry in added} == {
            "NCCL_IB_HCA",
            "NCCL_SOCKET_IFNAME",
        }

    def test_restricted(self) -> None:
        """The restricted Job is the plain one, but for what restricts it."""
        folder = ROOT / "examples/kubernetes"
        restricted = load(folder / "indexed-job-restricted.yaml")
        pod = of_kind(restricted, "Job")["spec"]["template"]["spec"]
        (container,) = pod["containers"]

        assert pod.pop("securityContext") == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container.pop("securityContext") == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # The root is read-only: HOME is in a volume.
        container["env"].remove({"name": "HOME", "value": "/tmp"})
        container["volumeMounts"].remove({"name": "tmp", "mountPath": "/tmp"})
        pod["volumes"].remove({"name": "tmp", "emptyDir": {}})
        assert restricted == load(folder / "indexed-job.yaml")

    def test_unmodified_image(self) -> None:
        """The package comes from the init container; the rest is the plain Job."""
        folder = ROOT / "examples/kubernetes"
        documents = load(folder / "unmodified-image.yaml")
        pod = of_kind(documents, "Job")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (init,) = pod.pop("initContainers")
        target = "/tracedstore"
        dockerfile = (folder / "tracedstore.Dockerfile").read_text("utf-8")

        assert init["command"] == ["cp", "-r", "/package/.", target]
        assert "COPY --from=package /package /package" in dockerfile
        mount = {"name": "tracedstore", "mountPath": target}
        assert init["volumeMounts"] == [mount]
        container["volumeMounts"].remove(mount | {"readOnly": True})
        pod["volumes"].remove({"name": "tracedstore", "emptyDir": {}})
        container["env"].remove({"name": "PYTHONPATH", "value": target})
        command = ["python", "-m", "tracedstore.auto.command", "torchrun"]
        assert container["command"] == command
        container["command"] = ["tracedstore-run", "torchrun"]
        assert documents == load(folder / "indexed-job.yaml")

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

        assert set(settings) == {"http_port", "http_host", "http_advertised_host"}
        assert Settings.load(settings).http_advertised_host == "10.0.0.1"
        # kubectl port-forward connects to localhost.
        assert Settings.load(settings).http_host == "::"
        assert {"POD_NAME", "NODE_NAME", "RUN_ID"} <= set(ours)

    @every_example
    def test_network(self, path: Path) -> None:
        """The names of ports and pods agree; torchrun runs below tracedstore-run."""
        workload = Workload(load(path))
        environ = workload.environment(1)
        ports = {port["name"]: port for port in workload.container["ports"]}

        (command,) = (workload.container["command"],)
        assert command[-1] == "torchrun"
        assert {"tracedstore-run", "tracedstore.auto.command"} & set(command)
        assert environ["PET_MASTER_ADDR"].split(".")[0] == workload.hostname(0)
        assert environ["PET_NODE_RANK"] == "1"
        # torchrun's agent is no rank.
        assert not {"RANK", "WORLD_SIZE"} & set(environ)
        others = [port for name, port in ports.items() if name != "metrics"]
        for port in others:
            assert str(port["containerPort"]) == environ["PET_MASTER_PORT"]

    def test_headless_service(self) -> None:
        """The Service of the Indexed Job gives its pods the names that they use."""
        documents = load(ROOT / "examples/kubernetes/indexed-job.yaml")
        service, workload = of_kind(documents, "Service"), Workload(documents)

        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"].items() <= workload.labels(0).items()
        assert workload.pod["spec"]["subdomain"] == service["metadata"]["name"]

    @every_example
    def test_commands(self, path: Path) -> None:
        """The commands of the page select the pods, and find the store in each."""
        page = (ROOT / "docs/kubernetes.md").read_text("utf-8")
        workload = Workload(load(path))
        selectors = set(re.findall(r"--selector (\S+)=(\S+)", page))
        (store,) = re.findall(r"--store (\$\w+:\$\w+)", page)

        assert selectors <= set(workload.labels(1).items())
        assert selectors
        address = Template(store).substitute(workload.environment(1))
        first, port = workload.hostname(0), {"PyTorchJob": 23456}
        assert re.fullmatch(
            rf"{first}(\.[a-z.]+)?:{port.get(workload.kind, 29500)}", address
        )

    def test_port(self) -> None:
        """All examples have one port, which is nobody else's on a node with GPUs."""
        ports = {
            int(port)
            for folder in ("examples", "docs", "deploy")
            for path in (ROOT / folder).rglob("*.*")
            if path.suffix in {".md", ".yaml", ".yml", ".sbatch"}
            for port in re.findall(
                r"TRACEDSTORE_HTTP_PORT(?:=|, value: )\"?(\d+)", path.read_text("utf-8")
            )
        }

        (port,) = ports
        # Prometheus' list of exporters; workers of Ray; stores of the batch scripts and
        # torchrun; ports of Services (NodePort), and above them those of clients.
        taken = [(9100, 9999), (10002, 19999), (29000, 29999), (30000, 65535)]
        assert not [first for first, last in taken if first <= port <= last]

    @every_example
    def test_names_of_ranks(self, path: Path) -> None:
        """From any worker, each rank has the name of its pod, or the number of it."""
        workload = Workload(load(path))
        for index in range(2):
            for local_rank in (0, workload.workers - 1):
                environ = workload.worker_environment(index, local_rank)
                decoder = auto(environ)

                own = f"{workload.pod_name(index)}@gpu-{index}"
                assert host_name(environ) == own
                for rank in range(2 * workload.workers):
                    pod = rank // workload.workers
                    known = workload.hostname(pod)
                    if not workload.indexed:
                        known = own if pod == index else f"node {pod}"
                    assert decoder(rank) == known


def _sorted(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(documents, key=lambda one: (one["kind"], one["metadata"]["name"]))


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
