"""The page's handler for the frontend of torch's debug server.

Imported only in the process that starts the frontend: torch's modules need packages
that nothing else needs. The class is at module level, so that it can be pickled for a
frontend that is spawned.
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
from tracedstore.auto.debug_page.rank_client import Directory, query_ranks
from tracedstore.auto.debug_page.view import View, view
from tracedstore.naming import decoders

PATH = f"/{names.SCOPE}"
# Seconds for the whole page, also if ranks do not answer.
_PAGE_TIMEOUT = 5.0

# torch does not escape in its templates, and keys are the user's text.
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
{% if view.store_error %}<p><strong>{{ view.store_error }}</strong></p>{% endif %}
{% if view.barriers %}
<h2>Stalled barriers</h2>
<table class="tracedstore">
<tr><th>Barrier</th><th>Arrived</th><th>Missing</th><th>Calls of the missing</th>
<th>Reported by</th></tr>
{% for waiting in view.barriers %}
<tr><td>{{ waiting.barrier }}</td><td>{{ waiting.arrived }}</td>
<td class="alarm">{{ waiting.missing }}</td>
<td>{% for line in waiting.missing_calls %}{{ line }}<br>{% endfor %}</td>
<td>{{ waiting.reported_by }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Ranks</h2>
<table class="tracedstore">
<tr><th>Ranks</th><th>Host</th><th>State</th><th>Call</th><th>Seconds</th>
<th>Store</th><th>Key</th><th>Key family</th><th>Thread</th></tr>
{% for row in view.rows %}
<tr{% if row.alarm %} class="alarm"{% endif %}>
{% set height = row.calls | length or 1 %}
<td rowspan="{{ height }}">{{ row.ranks }}</td>
<td rowspan="{{ height }}">{{ row.host }}</td>
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
    """Serves the page: blocked calls, missing ranks, and ranks that do not answer."""

    def routes(self) -> list[Route]:
        """Return the route of the page."""
        return [Route(PATH, self._handle)]

    def nav_links(self) -> list[NavLink]:
        """Return the menu entry of the page."""
        return [NavLink(PATH, "Store calls")]

    def templates(self) -> dict[str, str]:
        """Return the template of the page."""
        return {"tracedstore.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the page as text, for torch's periodic dumps."""
        return self._view().text()

    def dump_filename(self) -> str:
        """Return the name of the dump, which ``enabled_dumps`` takes too."""
        return names.SCOPE

    def _handle(self, req: HTTPRequestHandler) -> bytes:
        shown = self._view()
        try:
            return req.frontend.render_template("tracedstore.html", view=shown)
        except Exception:  # torch's base template has changed: serve plain text
            return f"<!doctype html><pre>{escape(shown.text())}</pre>".encode()

    def _view(self) -> View:
        # fetch_timeout is torch's setting, from 2.12 on. Its minute is too long here.
        timeout = min(_PAGE_TIMEOUT, getattr(self, "fetch_timeout", _PAGE_TIMEOUT))
        replies, store_error = query_ranks(_directory(), get_world_size(), timeout)
        return view(replies, store_error, decoders.auto())


@functools.cache
def _directory() -> Directory:
    # Not an attribute of the handler, which is pickled for a frontend that is spawned.
    return Directory(tcpstore_client, get_world_size())
