"""The folder with the logs, traces, metrics and exceptions of one demo."""

from pathlib import Path


class OutputFolder:
    """Paths of the files of each rank.

    Attributes:
        path: The folder, which is made with its subfolders.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in ("logs", "traces", "metrics", "metrics/waiting", "errors"):
            (path / part).mkdir(parents=True)

    def log(self, rank: int) -> Path:
        """Return the file of a rank's events."""
        return self.path / f"logs/rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """Return the file of a rank's spans."""
        return self.path / f"traces/rank-{rank}.jsonl"

    def metrics(self, rank: int, *, waiting: bool = False) -> Path:
        """Return the file of a rank's last scrape, or of its last while it waited."""
        return self.path / f"metrics{'/waiting' * waiting}/rank-{rank}.prom"

    def error(self, rank: int) -> Path:
        """Return the file of the exception that a rank caught."""
        return self.path / f"errors/rank-{rank}.json"
