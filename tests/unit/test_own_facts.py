"""The frames in the facts about this process."""

from pathlib import Path

import tracedstore
from tracedstore.local import facts


def test_own_folders() -> None:
    """Frames of the whole package are recognised, and the demo's are the job's."""
    package = Path(tracedstore.__file__).parent

    assert Path(facts._PACKAGE) == package
    assert Path(facts._DEMO) == package / "tools/demo"
    assert Path(facts._DEMO).is_dir()
