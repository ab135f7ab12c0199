"""What benchmarks share: the model that they time and the JSON line that they print."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from insertlm.evaluation.provenance import provenance
from insertlm.recipe import Recipe, parse_recipe
from insertlm.tasks.star import PRESETS, Star

__all__ = ["STORIES", "model_arguments", "recipe_of", "report"]


STORIES = "stories"


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="star-hard", choices=[*PRESETS, STORIES])
    parser.add_argument("--family", default="ilm", help="ilm (default), arm, mdm or it")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--width", type=int, help="instead of the preset's, with heads of 64 and a hidden width of 4x")
    parser.add_argument("--prefix-lm", action="store_true", help="prefix rows see only the prefix")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    return parser


def recipe_of(arguments: argparse.Namespace, **sections: dict[str, Any]) -> Recipe:
    """A recipe with the model of the arguments. Also sets the number of threads."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model: dict[str, Any] = {"preset": arguments.preset, "prefix_lm": arguments.prefix_lm}
    if arguments.width:
        model |= {"width": arguments.width, "heads": arguments.width // 64, "hidden": 4 * arguments.width}
    if arguments.layers:
        model |= {"layers": arguments.layers}
    family: dict[str, Any] = {"name": arguments.family}
    star = PRESETS.get(arguments.task, {})
    if arguments.family == "mdm":
        family |= {"block": Star(**star).longest_target if star else 1024}
    task = {"preset": arguments.task if star else "star-easy", **sections.pop("task", {})}
    return parse_recipe({"task": task, "model": model, "family": family, **sections}, "benchmark")


def report(question: str, device: torch.device, **figures: Any) -> None:
    """Print one JSON line."""
    print(json.dumps({"question": question, **figures, **provenance(device)}), flush=True)
