"""A function for every command; main.py calls it with the arguments it has read.

Commands import torch, and modules that do, inside their functions: `data` and mistakes are then answered at once.
"""

from insertlm.cli.data import data, data_infilling
from insertlm.cli.evaluate import evaluate
from insertlm.cli.evaluate_infilling import evaluate_infilling
from insertlm.cli.evaluate_likelihood import evaluate_likelihood
from insertlm.cli.evaluate_texts import evaluate_frontier, evaluate_judge, evaluate_nll
from insertlm.cli.export import export
from insertlm.cli.generate import generate
from insertlm.cli.infill import infill, infill_set
from insertlm.cli.models import compare, info, models
from insertlm.cli.plot_results import plot_accuracy, plot_frontier, plot_judge, plot_time
from insertlm.cli.plot_runs import plot_graph, plot_puzzle, plot_training, plot_trajectory
from insertlm.cli.serve import serve
from insertlm.cli.solve import solve
from insertlm.cli.train import train

__all__ = [
    "compare",
    "data",
    "data_infilling",
    "evaluate",
    "evaluate_frontier",
    "evaluate_infilling",
    "evaluate_judge",
    "evaluate_likelihood",
    "evaluate_nll",
    "export",
    "generate",
    "infill",
    "infill_set",
    "info",
    "models",
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
