"""The frontier: NLL against entropy, with a line for each model and a point for the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.plots.traces import Trace, traces_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["frontier_figure"]


def frontier_figure(traces: Sequence[Trace], title: str, data: tuple[float, float] | None = None) -> Figure:
    """x: entropy; y: NLL. Lower and further to the right is better."""
    x_label = "entropy of a text's tokens, nats  (higher: more varied)"
    return traces_figure(traces, x_label, "NLL per token, nats  (lower: likelier)", title, data=data)
