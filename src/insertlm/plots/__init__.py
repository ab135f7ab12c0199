"""Pictures: the order in which sequences were written, star graphs with the path through them, and training curves."""

from __future__ import annotations

from insertlm.plots.figure import save
from insertlm.plots.graph import graph_figure
from insertlm.plots.training import Curve, training_figure
from insertlm.plots.trajectory import Panel, comparison_figure, trajectory_figure

__all__ = ["Curve", "Panel", "comparison_figure", "graph_figure", "save", "training_figure", "trajectory_figure"]
