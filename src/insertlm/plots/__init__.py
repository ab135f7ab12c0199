"""Plots of how sequences were written, of star graphs and puzzles, of training and of evaluations.

Each *_figure function returns a matplotlib figure, and `save` writes it. May import training and all below it.
"""

from __future__ import annotations

from insertlm.plots.accuracy import Result, accuracy_figure
from insertlm.plots.figure import check_place, save, sized
from insertlm.plots.frontier import frontier_figure
from insertlm.plots.graph import graph_figure
from insertlm.plots.judging import Judged, judge_figure
from insertlm.plots.puzzle import Written, puzzle_figure
from insertlm.plots.timing import timing_figure
from insertlm.plots.traces import Trace
from insertlm.plots.training import Curve, LossCurve, Stage, loss_figure, training_figure
from insertlm.plots.trajectory import Panel, comparison_figure, trajectory_figure

__all__ = [
    "Curve",
    "Judged",
    "LossCurve",
    "Panel",
    "Result",
    "Stage",
    "Trace",
    "Written",
    "accuracy_figure",
    "check_place",
    "comparison_figure",
    "frontier_figure",
    "graph_figure",
    "judge_figure",
    "loss_figure",
    "puzzle_figure",
    "save",
    "sized",
    "timing_figure",
    "training_figure",
    "trajectory_figure",
]
