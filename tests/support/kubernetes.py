"""Manifests: reading, validation, and the environment of the pods they describe."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from support.tools import ROOT

EXAMPLES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
# The oldest version that has every field of the examples, and that of the schemas in
# kubernetes-validate 1.37.
VERSIONS = ("1.28", "1.37")
CUSTOM = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in (ROOT / "tests/support/schemas").glob("*.json")
}


def load(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def validate(document: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError for a field that is unknown or has no such type.

    Core kinds are validated against the published OpenAPI schemas, custom kinds against
    the fields that their documentation has, with the Jobs inside them as core kinds.
    """
    if document["kind"] not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, CUSTOM[document["kind"]])
    for template in job_templates(document):
        validate({"apiVersion": "batch/v1", "kind": "Job", **template})


def job_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of Jobs in a JobSet or in a runtime of Kubeflow."""
    spec = document["spec"]
    jobs = spec.get("template", {}).get("spec", spec).get("replicatedJobs", [])
    return [job["template"] for job in jobs]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only document of a kind."""
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


class Workload:
    """The pods of an example, as the controllers create them.

    Attributes:
        pod: The pod template.
        container: Its container, with what a TrainJob merges into it.
        run: The name of the Job, the JobSet or the TrainJob.
        hostname: The hostname of a pod without its index.
        workers: The number of workers of a pod.
    """

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        kinds = [document["kind"] for document in documents]
        self.labels: dict[str, str] = {}
        if "Job" in kinds:
            document = of_kind(documents, "Job")
            self.run = document["metadata"]["name"]
            job, self.hostname = document, self.run
        else:
            holder = "JobSet" if "JobSet" in kinds else "TrainingRuntime"
            document = of_kind(documents, holder)
            (job,) = job_templates(document)
            named = "JobSet" if "JobSet" in kinds else "TrainJob"
            self.run = of_kind(documents, named)["metadata"]["name"]
            spec = document["spec"]
            spec = spec.get("template", {}).get("spec", spec)
            replicated = spec["replicatedJobs"][0]
            self.hostname = f"{self.run}-{replicated['name']}-0"
            # Labels that the JobSet controller adds.
            self.labels |= {
                "jobset.sigs.k8s.io/jobset-name": self.run,
                "jobset.sigs.k8s.io/replicatedjob-replicas": str(
                    replicated.get("replicas", 1)
                ),
            }
        self.pod: dict[str, Any] = job["spec"]["template"]
        self.container: dict[str, Any] = dict(self.pod["spec"]["containers"][0])
        self.labels |= self.pod["metadata"]["labels"]
        self.labels["batch.kubernetes.io/job-name"] = self.hostname
        if "TrainJob" in kinds:
            self._merge(of_kind(documents, "TrainJob")["spec"]["trainer"])
        self.workers = int(self.environment(0)["PET_NPROC_PER_NODE"])

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
                {
                    "name": "PET_MASTER_ADDR",
                    "value": f"{self.hostname}-0.{self.run}",
                },
                {"name": "PET_MASTER_PORT", "value": "29500"},
            ],
        }

    def as_pod(self) -> dict[str, Any]:
        """Return a pod with the merged container, as a core kind."""
        spec = self.pod["spec"] | {"containers": [self.container]}
        return {"apiVersion": "v1", "kind": "Pod", "spec": spec}

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables of a pod: those of the manifest, and the controllers'.

        The Job controller sets JOB_COMPLETION_INDEX, and the hostname of the pod. A
        shell and the kubelet set HOSTNAME.
        """
        fields = {
            "metadata.name": self.pod_name(index),
            "spec.nodeName": f"gpu-{index}",
            "status.podIP": f"10.0.0.{index + 1}",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(
                index
            ),
        } | {f"metadata.labels['{name}']": value for name, value in self.labels.items()}
        set_by_manifest = {
            entry["name"]: entry["value"]
            if "value" in entry
            else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in self.container["env"]
        }
        return {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{self.hostname}-{index}",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            **set_by_manifest,
        }

    def pod_name(self, index: int) -> str:
        """Return the name of a pod: its hostname and five random characters."""
        return f"{self.hostname}-{index}-x7f9k"

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
            "__meta_kubernetes_pod_name": self.pod_name(index),
            "__meta_kubernetes_pod_node_name": f"gpu-{index}",
        } | {
            "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): value
            for name, value in self.labels.items()
        }


def relabel(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str]:
    """Apply relabelings of the action ``replace``; return the labels that they set."""
    labels, found = dict(labels), {}
    for rule in rules:
        assert set(rule) <= {"sourceLabels", "separator", "regex", "targetLabel"}
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
