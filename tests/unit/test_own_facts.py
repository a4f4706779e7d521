"""Tests of local.own_facts."""

from pathlib import Path

import tracedstore
from tracedstore.local import own_facts


def test_own_folders() -> None:
    """Frames of the whole package are recognised, and the demo's are the job's."""
    package = Path(tracedstore.__file__).parent

    assert Path(own_facts._PACKAGE) == package
    assert Path(own_facts._DEMO) == package / "tools/demo"
    assert Path(own_facts._DEMO).is_dir()
