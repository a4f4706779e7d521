"""Reduce the schemas of custom resources to what the tests of the manifests check.

Writes tests/support/schemas/custom.json from clones of the operators' repositories, at
the versions below. It holds facts only: names of fields, types, required fields,
defaults, enumerations, patterns and bounds. Descriptions, and rules in CEL, are left
out. A part that occurs more than once is in ``$defs``.

    python scripts/reduce_schemas.py CLONES

CLONES is a folder with a clone of each repository: trainer, jobset, lws,
prometheus-operator, training-operator.
"""

import argparse
import hashlib
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "tests/support/schemas/custom.json"
_TRAINER = ("trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org")
_OPERATOR = (
    "prometheus-operator",
    "v0.93.0",
    "example/prometheus-operator-crd/monitoring.coreos.com",
)
# Clone, tag, and file without the end of its name; then the kind's.
SOURCES = {
    "TrainJob": (*_TRAINER, "_trainjobs.yaml"),
    "TrainingRuntime": (*_TRAINER, "_trainingruntimes.yaml"),
    "JobSet": (
        "jobset",
        "v0.12.0",
        "config/components/crd/bases/jobset.x-k8s.io",
        "_jobsets.yaml",
    ),
    "LeaderWorkerSet": (
        "lws",
        "v0.10.0",
        "config/crd/bases/leaderworkerset.x-k8s.io",
        "_leaderworkersets.yaml",
    ),
    "PyTorchJob": (
        "training-operator",
        "v1.9.0-rc.0",
        "manifests/base/crds/kubeflow.org",
        "_pytorchjobs.yaml",
    ),
    "PodMonitor": (*_OPERATOR, "_podmonitors.yaml"),
    "PrometheusRule": (*_OPERATOR, "_prometheusrules.yaml"),
}
# What is checked of an object's metadata, which an API server validates itself.
_METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {
            "type": "string",
            "maxLength": 63,
            "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        },
        "namespace": {"type": "string", "maxLength": 63},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
_KEPT = (
    "type",
    "required",
    "default",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
# A part that is shorter than a reference to it is not worth one.
_MIN_SHARED = 60


def reduce(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the facts only, that refuses unknown fields."""
    reduced = {name: schema[name] for name in _KEPT if name in schema}
    if reduced.get("pattern", "").startswith("^(?i)"):
        # Python accepts flags at the beginning only.
        reduced["pattern"] = "(?i)^" + reduced["pattern"].removeprefix("^(?i)")
    if schema.get("x-kubernetes-int-or-string"):
        reduced["type"] = ["integer", "string"]
    if "items" in schema:
        reduced["items"] = reduce(schema["items"])
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema and not schema.get("x-kubernetes-int-or-string"):
            reduced[name] = [
                {key: part[key] for key in _KEPT if key in part}
                for part in schema[name]
            ]
    if "properties" in schema:
        reduced["properties"] = {
            name: reduce(part) for name, part in schema["properties"].items()
        }
    if isinstance(schema.get("additionalProperties"), dict):
        reduced["additionalProperties"] = reduce(schema["additionalProperties"])
    elif schema.get("type") == "object" and not (
        schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        # An API server drops a field that is not listed, and kubectl refuses it.
        reduced["additionalProperties"] = False
    return reduced


def read(clones: Path, source: tuple[str, ...]) -> dict[str, Any]:
    """Return the reduced schema of the stored version of a custom resource."""
    clone, tag, *path = source
    done = subprocess.run(
        ["git", "-C", str(clones / clone), "show", f"{tag}:{''.join(path)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    definition = yaml.safe_load(done.stdout)["spec"]
    (version,) = (one for one in definition["versions"] if one["storage"])
    schema = reduce(version["schema"]["openAPIV3Schema"])
    properties = schema["properties"]
    # The controller writes it.
    properties.pop("status", None)
    properties["apiVersion"] = {"const": f"{definition['group']}/{version['name']}"}
    properties["kind"] = {"const": definition["names"]["kind"]}
    properties["metadata"] = _METADATA
    schema["required"] = sorted({*schema.get("required", ()), "metadata", "spec"})
    return schema


def share(kinds: dict[str, Any]) -> dict[str, Any]:
    """Move each part that occurs more than once to ``$defs``."""
    seen: Counter[str] = Counter()

    def count(part: Any) -> None:
        for nested in _schemas_in(part):
            count(nested)
        seen[_dump(part)] += 1

    defs: dict[str, Any] = {}

    def replace(part: dict[str, Any]) -> dict[str, Any]:
        text = _dump(part)
        made = _map_schemas(part, replace)
        if seen[text] < 2 or len(text) < _MIN_SHARED:  # noqa: PLR2004
            return made
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        defs[name] = made
        return {"$ref": f"#/$defs/{name}"}

    for schema in kinds.values():
        count(schema)
    made = {kind: _map_schemas(schema, replace) for kind, schema in kinds.items()}
    return {"$defs": dict(sorted(defs.items())), "kinds": made}


def _schemas_in(part: dict[str, Any]) -> list[dict[str, Any]]:
    found = list(part.get("properties", {}).values())
    nested = (part.get(name) for name in ("items", "additionalProperties"))
    return found + [schema for schema in nested if isinstance(schema, dict)]


def _map_schemas(part: dict[str, Any], change: Any) -> dict[str, Any]:
    made = dict(part)
    if "properties" in part:
        made["properties"] = {
            name: change(nested) for name, nested in part["properties"].items()
        }
    for name in ("items", "additionalProperties"):
        if isinstance(part.get(name), dict):
            made[name] = change(part[name])
    return made


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", type=Path)
    clones = parser.parse_args().clones
    shared = share({kind: read(clones, source) for kind, source in SOURCES.items()})
    # One line for each kind and each shared part, so that a change can be read.
    lines = ["{"]
    versions = {kind: f"{name} {tag}" for kind, (name, tag, *_) in SOURCES.items()}
    lines.append(f'"versions": {_dump(versions)},')
    for group in ("kinds", "$defs"):
        entries = [f"{_dump(k)}: {_dump(v)}" for k, v in sorted(shared[group].items())]
        end = "}" if group == "$defs" else "},"
        lines += [f'"{group}": {{', ",\n".join(entries), end]
    TARGET.write_text("\n".join([*lines, "}"]) + "\n", "utf-8")
    print(TARGET, TARGET.stat().st_size)


if __name__ == "__main__":
    main()
