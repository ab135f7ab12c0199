"""What pictures share: a sheet measured in inches, colours, and the way into a file.

matplotlib is an extra: it is imported inside the functions, so that everything else works without it. Figures are made
without pyplot: no display, no global state, no figures that stay open.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.errors import InsertlmError
from insertlm.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["blank", "readable_on", "save", "sheet"]

FORMATS = (".png", ".svg", ".pdf")
INK, FAINT, GREY = "#1f2430", "#8b93a1", "#eceef2"
GOOD, BAD, BLUE, AMBER, TINT = "#17834f", "#c8372d", "#2f6fde", "#f5b335", "#dce8ff"


def blank(width: float, height: float, **options: Any) -> Figure:
    """A white figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InsertlmError("plots need matplotlib: pip install insertlm[plot]") from error
    return Figure(figsize=(width, height), facecolor="white", **options)


def sheet(left: float, right: float, *, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A figure of one axes, both as large as the given range is in inches: a figure grows with its content and text
    keeps its size."""
    figure = blank(right - left, abs(top - bottom))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    return figure, axes


def readable_on(fill: str) -> str:
    """Dark or white text, whichever has the higher contrast (relative luminance as in WCAG)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(fill)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.22 else "white"


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix (.png, .svg, .pdf) chooses the format."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InsertlmError(f"cannot write {path}: unknown suffix {path.suffix!r}; expected {', '.join(FORMATS)}")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=200, format=path.suffix[1:].lower())
    write_atomically(path, picture.getvalue())
