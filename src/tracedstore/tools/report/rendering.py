"""Renders the templates of the page. The only module that imports Jinja2."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tracedstore.common import text
from tracedstore.common.ranges import ranks_text
from tracedstore.tools.report.incidents import reporters


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render a template of the folder ``templates``. Values are escaped."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tracedstore.tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["plural"] = text.plural
    environment.filters.update(
        cut=text.shorten,
        duration=text.signed_duration,
        number=text.number,
        ranks=ranks_text,
        reporters=reporters,
        timestamp=text.timestamp,
    )
    return environment


def _finalize(value: object) -> object:
    """Make text printable. Jinja2 calls this for each value before it escapes it."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return text.printable(value)
    return value
