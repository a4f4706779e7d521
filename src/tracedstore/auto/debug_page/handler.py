"""The page itself, as torch's frontend wants it.

Only to be imported where the frontend runs: torch's half needs packages that nobody
else does. The class is found by name, so that a frontend that is spawned has it too.
"""

import functools
from html import escape

from torch.distributed.debug._frontend import (
    DebugHandler,
    HTTPRequestHandler,
    NavLink,
    Route,
)
from torch.distributed.debug._store import get_world_size, tcpstore_client

from tracedstore import names
from tracedstore.auto.debug_page.rank_client import Directory, ask_all
from tracedstore.auto.debug_page.view import View, view
from tracedstore.coordination import decoders

PATH = f"/{names.SCOPE}"
# Seconds for the whole page, whoever does not answer.
_WITHIN = 5.0

# torch's templates do not escape, and keys are the user's.
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}
<h1>{% block title %}Store calls and barriers{% endblock %}</h1>
{% endblock %}
{% block content %}
{% autoescape true %}
<style>
  .tracedstore { border-collapse: collapse; }
  .tracedstore th, .tracedstore td {
    border-bottom: 1px solid #ccc; padding: 4px 16px 4px 0; text-align: left;
    vertical-align: top;
  }
  .tracedstore .alarm { color: #a00; }
</style>
<p>{{ view.summary }}</p>
{% if view.trouble %}<p><strong>{{ view.trouble }}</strong></p>{% endif %}
{% if view.barriers %}
<h2>Stalled barriers</h2>
<table class="tracedstore">
<tr><th>Barrier</th><th>Arrived</th><th>Missing</th><th>What those do</th>
<th>Told by</th></tr>
{% for waiting in view.barriers %}
<tr><td>{{ waiting.barrier }}</td><td>{{ waiting.arrived }}</td>
<td class="alarm">{{ waiting.missing }}</td>
<td>{% for line in waiting.doing %}{{ line }}<br>{% endfor %}</td>
<td>{{ waiting.told_by }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Ranks</h2>
<table class="tracedstore">
<tr><th>Ranks</th><th>Where</th><th>State</th><th>Call</th><th>Seconds</th>
<th>Store</th><th>Key</th><th>Key family</th><th>Thread</th></tr>
{% for row in view.rows %}
<tr{% if row.alarm %} class="alarm"{% endif %}>
{% set height = row.calls | length or 1 %}
<td rowspan="{{ height }}">{{ row.ranks }}</td>
<td rowspan="{{ height }}">{{ row.where }}</td>
<td rowspan="{{ height }}">{{ row.state }}</td>
{% for call in row.calls %}
{% if not loop.first %}<tr>{% endif %}
<td>{{ call.operation }}</td><td>{{ "%.1f" | format(call.waited_seconds) }}</td>
<td>{{ call.store }} {{ call.server }}</td>
<td>{{ call.key }}{% if call.key_count > 1 %} and {{ call.key_count - 1 }} more
{% endif %}</td>
<td>{{ call.key_family }}</td><td>{{ call.thread }}</td></tr>
{% else %}
<td colspan="6"></td></tr>
{% endfor %}
{% endfor %}
</table>
{% endautoescape %}
{% endblock %}
"""


class StoreHandler(DebugHandler):
    """What every rank is blocked in, who is missing, and who says nothing."""

    def routes(self) -> list[Route]:
        """Give the one page."""
        return [Route(PATH, self._handle)]

    def nav_links(self) -> list[NavLink]:
        """Give its place in the menu."""
        return [NavLink(PATH, "Store calls")]

    def templates(self) -> dict[str, str]:
        """Give how it looks."""
        return {"tracedstore.html": _TEMPLATE}

    def dump(self) -> str:
        """Write it for torch's periodic dumps."""
        return self._view().text()

    def dump_filename(self) -> str:
        """Name it among the dumps, and in ``enabled_dumps``."""
        return names.SCOPE

    def _handle(self, req: HTTPRequestHandler) -> bytes:
        shown = self._view()
        try:
            return req.frontend.render_template("tracedstore.html", view=shown)
        except Exception:  # torch's frame has changed: then without it
            return f"<!doctype html><pre>{escape(shown.text())}</pre>".encode()

    def _view(self) -> View:
        # fetch_timeout is torch's setting; a minute of it is too long for a page.
        within = min(_WITHIN, self.fetch_timeout)
        replies, trouble = ask_all(_directory(), get_world_size(), within)
        return view(replies, trouble, decoders.auto())


@functools.cache
def _directory() -> Directory:
    # Not the handler's own: that is pickled on its way to a frontend that is spawned.
    return Directory(tcpstore_client, get_world_size())
