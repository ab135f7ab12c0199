"""Small runs on star graphs, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from insertlm.core.processes import Processes
from insertlm.recipe import Recipe, parse_recipe

__all__ = ["CPU", "STEPS", "logged", "quiet", "recipe_of"]

CPU = Processes(torch.device("cpu"))
STEPS = 150


def recipe_of(family: str = "ilm", **changes: Any) -> Recipe:
    """Every part of a run: dropout, average, log, validation and checkpoints, none in step with another."""
    tree = {
        "task": {
            "name": "star",
            "degree": 2,
            "min_nodes": 3,
            "max_nodes": 4,
            "min_plan": 2,
            "nodes": 10,
            "train": 50,
            "validation": 10,
        },
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "dropout": 0.1, "prefix_lm": family != "mdm"},
        "family": {"name": family, **({"block": 8} if family == "mdm" else {})},
        "optim": {"learning_rate": 3e-3, "warmup": 10, "ema": 0.9, "ema_every": 4},
        "train": {"steps": STEPS, "batch_size": 8, "log_every": 5, "save_every": 7, "validate_every": 12, **changes},
        "decode": {"max_steps": 6},
    }
    return parse_recipe(tree, "test")


def logged(run: Path) -> list[dict[str, float]]:
    """What two runs of a recipe must have in common: all but what depends on the machine."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in ("steps_per_second", "data_wait")} for line in lines
    ]


def quiet() -> Console:
    return Console(quiet=True)
