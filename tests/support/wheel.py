"""Builds the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path


def build_wheel(source: Path, folder: Path) -> zipfile.ZipFile:
    """Build the wheel of a source tree into a folder, and open it."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)),
            str(source),
        ],
        check=True,
        timeout=240,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)
