"""Manifests: reading, validation, and the environment of the pods they describe."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from support.tools import ROOT

EXAMPLES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
# The oldest version that has every field of the examples, and two recent ones.
VERSIONS = ("1.28", "1.36", "1.37")
# Written by scripts/reduce_schemas.py: the schemas of custom resources, of named
# versions of their operators.
CUSTOM: dict[str, Any] = json.loads(
    (ROOT / "tests/support/schemas/custom.json").read_text("utf-8")
)


def load(path: Path, *, infiniband: bool = False) -> list[dict[str, Any]]:
    """Return the documents of a manifest, with the lines for InfiniBand or without."""
    text = path.read_text("utf-8")
    if infiniband:
        text = text.replace("#: ", "")
    return list(yaml.safe_load_all(text))


def validate(document: dict[str, Any], versions: Sequence[str] = VERSIONS) -> None:
    """Raise jsonschema.ValidationError for what an API server would refuse.

    Core kinds are validated against the OpenAPI schemas of Kubernetes, custom kinds
    against the definitions of their operators; the Jobs and pods inside them against
    both. Unknown fields are errors. Rules in CEL and of admission webhooks are not
    checked.
    """
    if document["kind"] not in CUSTOM["kinds"]:
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, _schema(document["kind"]))
    for kind, template in templates(document):
        if kind == "Job":
            made = {"apiVersion": "batch/v1", "kind": "Job", **template}
        else:
            made = {"apiVersion": "v1", "kind": "Pod", **template}
        validate(made, versions)


def _schema(kind: str) -> dict[str, Any]:
    return {"$defs": CUSTOM["$defs"], **CUSTOM["kinds"][kind]}


def defaults_in_lists(document: dict[str, Any]) -> list[str]:
    """Return the fields inside of lists that the API server fills in.

    kubectl compares a list of a custom kind as a whole: with such a field, the object
    is changed whenever its file is applied again.
    """
    return list(_defaults(document, _schema(document["kind"]), "", in_list=False))


def _defaults(
    value: Any, schema: dict[str, Any], path: str, *, in_list: bool
) -> Iterator[str]:
    schema = _resolved(schema)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            yield from _defaults(item, schema["items"], f"{path}[]", in_list=True)
    elif isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            below = f"{path}.{name}"
            if name in value:
                yield from _defaults(value[name], field, below, in_list=in_list)
            elif in_list and "default" in _resolved(field):
                yield below


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = CUSTOM["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def templates(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the templates of Jobs and of pods in a custom kind, each with its kind."""
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        of_group = spec["leaderWorkerTemplate"]
        names = ("leaderTemplate", "workerTemplate")
        return [("Pod", of_group[name]) for name in names if name in of_group]
    if document["kind"] == "PyTorchJob":
        replicas = spec["pytorchReplicaSpecs"].values()
        return [("Pod", replica["template"]) for replica in replicas]
    jobs = spec.get("template", {}).get("spec", spec).get("replicatedJobs", [])
    return [("Job", job["template"]) for job in jobs]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only document of a kind."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


# What the API server gives an object.
UID = "5f0c9a52-7b7e-4b8f-9a86-1f0d3f9b1c55"

# The kinds that a controller makes pods of; a TrainingRuntime with its TrainJob.
_WORKLOADS = ("Job", "JobSet", "TrainingRuntime", "LeaderWorkerSet", "PyTorchJob")


