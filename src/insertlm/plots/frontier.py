"""The frontier: NLL against entropy, with a line for each model and a point for the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.plots.traces import Trace, traces_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["frontier_figure"]


def frontier_figure(traces: Sequence[Trace], data: tuple[float, float] | None = None) -> Figure:
    """x: entropy; y: NLL. Lower and further to the right is better."""
    x_label, y_label = (
        "entropy of a text's tokens, nats  (higher: more varied)",
        "NLL per token, nats  (lower: likelier)",
    )
    return traces_figure(traces, x_label, y_label, data=data)
