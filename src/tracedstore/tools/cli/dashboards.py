"""Write the Grafana dashboards, alert rules and provisioning of this version.

Use them with your own Grafana, Prometheus and Loki. They match the metrics of
this version: export them again after an upgrade.

With --kubernetes, the files are manifests for kubectl: a PodMonitor and a
PrometheusRule of the Prometheus Operator, dashboards and Loki's rules as
ConfigMaps, and a kustomization of them. The folder jobs/ has a NetworkPolicy
for each namespace with jobs.

Examples:
  tracedstore dashboards export monitoring/
  tracedstore dashboards export monitoring/ --runbook-url https://wiki/runbook
  tracedstore dashboards export manifests/ --kubernetes --release prometheus

Exit codes: 0 written, 1 a file cannot be written, 64 invalid command line
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath
from textwrap import indent

from tracedstore.common.errors import CommandError

# The wheel has the files here; pyproject.toml lists them.
_IN_WHEEL = Path(__file__).parent / "shipped"
_REPOSITORY = Path(__file__).parents[4]
_RUNBOOK = "docs/runbook.md"
_NO_URL = (
    f"tracedstore: runbook_url of the alerts is {_RUNBOOK}, which no pager can open:"
    " publish that page, and export again with --runbook-url URL\n"
)
# Pods that have this label are scraped, at the container port of this name.
_SCRAPE_LABEL = "tracedstore-metrics"
_PORT_NAME = "metrics"

_RULES = "rules/prometheus.yaml"
_LOKI_RULES = "rules/loki.yaml"
# The namespace of Prometheus in the NetworkPolicy, without --namespace.
_MONITORING = "monitoring"
# Where the sidecar of Loki's Helm chart writes rules: the folder of the tenant that
# Loki has without authentication.
_LOKI_FOLDER = "/rules/fake"
_GRAFANA_FOLDER = "tracedstore"
# A pod is one target: torchrun's agent, whose samples of workers have their rank.
# run_id and host are what events carry: namespace, name and uid of the Job, or of the
# object that owns it, and the pod with its node. The operator itself adds namespace,
# pod and container. What the API server would fill in is written out: in a list,
# kubectl takes it for a change whenever the file is applied again.
_POD_MONITOR = f"""\
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
{{metadata}}
spec:
  namespaceSelector:
    any: true
  selector:
    matchLabels:
      {_SCRAPE_LABEL}: "true"
  podMetricsEndpoints:
    - port: {_PORT_NAME}
      # A label of a sample is kept if a label of the target has the same name.
      honorLabels: true
      relabelings:
        - action: replace
          sourceLabels:
            - __meta_kubernetes_namespace
            - __meta_kubernetes_pod_label_batch_kubernetes_io_job_name
            - __meta_kubernetes_pod_label_batch_kubernetes_io_controller_uid
          separator: /
          regex: ([^/]+/[^/]+/[^/]+)
          targetLabel: run_id
        # The restart counts: each has new pods. JobSet has the uid since 0.9.
        - action: replace
          sourceLabels:
            - __meta_kubernetes_namespace
            - __meta_kubernetes_pod_label_jobset_sigs_k8s_io_jobset_name
            - __meta_kubernetes_pod_label_jobset_sigs_k8s_io_jobset_uid
            - __meta_kubernetes_pod_label_jobset_sigs_k8s_io_restart_attempt
          separator: /
          regex: ([^/]+/[^/]+/[^/]*/[0-9]+)
          targetLabel: run_id
        - action: replace
          sourceLabels:
            - __meta_kubernetes_namespace
            - __meta_kubernetes_pod_label_training_kubeflow_org_job_name
          separator: /
          regex: ([^/]+/[^/]+)
          targetLabel: run_id
        # Each group of a LeaderWorkerSet is a job of its own.
        - action: replace
          sourceLabels:
            - __meta_kubernetes_namespace
            - __meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_name
            - __meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_group_index
          separator: /
          regex: ([^/]+/[^/]+/[0-9]+)
          targetLabel: run_id
        - action: replace
          sourceLabels: [__meta_kubernetes_pod_name, __meta_kubernetes_pod_node_name]
          separator: "@"
          targetLabel: host
        - action: replace
          sourceLabels: [__meta_kubernetes_pod_node_name]
          targetLabel: node
