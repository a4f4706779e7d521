"""Tables in Markdown, and the results of benchmarks that some of them show."""

import json
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(*terms: str) -> str:
    """Return terms in the type of code."""
    return ", ".join(f"`{term}`" for term in terms)


def results_of(name: str) -> dict[str, Any]:
    """Return the committed results of a benchmark."""
    path = _BENCHMARKS / f"{name}.json"
    results: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return results
