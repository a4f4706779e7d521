"""``tracedstore dashboards export``."""

from pathlib import Path

import pytest

from tracedstore.cli.dashboards import shipped
from tracedstore.cli.main import main


def files(folder: Path) -> set[str]:
    """Every file below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found}


class TestExport:
    """Everything that a monitoring of one's own needs."""

    def test_all(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Into a folder that need not be there, and it says what."""
        folder = tmp_path / "new" / "monitoring"

        assert main(["dashboards", "export", str(folder)]) == 0

        assert files(folder) == set(shipped())
        said = capsys.readouterr().out.splitlines()
        assert said == [str(folder / name) for name in shipped()]

    def test_again(self, tmp_path: Path) -> None:
        """After an upgrade it writes over what it wrote; other files stay."""
        (tmp_path / "rules").mkdir()
        (tmp_path / "rules" / "prometheus.yaml").write_text("old")
        (tmp_path / "rules" / "own.yaml").write_text("own")

        main(["dashboards", "export", str(tmp_path)])

        assert (tmp_path / "rules" / "prometheus.yaml").read_text() != "old"
        assert (tmp_path / "rules" / "own.yaml").read_text() == "own"

    def test_runbook(self, tmp_path: Path) -> None:
        """Alerts point to where the site has its runbook."""
        url = "https://wiki.example/runbook"

        main(["dashboards", "export", str(tmp_path), "--runbook-url", url])

        rules = (tmp_path / "rules" / "prometheus.yaml").read_text()
        assert f"{url}#" in rules
        assert "docs/runbook.md" not in rules

    def test_no_room(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """One sentence."""
        (tmp_path / "file").write_text("")

        assert main(["dashboards", "export", str(tmp_path / "file")]) == 1

        error = capsys.readouterr().err
        assert error.startswith("tracedstore: ")
        assert error.count("\n") == 1
