"""Tests of diagnosis.ask.own_process."""

from pathlib import Path

import tracedstore
from tracedstore.diagnosis.ask import own_process


def test_own_folders() -> None:
    """Frames of the whole package are recognised, and the demo's are the job's."""
    package = Path(tracedstore.__file__).parent

    assert Path(own_process._PACKAGE) == package
    assert Path(own_process._DEMO) == package / "tools/demo"
    assert Path(own_process._DEMO).is_dir()
