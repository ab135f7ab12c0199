"""What all plots share: figures measured in inches, colours, and saving.

matplotlib is an extra, so it is imported inside the functions and everything else works without it. pyplot is not used:
it needs a display, has global state and keeps figures open.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "LINE",
    "STYLES",
    "blank",
    "chart",
    "check_place",
    "draw_box",
    "draw_mark",
    "draw_order_bar",
    "dress",
    "figure_title",
    "key",
    "readable_on",
    "save",
    "sheet",
    "sized",
    "styles_of",
    "turn_colours",
    "unit_of_time",
]

FORMATS = (".png", ".svg", ".pdf")
_MISSING = "plots need matplotlib: pip install 'insertlm[plot]'"
INK, FAINT, GREY = "#1f2430", "#8b93a1", "#eceef2"
GOOD, BAD, BLUE, AMBER, TINT = "#17834f", "#c8372d", "#2f6fde", "#f5b335", "#dce8ff"
# Colours that everyone can tell apart (Okabe and Ito's), and markers for readers and printers without colour.
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"), ("#56b4e9", "P"))
LINE: dict[str, Any] = {"linewidth": 1.3, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.6}
_TITLE: dict[str, Any] = {"fontsize": 10, "color": INK, "weight": "bold", "parse_math": False}
WIDTH, HEIGHT = 6.4, 3.4  # of a chart without its key, in inches
ENTRY, LETTER = 0.2, 0.085  # height of a line of the key and width of a letter in it, in inches
TITLE, TITLE_LETTER = 0.36, 0.095  # height of a title and width of a letter in it, in inches


def blank(width: float, height: float, **options: Any) -> Figure:
    """An empty white figure; sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InsertlmError(_MISSING) from error
    return Figure(figsize=(width, height), facecolor="white", **options)


def sheet(left: float, right: float, *, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A figure with one axes, whose coordinates are inches: the figure grows with its content, and text keeps its
    size."""
    figure = blank(right - left, abs(top - bottom))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    return figure, axes


def chart(labels: Sequence[str], x_label: str, y_label: str, title: str = "") -> tuple[Figure, Axes]:
    """A figure with one axes and room above it for a title and a key with these labels."""
    entry, columns = _key_columns(labels)
    height = HEIGHT + ENTRY * math.ceil(len(labels) / columns) + (TITLE if title else 0.0)
    figure = blank(max(WIDTH, entry, TITLE_LETTER * len(title)), height, layout="constrained")
    axes = figure.add_subplot()
    dress(axes, x_label, y_label)
    return figure, axes


def figure_title(figure: Figure, left: float, title: str) -> None:
    """The title of a figure without a layout, on top of it, in its first TITLE inches."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - 0.6 * TITLE / height, title, va="center", **_TITLE)


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels, two thin axis lines, a faint grid and small print."""
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(color=FAINT, labelcolor=INK, labelsize=8)
    axes.grid(color=GREY)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(FAINT)


def key(figure: Figure, handles: Mapping[str, Any], title: str = "") -> None:
    """A key above the chart, under the title. handles: what was drawn, by label"""
    _, columns = _key_columns(list(handles))
    place: dict[str, Any] = {"loc": "outside upper left", "ncols": columns}
    # A title of the figure itself would lie on the key: the layout leaves room for one of the two.
    head: dict[str, Any] = {"alignment": "left", "title_fontproperties": {"size": _TITLE["fontsize"], "weight": "bold"}}
    text: dict[str, Any] = {"fontsize": 9, "labelcolor": INK, "title": title or None}
    legend = figure.legend(handles.values(), handles.keys(), frameon=False, **text, **place, **head)
    legend.get_title().set(color=INK, parse_math=False)


def styles_of(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for every label."""
    return dict(zip(labels, cycle(STYLES), strict=False))


def sized(counts: Sequence[int], things: str) -> str:
    """How many examples something was measured on, such as `5,000 test graphs` or `100 to 128 texts a point`."""
    least, most = min(counts), max(counts)
    return f"{least:,} {things}" if least == most else f"{least:,} to {most:,} {things}"


def unit_of_time(longest: float) -> tuple[str, float]:
    """The unit in which so many seconds are a number that one can read, and how many seconds it has."""
    if longest < 1:
        return "milliseconds", 0.001
    if longest < 120:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest < 7200 else ("hours", 3600.0)


def _key_columns(labels: Sequence[str]) -> tuple[float, int]:
    """The width of an entry, and how many entries fit into a line."""
    entry = 0.7 + LETTER * max(map(len, labels))
    return entry, min(len(labels), max(1, int(WIDTH / entry)))


# --- The order of writing


def turn_colours(last: int) -> list[str]:
    """A colour for each turn, from 0 (grey: given) through 1 (light) to the last (dark)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["magma_r"]
    # The ends of the map are left out: they are hard to tell from paper and from black.
    return [GREY, *(to_hex(shades(0.08 + 0.74 * turn / max(1, last - 1))) for turn in range(last))]


def draw_order_bar(figure: Figure, colours: Sequence[str], left: float, bottom: float, label: str) -> None:
    """A bar of the colours of all turns with some of their numbers. left, bottom: in inches from the corner"""
    width, height = figure.get_size_inches()
    last = len(colours) - 1
    bar = figure.add_axes((left / width, bottom / height, 2.4 / width, 0.09 / height), xlim=(0.5, last + 0.5))
    bar.bar(range(1, last + 1), 1.0, width=1.0, color=colours[1:])
    bar.set(ylim=(0, 1), yticks=[], xticks=sorted({round(1 + (last - 1) * i / 4) for i in range(5)}))
    bar.set_xlabel(label, fontsize=8, color=INK, labelpad=2)
    bar.tick_params(labelsize=7, length=2, color=FAINT, labelcolor=INK, pad=1.5)
    bar.spines[:].set_visible(False)


def draw_box(axes: Axes, left: float, top: float, width: float, height: float, **style: Any) -> None:
    """A box with round corners; sizes in inches."""
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch((left, top), width, height, boxstyle=shape, **style))


def draw_mark(axes: Axes, left: float, middle: float, *, good: bool) -> None:
    """A tick or a cross."""
    mark, colour = ("✓", GOOD) if good else ("✗", BAD)
    axes.text(left, middle, mark, va="center", fontsize=13, color=colour, weight="bold")


# --- Ink and files


def readable_on(fill: str) -> str:
    """Dark or white text, whichever has the higher contrast (relative luminance as in WCAG)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(fill)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.22 else "white"


def check_place(path: Path) -> None:
    """Whether a figure can be drawn and written there, before it takes time to make."""
    if find_spec("matplotlib") is None:
        raise InsertlmError(_MISSING)
    if path.suffix.lower() not in FORMATS:
        raise InsertlmError(f"cannot write {path}: unknown suffix {path.suffix!r}; expected {', '.join(FORMATS)}")
    check_writable(path)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix (.png, .svg, .pdf) chooses the format."""
    path = Path(path)
    check_place(path)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=200, format=path.suffix[1:].lower())
    write_atomically(path, picture.getvalue())