class Workload:
    """The pods of an example, as the controllers create them.

    Attributes:
        kind: The kind that the controller makes pods of.
        pod: The pod template.
        container: Its container, with what a TrainJob merges into it.
        name: The name of the Job, the JobSet, the TrainJob and so on.
        workers: The number of workers of a pod.
        namespace: That of the pods.
    """

    def __init__(
        self, documents: list[dict[str, Any]], namespace: str = "default"
    ) -> None:
        self.namespace = namespace
        (document,) = (one for one in documents if one["kind"] in _WORKLOADS)
        self.kind: str = document["kind"]
        self.name: str = document["metadata"]["name"]
        self._spec: dict[str, Any] = document["spec"]
        self._made: dict[str, str] = {}
        if self.kind == "Job":
            self._job = self.name
            self.pod: dict[str, Any] = document["spec"]["template"]
        else:
            if self.kind == "TrainingRuntime":
                self.name = of_kind(documents, "TrainJob")["metadata"]["name"]
            of, self.pod = templates(document)[0]
            if of == "Job":
                self._take_jobset(document["spec"])
        self.container: dict[str, Any] = dict(self.pod["spec"]["containers"][0])
        if self.kind == "TrainingRuntime":
            self._merge(of_kind(documents, "TrainJob")["spec"]["trainer"])
        self.workers = int(self.environment(0)["PET_NPROC_PER_NODE"])

    def _take_jobset(self, spec: dict[str, Any]) -> None:
        spec = spec.get("template", {}).get("spec", spec)
        (replicated,) = spec["replicatedJobs"]
        self._job = f"{self.name}-{replicated['name']}-0"
        self.pod = replicated["template"]["spec"]["template"]
        self._made = {
            "jobset.sigs.k8s.io/jobset-name": self.name,
            "jobset.sigs.k8s.io/jobset-uid": UID,
            "jobset.sigs.k8s.io/restart-attempt": "0",
            "jobset.sigs.k8s.io/replicatedjob-replicas": str(
                replicated.get("replicas", 1)
            ),
        }

    def _merge(self, trainer: dict[str, Any]) -> None:
        """Merge a TrainJob into the container, as Kubeflow's torch plugin does."""
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        self.container |= {
            "image": trainer["image"],
            "command": trainer["command"],
            "args": trainer["args"],
            "resources": trainer["resourcesPerNode"],
            "env": [
                *self.container["env"],
                *trainer.get("env", []),
                {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
                {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
                {
                    "name": "PET_NODE_RANK",
                    "valueFrom": {"fieldRef": {"fieldPath": index}},
                },
                {"name": "PET_MASTER_ADDR", "value": f"{self._job}-0.{self.name}"},
                {"name": "PET_MASTER_PORT", "value": "29500"},
            ],
        }

    @property
    def indexed(self) -> bool:
        """Whether the pods are those of an Indexed Job."""
        return self.kind in {"Job", "JobSet", "TrainingRuntime"}

    def labels(self, index: int) -> dict[str, str]:
        """Return the labels of a pod: those of the template, and the controllers'."""
        labels: dict[str, str] = self.pod["metadata"]["labels"] | self._made
        if self.indexed:
            # The Jobs of a JobSet are made again, each with an uid of its own.
            job_uid = UID if self.kind == "Job" else UID[::-1]
            return labels | {
                "batch.kubernetes.io/job-name": self._job,
                "batch.kubernetes.io/controller-uid": job_uid,
            }
        if self.kind == "LeaderWorkerSet":
            of = "leaderworkerset.sigs.k8s.io"
            return labels | {
                f"{of}/name": self.name,
                f"{of}/group-index": "0",
                f"{of}/worker-index": str(index),
            }
        return labels | {
            "training.kubeflow.org/job-name": self.name,
            "training.kubeflow.org/replica-type": "worker" if index else "master",
        }

    def as_pod(self) -> dict[str, Any]:
        """Return a pod with the merged container, as a core kind."""
        spec = self.pod["spec"] | {"containers": [self.container]}
        return {"apiVersion": "v1", "kind": "Pod", "spec": spec}

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables of a pod: those of the manifest, and the controllers'.

        A shell and the kubelet set HOSTNAME.
        """
        fields = {
            "metadata.name": self.pod_name(index),
            "metadata.namespace": self.namespace,
            "spec.nodeName": f"gpu-{index}",
            "status.podIP": f"10.0.0.{index + 1}",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(
                index
            ),
        }
        labels = self.labels(index).items()
        fields |= {f"metadata.labels['{name}']": value for name, value in labels}
        environ = {
            "HOSTNAME": self.hostname(index),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }
        if self.kind == "LeaderWorkerSet":
            environ |= {
                "LWS_LEADER_ADDRESS": f"{self.hostname(0)}.{self.name}.default",
                "LWS_GROUP_SIZE": str(self._spec["leaderWorkerTemplate"]["size"]),
                "LWS_WORKER_INDEX": str(index),
            }
        elif self.indexed:
            environ["JOB_COMPLETION_INDEX"] = str(index)
        for entry in self.container["env"]:
            value = entry.get("value")
            if value is None:
                value = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            # A variable that comes later in the list is not known yet.
            environ[entry["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: environ.get(found[1], found[0]), value
            )
        if self.kind == "PyTorchJob":
            environ |= self._set_by_training_operator(index)
        unset = [arg for arg in self.container["command"] if "--unset=" in arg]
        for option in unset:
            environ.pop(option.removeprefix("--unset="))
        return environ

    def _set_by_training_operator(self, index: int) -> dict[str, str]:
        replicas = self._spec["pytorchReplicaSpecs"].values()
        nodes = sum(replica["replicas"] for replica in replicas)
        workers = self._spec["nprocPerNode"]
        variables = {
            "MASTER_ADDR": self.hostname(0),
            "MASTER_PORT": "23456",
            "WORLD_SIZE": str(nodes * int(workers)),
            "RANK": str(index),
            "PET_NPROC_PER_NODE": workers,
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(index),
        }
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            variables[f"PET_{name}"] = variables[name]
        return variables

    def hostname(self, index: int) -> str:
        """Return the host name of a pod."""
        if self.kind == "LeaderWorkerSet":
            return f"{self.name}-0-{index}" if index else f"{self.name}-0"
        if self.kind == "PyTorchJob":
            worker = f"{self.name}-worker-{index - 1}"
            return worker if index else f"{self.name}-master-0"
        return f"{self._job}-{index}"

    def pod_name(self, index: int) -> str:
        """Return the name of a pod: of an Indexed Job, with five random characters."""
        return self.hostname(index) + ("-x7f9k" if self.indexed else "")

    def worker_environment(self, index: int, local_rank: int) -> dict[str, str]:
        """Return the variables of a worker below torchrun in a pod."""
        environ = self.environment(index)
        nodes = int(environ["PET_NNODES"])
        return environ | {
            "RANK": str(index * self.workers + local_rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "WORLD_SIZE": str(nodes * self.workers),
            "GROUP_RANK": environ["PET_NODE_RANK"],
            "GROUP_WORLD_SIZE": str(nodes),
            "TORCHELASTIC_RUN_ID": "none",
        }

    def discovered(self, index: int) -> dict[str, str]:
        """Return the labels that Prometheus discovers for a pod."""
        return {
            "__meta_kubernetes_namespace": self.namespace,
            "__meta_kubernetes_pod_name": self.pod_name(index),
            "__meta_kubernetes_pod_node_name": f"gpu-{index}",
        } | {
            "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): value
            for name, value in self.labels(index).items()
        }


def relabel(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str]:
    """Apply relabelings of the action ``replace``; return the labels that they set."""
    labels, found = dict(labels), {}
    for rule in rules:
        known = {"action", "sourceLabels", "separator", "regex", "targetLabel"}
        assert set(rule) <= known
        assert rule["action"] == "replace"
        value = rule.get("separator", ";").join(
            labels.get(name, "") for name in rule["sourceLabels"]
        )
        match = re.fullmatch(rule.get("regex", "(.*)"), value)
        if match:
            found[rule["targetLabel"]] = labels[rule["targetLabel"]] = match[1]
    return found


def fields_below(document: Any) -> Iterator[dict[str, Any]]:
    """Return every object in a document."""
    if isinstance(document, dict):
        yield document
        for value in document.values():
            yield from fields_below(value)
    elif isinstance(document, list):
        for value in document:
            yield from fields_below(value)
