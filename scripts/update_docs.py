"""Fill the generated tables in README.md and docs/.

The tables come from names.py, the event schema, `Settings` and benchmarks/*.json. A
table is the text between ``<!-- name -->`` and ``<!-- /name -->``. With ``--check``
the script writes nothing and exits with 1 if a file is out of date.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import scale_tables
from tables import code, results_of, table

from tracedstore import names
from tracedstore.export.settings import PREFIX, Settings

ROOT = Path(__file__).parents[1]
# Characters of a line of prose.
_WIDTH = 100
SCHEMA = json.loads(
    (ROOT / "src/tracedstore/signals/events.schema.json").read_text("utf-8")
)


def _metrics() -> str:
    return table(
        ["metric", "type", "labels", "description"],
        [
            [code(metric.name), metric.type, code(*metric.labels), metric.help]
            for metric in names.METRICS
        ],
    )


def _otel_metrics() -> str:
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    return table(
        ["metric", "unit", "type", "in Prometheus"],
        [
            [
                code(metric.otel),
                code(metric.unit),
                kinds[metric.type],
                code(metric.name),
            ]
            for metric in names.METRICS
            if metric.unit
        ],
    )


def _attributes() -> str:
    return table(
        ["attribute", "description"],
        [[code(name), text] for name, text in names.ATTRIBUTES.items()],
    )


def _events() -> str:
    return table(
        ["event", "level", "description"],
        [
            [
                code(branch["title"]),
                names.EVENT_LEVELS[branch["title"]],
                branch["description"],
            ]
            for branch in SCHEMA["oneOf"]
        ],
    )


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["$defs"][reference.split("/")[-1]] if reference else schema


def _fields_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    event_fields: dict[str, dict[str, Any]] = {}
    for part in schema.get("allOf", []):
        event_fields |= _fields_of(_resolved(part))
    event_fields |= {
        name: _resolved(field) for name, field in schema.get("properties", {}).items()
    }
    return event_fields


def _fieldtable(event_fields: dict[str, dict[str, Any]]) -> str:
    return table(
        ["field", "type", "description"],
        [
            [code(name), _type(field), field["description"]]
            for name, field in event_fields.items()
            if "const" not in field
        ],
    )


def _type(field: dict[str, Any]) -> str:
    type_ = field.get("type", "string")
    return type_ if isinstance(type_, str) else " or ".join(type_)


def _event_fields() -> str:
    parts = ["### Every event", "", _fieldtable(_fields_of(SCHEMA))]
    for branch in SCHEMA["oneOf"]:
        level = names.EVENT_LEVELS[branch["title"]]
        parts += [
            "",
            f"### {branch['title']}",
            "",
            f"Level: {level}. {branch['description']}",
        ]
        parts += ["", _fieldtable(_fields_of(branch))]
    return "\n".join(parts)


def _settings() -> str:
    # An entry of the docstring's Attributes section is "name: text", with continuation
    # lines indented further.
    _, _, section = (Settings.__doc__ or "").partition("Attributes:\n")
    texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE))
    return table(
        ["`configure()`", "environment", "default", "description"],
        [
            [
                code(field.name),
                code(PREFIX + field.name.upper()),
                code(str(field.default).lower()),
                re.sub(r"\s+", " ", texts[field.name]).replace("``", "`"),
            ]
            for field in fields(Settings)
        ],
    )


def _cost() -> str:
    results = results_of("overhead")
    rows = [
        [
            row["store"],
            code(row["operation"]),
            f"{row['bare_us']:.1f} µs",
            f"{row['native_ratio']:.2f}",
            f"{row['native_cost_us']:.2f} µs",
            f"{row['python_ratio']:.2f}",
            f"{row['python_cost_us']:.1f} µs",
            f"{row['span_per_call_cost_us']:.0f} µs",
        ]
        for row in results["rows"]
        if "(" not in row["store"]
    ]
    costs = table(["store", "call", *_COST_COLUMNS], rows)
    from_cpp = results["from_cpp"]
    return (
        f"{costs}\n\n{_measured(results)}; each variant in turns with the bare"
        " store.\n\n"
        f"Called by C++, the native base adds {from_cpp['prefix_store_us']:.2f} µs to"
        " `get` of a HashStore below a PrefixStore, and"
        f" {from_cpp['unknown_thread_us']:.2f} µs on a thread that Python does not"
        " know."
    )


_COST_COLUMNS = (
    "bare",
    "native / bare",
    "native adds",
    "Python / bare",
    "Python adds",
    "a span per call adds",
)


_ROUND_TRIP = "TCPStore, calls that wait for a reply"


def _cost_summary() -> str:
    results = results_of("overhead")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        kind = row["store"]
        if kind == "TCPStore":
            # set does not wait for a reply, so its cost differs from the other calls'.
            kind = "TCPStore, `set`" if row["operation"] == "set" else _ROUND_TRIP
        if "(" not in row["store"]:
            kinds.setdefault(kind, []).append(row)
    calls = table(
        ["store", *_COST_COLUMNS],
        [
            [
                kind,
                f"{_range(rows, 'bare_us', '.1f')} µs",
                _range(rows, "native_ratio", ".2f"),
                f"{_range(rows, 'native_cost_us', '.1f')} µs",
                _range(rows, "python_ratio", ".2f"),
                f"{_range(rows, 'python_cost_us', '.1f')} µs",
                f"{_range(rows, 'span_per_call_cost_us', '.0f')} µs",
            ]
            for kind, rows in kinds.items()
        ],
    )
    barriers = results_of("barriers")
    named = barriers["naming"][-1]
    trips = barriers["completed"][-1]
    slower = [
        {
            "ours": row["ours_ms"] / row["torch_ms"],
            "configured": row["configured_ms"] / row["configured_torch_ms"],
        }
        for row in barriers["completed"]
    ]
    smallest, largest = (barriers["completed"][at]["ranks"] for at in (0, -1))
    scraped = results_of("exposition")["rows"][0]
    return (
        f"{calls}\n\n{_measured(results)}.\n\n"
        "- The columns `native` are with the [native base](native.md), which"
        " `tracedstore build-native` builds; the columns `Python` are without it.\n"
        f"- A completed barrier takes {trips['ours_round_trips']} round trips, or"
        f" {trips['configured_round_trips']} with a TracerProvider and structlog"
        f" configured. torch's barrier takes {trips['torch_round_trips']}.\n"
        f"- With {smallest} to {largest} ranks as processes on these cores a barrier"
        f" takes {_range(slower, 'ours', '.1f')} times as long as torch's, or"
        f" {_range(slower, 'configured', '.1f')} times when configured.\n"
        f"- Naming 3 missing ranks of {named['ranks']:,} takes"
        f" {named['ours_ms']:.0f} ms. torch's scan takes"
        f" {named['torch_ms'] / 1000:.1f} s.\n"
        f"- The `/metrics` page of a rank has {scraped['series']} series in"
        f" {scraped['size'] / 1000:.0f} kB."
    )


def _range(rows: list[dict[str, Any]], column: str, form: str) -> str:
    ends = [format(end(row[column] for row in rows), form) for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def _barrier_cost() -> str:
    results = results_of("barriers")
    completed = table(
        [
            "ranks",
            "torch",
            "tracedstore",
            "tracedstore / torch",
            "configured",
            "configured / torch",
            "round trips: torch",
            "tracedstore",
            "configured",
        ],
        [
            [
                f"{row['ranks']:,}",
                f"{row['torch_ms']:.2f} ms",
                f"{row['ours_ms']:.2f} ms",
                f"{row['ours_ms'] / row['torch_ms']:.2f}",
                f"{row['configured_ms']:.2f} ms",
                f"{row['configured_ms'] / row['configured_torch_ms']:.2f}",
                *(str(row[f"{name}_round_trips"]) for name in _VARIANTS),
            ]
            for row in results["completed"]
        ],
    )
    naming = table(
        ["ranks, 3 missing", "torch", "tracedstore", "tracedstore / torch"],
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


def _measured(results: dict[str, Any]) -> str:
    versions = results["versions"]
    return (
        f"Medians of one `make bench` run with torch {versions['torch']}, Python"
        f" {versions['python']}, {results['cores']} cores, server and client on one"
        " machine"
    )


def _scrape_cost() -> str:
    results = results_of("exposition")
    rows = [
        [
            row["rank"],
            row["format"],
            f"{row['series']:,}",
            f"{row['size'] / 1000:,.0f} kB",
            f"{row['rendering']:.1f} ms",
            f"{row['milliseconds']:.0f} ms",
        ]
        for row in results["rows"]
    ]
    head = ["rank", "format", "series", "size", "CPU time to render", "per scrape"]
    return table(head, rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "metrics": _metrics,
    "otel metrics": _otel_metrics,
    "attributes": _attributes,
    "events": _events,
    "event fields": _event_fields,
    "settings": _settings,
    "cost": _cost,
    "cost summary": _cost_summary,
    "scrape cost": _scrape_cost,
    "barrier cost": _barrier_cost,
    "fleet": scale_tables.fleet,
    "stall traffic": scale_tables.stall_traffic,
    "job requests": scale_tables.job_requests,
    "job lines": scale_tables.job_lines,
    "store capacity": scale_tables.store_capacity,
    "loki": scale_tables.loki,
}


def _wrapped(block: str) -> str:
    """Wrap the prose of a block, as that of the pages is; a row of a table stays."""
    lines = [
        line
        if line.startswith("|")
        else textwrap.fill(
            line,
            _WIDTH,
            subsequent_indent="  " * line.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in block.splitlines()
    ]
    return "\n".join(lines)


def fill(text: str) -> str:
    """Return the text of a document with every generated block filled."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n{_wrapped(BLOCKS[name]())}\n<!-- /{name} -->"

    blocks = re.compile(
        r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL
    )
    return blocks.sub(block, text)


def main(arguments: list[str]) -> int:
    """Fill or check all documents and return the exit code."""
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
