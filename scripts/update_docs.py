"""Fill the tables in README.md and docs/ from what they document.

A table stands between ``<!-- name -->`` and ``<!-- /name -->``. With ``--check``
nothing is written, and the exit code is 1 where a file is not up to date.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tracedstore import names
from tracedstore.export.settings import PREFIX, Settings
from tracedstore.signals.events import LEVELS

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads(
    (ROOT / "src/tracedstore/signals/events.schema.json").read_text("utf-8")
)
BENCHMARKS = ROOT / "benchmarks"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _metrics() -> str:
    return _table(
        ["metric", "type", "labels", "what"],
        [
            [_code(metric.name), metric.type, _code(*metric.labels), metric.help]
            for metric in names.METRICS
        ],
    )


def _attributes() -> str:
    return _table(
        ["attribute", "what"],
        [[_code(name), what] for name, what in names.ATTRIBUTES.items()],
    )


def _events() -> str:
    return _table(
        ["event", "level", "when"],
        [
            [_code(branch["title"]), LEVELS[branch["title"]], branch["description"]]
            for branch in SCHEMA["oneOf"]
        ],
    )


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["$defs"][reference.split("/")[-1]] if reference else schema


def _fields_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for part in schema.get("allOf", []):
        found |= _fields_of(_resolved(part))
    found |= {
        name: _resolved(field) for name, field in schema.get("properties", {}).items()
    }
    return found


def _field_rows(found: dict[str, dict[str, Any]]) -> str:
    return _table(
        ["field", "type", "what"],
        [
            [_code(name), _type(field), field["description"]]
            for name, field in found.items()
            if "const" not in field
        ],
    )


def _type(field: dict[str, Any]) -> str:
    found = field.get("type", "string")
    return found if isinstance(found, str) else " or ".join(found)


def _event_fields() -> str:
    parts = ["### Every event", "", _field_rows(_fields_of(SCHEMA))]
    for branch in SCHEMA["oneOf"]:
        level = LEVELS[branch["title"]]
        parts += [
            "",
            f"### {branch['title']}",
            "",
            f"{branch['description']} ({level})",
        ]
        parts += ["", _field_rows(_fields_of(branch))]
    return "\n".join(parts)


def _settings() -> str:
    # The docstring is where a setting is explained; its Attributes section is
    # "name: text", with continuation lines indented further.
    _, _, section = (Settings.__doc__ or "").partition("Attributes:\n")
    said = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE))
    return _table(
        ["`configure()`", "environment", "default", "what"],
        [
            [
                _code(field.name),
                _code(PREFIX + field.name.upper()),
                _code(str(field.default).lower()),
                re.sub(r"\s+", " ", said[field.name]).replace("``", "`"),
            ]
            for field in fields(Settings)
        ],
    )


def _cost() -> str:
    results = _results("overhead")
    rows = [
        [
            row["store"],
            _code(row["operation"]),
            f"{row['bare_us']:.1f} µs",
            f"{row['traced_ratio']:.2f}",
            f"{row['traced_cost_us']:.1f} µs",
            f"{row['span_per_call_cost_us']:.0f} µs",
        ]
        for row in results["rows"]
        if "(" not in row["store"]
    ]
    table = _table(
        [
            "store",
            "call",
            "bare",
            "traced / bare",
            "tracing adds",
            "a span per call adds",
        ],
        rows,
    )
    return f"{table}\n\n{_measured(results)}; all variants interleaved."


def _cost_summary() -> str:
    results = _results("overhead")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        kind = f"a {row['store']} call"
        if row["store"] == "TCPStore":
            # The one that does not wait for an answer would be lost among the others.
            waits = row["operation"] != "set"
            kind += " that waits for an answer" if waits else ", `set`"
        if "(" not in row["store"]:
            kinds.setdefault(kind, []).append(row)
    calls = _table(
        ["what", "bare", "traced / bare", "tracing adds", "a span per call would add"],
        [
            [
                kind,
                f"{_span(rows, 'bare_us', '.1f')} µs",
                _span(rows, "traced_ratio", ".2f"),
                f"{_span(rows, 'traced_cost_us', '.1f')} µs",
                f"{_span(rows, 'span_per_call_cost_us', '.0f')} µs",
            ]
            for kind, rows in kinds.items()
        ],
    )
    barriers = _results("barriers")
    named = barriers["naming"][-1]
    trips = barriers["completed"][-1]
    slower = [
        {of: row[f"{of}_ms"] / row["torch_ms"] for of in _VARIANTS}
        for row in barriers["completed"]
    ]
    scraped = _results("exposition")["rows"][0]
    return (
        f"{calls}\n\n{_measured(results)}.\n\n"
        f"A completed barrier takes {trips['ours_round_trips']} round trips, torch's"
        f" own {trips['torch_round_trips']}; with tracing and structlog configured"
        f" {trips['configured_round_trips']}. With all ranks on these cores it takes"
        f" {_span(slower, 'ours', '.1f')} times as long as torch's, configured"
        f" {_span(slower, 'configured', '.1f')} times. Naming 3 missing of"
        f" {named['ranks']:,} ranks takes {named['ours_ms']:.0f} ms, torch's own way"
        f" {named['torch_ms'] / 1000:.1f} s. A rank's `/metrics` has"
        f" {scraped['series']} series in {scraped['size'] / 1000:.0f} kB."
    )


def _span(rows: list[dict[str, Any]], column: str, form: str) -> str:
    ends = [format(end(row[column] for row in rows), form) for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def _barrier_cost() -> str:
    results = _results("barriers")
    completed = _table(
        [
            "ranks",
            "torch's",
            "ours",
            "configured",
            "round trips: torch's",
            "ours",
            "configured",
        ],
        [
            [
                f"{row['ranks']:,}",
                *(f"{row[f'{of}_ms']:.1f} ms" for of in _VARIANTS),
                *(str(row[f"{of}_round_trips"]) for of in _VARIANTS),
            ]
            for row in results["completed"]
        ],
    )
    naming = _table(
        ["ranks, 3 missing", "torch's", "ours", "ours / torch's"],
        [
            [
                f"{row['ranks']:,}",
                f"{row['torch_ms']:.0f} ms",
                f"{row['ours_ms']:.1f} ms",
                f"{row['ours_ms'] / row['torch_ms']:.3f}",
            ]
            for row in results["naming"]
        ],
    )
    return f"{completed}\n\n{naming}\n\n{_measured(results)}."


_VARIANTS = ("torch", "ours", "configured")


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / f"{name}.json").read_text("utf-8"))
    return found


def _measured(results: dict[str, Any]) -> str:
    versions = results["versions"]
    return (
        f"Medians of one `make bench` run with torch {versions['torch']}, Python"
        f" {versions['python']}, {results['cores']} cores, server and client on one"
        " machine"
    )


def _scrape_cost() -> str:
    results = _results("exposition")
    rows = [
        [
            row["rank"],
            row["format"],
            f"{row['series']:,}",
            f"{row['size'] / 1000:,.0f} kB",
            f"{row['milliseconds']:.0f} ms",
        ]
        for row in results["rows"]
    ]
    return _table(["rank", "format", "series", "size", "per scrape"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "metrics": _metrics,
    "attributes": _attributes,
    "events": _events,
    "event fields": _event_fields,
    "settings": _settings,
    "cost": _cost,
    "cost summary": _cost_summary,
    "scrape cost": _scrape_cost,
    "barrier cost": _barrier_cost,
}


def fill(text: str) -> str:
    """Fill every block of a document."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- {name} -->\n{BLOCKS[name]()}\n<!-- /{name} -->"

    blocks = re.compile(
        r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL
    )
    return blocks.sub(block, text)


def main(arguments: list[str]) -> int:
    """Fill, or check, all documents."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text("utf-8")
        filled = fill(text)
        if filled != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(filled, "utf-8")
    if "--check" in arguments and stale:
        print(f"not up to date: {', '.join(stale)}; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
