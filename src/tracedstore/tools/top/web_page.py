"""The page of the screen in a browser.

textual-serve's own page loads a style sheet from the internet, and has addresses that
are wrong behind a tunnel. This one loads only what textual-serve has on disk.
"""

from html import escape
from typing import Final

# xterm.js sets styles in the page. The rest comes from files of this server, whatever a
# host name or a key on the screen contains.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " font-src 'self'; img-src 'self' data:; connect-src 'self';"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/css/xterm.css">
<style>
@font-face {{
  font-family: "Roboto Mono";
  src: url("/static/fonts/RobotoMono-VariableFont_wght.ttf");
  font-weight: 100 700;
}}
html, body {{ margin: 0; height: 100%; overflow: hidden; background: #000; }}
.notice {{
  position: absolute; inset: 0; display: flex; align-items: center;
  justify-content: center; z-index: 10; color: #fff; background: #000c;
  font: 16px "Roboto Mono", monospace;
}}
.notice a {{ color: inherit; margin-left: 1ch; }}
.closed, body.-first-byte .opening, body.-closed .opening {{ display: none; }}
body.-closed .closed {{ display: flex; }}
</style>
<script src="/static/js/textual.js"></script>
</head>
<body>
<div class="notice opening">{title}</div>
<div class="notice closed">The screen has ended. <a href="/">Open it again</a></div>
<div id="terminal" class="textual-terminal" data-font-size="16"
 data-session-websocket-url="{websocket}"></div>
</body>
</html>
"""


def render(title: str, websocket: str) -> str:
    """Return the page, which opens a websocket."""
    return _PAGE.format(title=escape(title), websocket=escape(websocket))
