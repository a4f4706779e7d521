"""The files of `tracedstore dashboards export` as Kubernetes manifests.

The kinds are those of the Prometheus Operator, and ConfigMaps for the dashboard sidecar
of kube-prometheus-stack's Grafana. Rules and dashboards are embedded as text, indented,
so that they stay as they are: comments, templates and order of keys.
"""

import json
from collections.abc import Mapping
from pathlib import PurePath
from textwrap import indent

# Pods that have this label are scraped, at the container port of this name.
SCRAPE_LABEL = "tracedstore-metrics"
PORT_NAME = "metrics"

_RULES = "rules/prometheus.yaml"
# A pod is one target: torchrun's agent, whose samples of workers have their rank.
# run_id and host are what events carry: the name of the JobSet, else of the Job, and
# the pod with its node. The operator itself adds namespace, pod and container.
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
      {SCRAPE_LABEL}: "true"
  podMetricsEndpoints:
    - port: {PORT_NAME}
      # A label of a sample is kept if a label of the target has the same name.
      honorLabels: true
      relabelings:
        - sourceLabels: [__meta_kubernetes_pod_label_batch_kubernetes_io_job_name]
          regex: (.+)
          targetLabel: run_id
        - sourceLabels: [__meta_kubernetes_pod_label_jobset_sigs_k8s_io_jobset_name]
          regex: (.+)
          targetLabel: run_id
        - sourceLabels: [__meta_kubernetes_pod_name, __meta_kubernetes_pod_node_name]
          separator: "@"
          targetLabel: host
        - sourceLabels: [__meta_kubernetes_pod_node_name]
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
_CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
metadata:
{metadata}
data:
  {file}: |
{content}
"""


def manifests(
    files: Mapping[str, str], *, namespace: str | None, release: str | None
) -> dict[str, str]:
    """Return the manifests by file name.

    Args:
        files: The text of the exported files, by name.
        namespace: The namespace of all objects; None for that of ``kubectl apply``.
        release: The label by which the operator selects objects; None for no label.
    """
    labels = {"app.kubernetes.io/name": "tracedstore"}
    selected = labels | ({"release": release} if release else {})
    made = {
        "podmonitor.yaml": _POD_MONITOR.format(
            metadata=_metadata("tracedstore", namespace, selected)
        ),
        "prometheusrule.yaml": _PROMETHEUS_RULE.format(
            metadata=_metadata("tracedstore", namespace, selected),
            rules=indent(files[_RULES].rstrip("\n"), "  "),
        ),
    }
    for name, content in files.items():
        path = PurePath(name)
        if path.suffix == ".json":
            found = labels | {"grafana_dashboard": "1"}
            made[f"dashboard-{path.stem}.yaml"] = _CONFIG_MAP.format(
                metadata=_metadata(f"dashboard-{path.stem}", namespace, found),
                file=path.name,
                content=indent(content.rstrip("\n"), "    "),
            )
    return made


def _metadata(name: str, namespace: str | None, labels: Mapping[str, str]) -> str:
    lines = [f"  name: {name}"]
    if namespace:
        lines.append(f"  namespace: {json.dumps(namespace)}")
    lines.append("  labels:")
    # Quoted, because a label that looks like a number would be one.
    lines += [f"    {label}: {json.dumps(value)}" for label, value in labels.items()]
    return "\n".join(lines)