"""
_PROMETHEUS_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
{metadata}
spec:
{rules}
"""
# Its namespace is that of kubectl apply: jobs run in many. Where a policy selects a
# pod, nothing else from other pods is admitted. The kubelet's probes come from the
# node, which network plug-ins admit.
_NETWORK_POLICY = f"""\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
{{metadata}}
spec:
  podSelector:
    matchLabels:
      {_SCRAPE_LABEL}: "true"
  policyTypes: [Ingress]
  ingress:
    # Pods of the namespace reach the job at all ports: its store, and those of NCCL.
    - from:
        - podSelector: {{{{}}}}
    # Prometheus reaches the endpoints only.
    - from:
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: {{monitoring}}
      ports:
        - protocol: TCP
          port: {_PORT_NAME}
"""
_KUSTOMIZATION = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
{resources}
"""
_CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
metadata:
{metadata}
data:
  {file}: |
{content}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=["export"], help="write all files")
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the target folder, made if missing"
    )
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        type=_url,
        default=_RUNBOOK,
        help=f"the address of the runbook in alerts ({_RUNBOOK})",
    )
    group = parser.add_argument_group("Kubernetes")
    group.add_argument(
        "--kubernetes",
        action="store_true",
        help="write manifests for the Prometheus Operator and Grafana's sidecar",
    )
    group.add_argument(
        "--namespace",
        type=_name,
        metavar="NAME",
        help="the namespace of Prometheus and Grafana: that of all objects (that of"
        f" kubectl apply), and the one that a NetworkPolicy admits ({_MONITORING})",
    )
    group.add_argument(
        "--release",
        type=_name,
        metavar="NAME",
        help="the label release: NAME, by which kube-prometheus-stack selects objects;"
        " NAME is that of its Helm release",
    )


def _url(text: str) -> str:
    if text != _RUNBOOK and not re.fullmatch(r"https?://[^/\s].*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no URL: alerts need one, such as https://wiki.example/runbook"
        )
    return text


def _name(text: str) -> str:
    # A DNS label: it is valid as a namespace, as a Helm release and as a label.
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of Kubernetes: lower-case letters, digits and hyphens"
        )
    return text


def shipped() -> dict[str, Path]:
    """Map each exported name to its file, in the wheel or in a development checkout."""
    if _IN_WHEEL.is_dir():
        paths = (path for path in _IN_WHEEL.rglob("*") if path.is_file())
        files = {str(path.relative_to(_IN_WHEEL)): path for path in paths}
    else:
        project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))
        wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
        files = {
            str(Path(target).relative_to("tracedstore/tools/cli/shipped")): _REPOSITORY
            / path
            for path, target in wheel["force-include"].items()
        }
    return dict(sorted(files.items()))


def run(arguments: argparse.Namespace) -> int:
    """Write all files, and print their paths."""
    for option in ("namespace", "release"):
        if getattr(arguments, option) and not arguments.kubernetes:
            raise CommandError(f"--{option} is for --kubernetes")
    files = {
        name: _read(path).replace(_RUNBOOK, arguments.runbook_url)
        for name, path in shipped().items()
    }
    if arguments.kubernetes:
        files = _manifests(
            files, namespace=arguments.namespace, release=arguments.release
        )
    for name, text in files.items():
        target: Path = arguments.folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
        except OSError as error:
            # A failed write has no file name.
            raise _failure(error, target) from None
        sys.stdout.write(f"{target}\n")
    if arguments.runbook_url == _RUNBOOK:
        sys.stderr.write(_NO_URL)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise _failure(error, path) from None


def _failure(error: OSError, path: Path) -> CommandError:
    return CommandError(
        f"{error.filename or path} cannot be read or written: {error.strerror}"
    )


def _manifests(
    files: Mapping[str, str], *, namespace: str | None, release: str | None
) -> dict[str, str]:
    """Return exported files as Kubernetes manifests, by file name.

    The kinds are those of the Prometheus Operator, and ConfigMaps for the sidecars of
    the Helm charts of Grafana and Loki. Rules and dashboards are embedded as
    text, indented, so that they stay as they are: comments, templates, order of keys.

    Args:
        files: The text of the exported files, by name.
        namespace: The namespace of all objects, and of Prometheus in the NetworkPolicy;
            None for that of ``kubectl apply``.
        release: The label by which the operator selects objects; None for no label.
    """
    labels = {
        "app.kubernetes.io/name": "tracedstore",
        "app.kubernetes.io/component": "monitoring",
    }
    selected = labels | ({"release": release} if release else {})
    made = {
        "podmonitor.yaml": _POD_MONITOR.format(
            metadata=_metadata("tracedstore", namespace, selected)
        ),
        "prometheusrule.yaml": _PROMETHEUS_RULE.format(
            metadata=_metadata("tracedstore", namespace, selected),
            rules=indent(files[_RULES].rstrip("\n"), "  "),
        ),
        "loki-rules.yaml": _config_map(
            "tracedstore-loki-rules",
            namespace,
            labels | {"loki_rule": ""},
            {"k8s-sidecar-target-directory": _LOKI_FOLDER},
            ("tracedstore.yaml", files[_LOKI_RULES]),
        ),
    }
    for name, content in files.items():
        path = PurePath(name)
        if path.suffix == ".json":
            made[f"dashboard-{path.stem}.yaml"] = _config_map(
                f"dashboard-{path.stem}",
                namespace,
                labels | {"grafana_dashboard": "1"},
                {"grafana_folder": _GRAFANA_FOLDER},
                (path.name, content),
            )
    resources = "\n".join(f"  - {name}" for name in sorted(made))
    return made | {
        "kustomization.yaml": _KUSTOMIZATION.format(resources=resources),
        "jobs/networkpolicy.yaml": _NETWORK_POLICY.format(
            metadata=_metadata("tracedstore", None, labels),
            monitoring=json.dumps(namespace or _MONITORING),
        ),
    }


def _config_map(
    name: str,
    namespace: str | None,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    file: tuple[str, str],
) -> str:
    """Return a ConfigMap with one file, for a sidecar that selects it by a label."""
    file_name, content = file
    return _CONFIG_MAP.format(
        metadata=_metadata(name, namespace, labels, annotations),
        file=file_name,
        content=indent(content.rstrip("\n"), "    "),
    )


def _metadata(
    name: str,
    namespace: str | None,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> str:
    lines = [f"  name: {name}"]
    if namespace:
        lines.append(f"  namespace: {json.dumps(namespace)}")
    for field, entries in (("labels", labels), ("annotations", annotations)):
        if entries:
            lines.append(f"  {field}:")
            # Quoted, because a value that looks like a number would be one.
            lines += [
                f"    {key}: {json.dumps(value)}" for key, value in entries.items()
            ]
    return "\n".join(lines)
