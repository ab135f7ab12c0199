"""What the commands do, with their arguments as read by main.py: a function each.

Modules that import torch are imported where they are needed, so that `data` and mistakes are answered at once.
"""

from insertlm.cli.export import export
from insertlm.cli.infill import data_infilling, infill, infill_set
from insertlm.cli.plot_results import plot_accuracy, plot_frontier, plot_judge, plot_time
from insertlm.cli.plot_runs import plot_graph, plot_puzzle, plot_training, plot_trajectory
from insertlm.cli.runs import data, evaluate, generate, solve, train
from insertlm.cli.serve import serve
from insertlm.cli.texts import evaluate_frontier, evaluate_infilling, evaluate_judge, evaluate_nll

__all__ = [
    "data",
    "data_infilling",
    "evaluate",
    "evaluate_frontier",
    "evaluate_infilling",
    "evaluate_judge",
    "evaluate_nll",
    "export",
    "generate",
    "infill",
    "infill_set",
    "plot_accuracy",
    "plot_frontier",
    "plot_graph",
    "plot_judge",
    "plot_puzzle",
    "plot_time",
    "plot_training",
    "plot_trajectory",
    "serve",
    "solve",
    "train",
]
