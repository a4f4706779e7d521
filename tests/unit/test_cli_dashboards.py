"""``tracedstore dashboards export``."""

import errno
from pathlib import Path

import pytest

from tracedstore.tools.cli.dashboards import shipped
from tracedstore.tools.cli.main import main


def files(folder: Path) -> set[str]:
    """Return every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in paths}


class TestExport:
    """The files for a user's own Grafana, Prometheus and Loki."""

    def test_all(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """All files are written to a new folder, and their paths are printed."""
        folder = tmp_path / "new" / "monitoring"

        assert main(["dashboards", "export", str(folder)]) == 0

        assert files(folder) == set(shipped())
        out, error = capsys.readouterr()
        assert out.splitlines() == [str(folder / name) for name in shipped()]
        assert "--runbook-url URL" in error

    def test_overwrite(self, tmp_path: Path) -> None:
        """A second export overwrites the files of the first; other files stay."""
        (tmp_path / "rules").mkdir()
        (tmp_path / "rules" / "prometheus.yaml").write_text("old")
        (tmp_path / "rules" / "own.yaml").write_text("own")

        main(["dashboards", "export", str(tmp_path)])

        assert (tmp_path / "rules" / "prometheus.yaml").read_text() != "old"
        assert (tmp_path / "rules" / "own.yaml").read_text() == "own"

    def test_no_url(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What is not a URL is refused before anything is written."""
        folder = tmp_path / "new"

        with pytest.raises(SystemExit) as ended:
            main(["dashboards", "export", str(folder), "--runbook-url", "runbook.md"])

        assert ended.value.code == 64
        assert "'runbook.md' is no URL" in capsys.readouterr().err
        assert not folder.exists()

    def test_runbook(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The runbook address of alerts can be changed; nothing is left to say then."""
        url = "https://wiki.example/runbook"

        main(["dashboards", "export", str(tmp_path), "--runbook-url", url])

        rules = (tmp_path / "rules" / "prometheus.yaml").read_text()
        assert f"{url}#" in rules
        assert "docs/runbook.md" not in rules
        assert capsys.readouterr().err == ""

    def test_unwritable_folder(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A folder that cannot be made is reported in one sentence."""
        (tmp_path / "file").write_text("")

        assert main(["dashboards", "export", str(tmp_path / "file")]) == 1

        error = capsys.readouterr().err
        assert error.startswith("tracedstore: ")
        assert error.count("\n") == 1

    def test_full_disk(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A failed write is reported with its file, which the error does not name."""

        def fail(*_arguments: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", fail)

        assert main(["dashboards", "export", str(tmp_path)]) == 1

        first = tmp_path / next(iter(shipped()))
        assert capsys.readouterr().err == (
            f"tracedstore: {first} cannot be read or written: No space left on device\n"
        )
