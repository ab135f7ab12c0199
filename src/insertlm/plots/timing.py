"""NLL against the time that writing took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.plots.traces import Trace, traces_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["timing_figure"]


def timing_figure(traces: Sequence[Trace]) -> Figure:
    """x: seconds per text   y: NLL"""
    return traces_figure(traces, "seconds per text, log scale", "NLL per token, nats  (lower: likelier)", log=True)
