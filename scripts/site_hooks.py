"""Hooks of mkdocs for `make site`.

Links from pages to files outside docs/ become their names: the pages are read in a
checkout too, where these links work. And the site asks no other server for anything:
the theme would load the script that makes search work in a folder from one.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_THEIRS = "https://unpkg.com/iframe-worker/shim"
_OURS = "assets/javascripts/iframe-worker.js"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page for the site."""
    return _OUTSIDE.sub(r"\1", markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Return the HTML of a page; all pages are in one folder."""
    return output.replace(_THEIRS, _OURS)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the script, which `make site` has installed beside mkdocs."""
    script = Path(sys.prefix) / "node_modules/iframe-worker/shim/index.js"
    shutil.copyfile(script, Path(config.site_dir) / _OURS)
