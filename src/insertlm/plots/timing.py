"""NLL against the time that writing took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.plots.figure import unit_of_time
from insertlm.plots.traces import Trace, traces_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["timing_figure"]


def timing_figure(traces: Sequence[Trace], title: str) -> Figure:
    """x: seconds per text, drawn in the unit that suits them   y: NLL"""
    unit, seconds = unit_of_time(max(max(trace.x) for trace in traces))
    scaled = [trace._replace(x=[x / seconds for x in trace.x]) for trace in traces]
    return traces_figure(
        scaled, f"{unit} per text, log scale", "NLL per token, nats  (lower: likelier)", title, log=True
    )
