"""The results file of a run, and its table.

The file has one line of JSON for each finished case, so that a run that was
interrupted goes on after the last one.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.oracle import COLUMNS

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """Appends results to a file, and reads those of the same run."""

    path: Path
    seed: int
    only: str

    def read(self) -> dict[int, Result]:
        """Return the results of finished cases by number."""
        if not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                result = json.loads(line)
            except ValueError:  # the run was killed while it wrote
                continue
            if (result["seed"], result["only"]) == (self.seed, self.only):
                found[result["number"]] = result
        return found

    def append(self, result: Result) -> None:
        """Write one result, in one call: a killed run leaves whole lines."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**result, "seed": self.seed, "only": self.only}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def faults_in(result: Result) -> int:
    """Return the number of faults that a case injected."""
    return int(result["faults"])


def table(results: list[Result]) -> str:
    """Return the table of a run: a row for each class, a column for each count."""
    classes = sorted({result["class"] for result in results})
    rows = [["class", "cases", "faults", *COLUMNS, "verdict p50", "p99", "max"]]
    for name in [*classes, "all"]:
        chosen = [r for r in results if name in ("all", r["class"])]
        counts = Counter[str]()
        for result in chosen:
            for column, findings in result["findings"].items():
                counts[column] += len(findings)
        seconds = sorted(s for r in chosen for s in r["verdict_seconds"])
        rows.append(
            [
                name,
                f"{len(chosen)}",
                f"{sum(map(faults_in, chosen))}",
                *(str(counts[column]) for column in COLUMNS),
                *(_percentile(seconds, share) for share in (0.5, 0.99, 1.0)),
            ]
        )
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first one is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)


def _percentile(values: list[float], share: float) -> str:
    if not values:
        return ""
    return f"{values[min(len(values) - 1, int(share * len(values)))]:.2f} s"


def summary(results: list[Result]) -> str:
    """Return what else is worth knowing of a run, in one line each."""
    skewed = sum(result["skewed"] for result in results)
    undecidable = sum(result["undecidable"] for result in results)
    outcomes = Counter[str]()
    for result in results:
        outcomes.update(result["outcomes"].values())
    ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    return (
        f"ranks ended as: {ends}\n"
        f"cases in which a rank arrived while others read who is missing: {skewed}\n"
        f"cases in which a plain torch rank may be named: {undecidable}"
    )
