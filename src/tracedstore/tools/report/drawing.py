"""The parts of a plot, in the coordinates of its SVG image."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# Size of the image, and the margins around the plotted area.
WIDTH: Final = 1000
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 14, 34
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT


class SvgPath(NamedTuple):
    """A path with its commands, its CSS class and its tooltip."""

    css_class: str
    commands: str
    title: str = ""


class SvgDot(NamedTuple):
    """A circle with its CSS class and its tooltip."""

    css_class: str
    x: str
    y: str
    title: str


class SvgLabel(NamedTuple):
    """A text; ``anchor`` is SVG's ``text-anchor``."""

    x: str
    y: str
    anchor: str
    text: str


@dataclass(slots=True)
class Plot:
    """An image, drawn in the order of the attributes.

    Attributes:
        id: Id of the SVG element.
        label: Description for screen readers.
        height: Height of the image.
        background: Grid and areas.
        dots: Single arrivals.
        marks: Barriers that did not complete, and missing ranks.
        labels: Labels of the axes.
        legend: Text by CSS class.
        width: Width of the image.
    """

    id: str
    label: str
    height: int
    background: list[SvgPath] = field(default_factory=list)
    dots: list[SvgDot] = field(default_factory=list)
    marks: list[SvgPath] = field(default_factory=list)
    labels: list[SvgLabel] = field(default_factory=list)
    legend: Mapping[str, str] = field(default_factory=dict)
    width: int = WIDTH


def label(x: float, y: float, text: str, anchor: str) -> SvgLabel:
    """Create a label with rounded coordinates."""
    return SvgLabel(f"{x:.1f}", f"{y:.1f}", anchor, text)
