"""What commands share that let a model write: the model and the task as the arguments name them, and its texts."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from insertlm.inference.trajectory import Trajectory
from insertlm.tasks.base import Examples, Task

if TYPE_CHECKING:
    from insertlm.core.processes import Processes
    from insertlm.inference.settings import DecodeConfig, Prompt
    from insertlm.model import Model
    from insertlm.recipe import Recipe

__all__ = [
    "fresh_prompts",
    "labels_of",
    "load_model",
    "prompts_of",
    "settings_of",
    "solved_of",
    "write",
]

_BATCH = 64  # sequences that are written at once


def load_model(args: Namespace) -> Model:
    from insertlm.model import BUNDLED, load

    return load(BUNDLED if args.model is None else args.model, args.device)


def settings_of(model: Model, args: Namespace) -> DecodeConfig:
    return model.settings(args.overrides)


def labels_of(recipes: Sequence[Recipe], places: Sequence[str | Path]) -> list[str]:
    """The name of each one's family; where recipes that differ share it, with the place of the first one like it."""
    names = {recipe: recipe.family.tag.upper() for recipe in recipes}
    shared = Counter(names.values())
    labels: dict[Recipe, str] = {}
    for recipe, place in zip(recipes, places, strict=True):
        name = names[recipe]
        labels.setdefault(recipe, name if shared[name] == 1 else f"{name} ({place})")
    return [labels[recipe] for recipe in recipes]


def prompts_of(examples: Examples, seed: int) -> list[Prompt]:
    from insertlm.inference.settings import Prompt

    return [Prompt(example.prefix, seed + number) for number, example in enumerate(examples)]


def fresh_prompts(task: Task, count: int, seed: int) -> tuple[list[Prompt], Examples | None]:
    """Examples that nobody has seen, and their prompts; empty ones for a task that starts from nothing, and then there
    are no right answers."""
    from insertlm.inference.settings import Prompt

    if not task.has_answers:
        return [Prompt([], seed + number) for number in range(count)], None
    examples = task.examples("test", count, seed)
    return prompts_of(examples, seed), examples


def write(
    model: Model, prompts: Sequence[Prompt], args: Namespace, processes: Processes | None = None
) -> list[Trajectory]:
    return list(model.write(prompts, settings_of(model, args), _BATCH, processes=processes))


def solved_of(model: Model, written: Sequence[Trajectory], examples: Examples) -> list[bool]:
    scores = (
        model.recipe.task.scores(example, trajectory.ids) for trajectory, example in zip(written, examples, strict=True)
    )
    return [score["sequence_accuracy"] == 1 for score in scores]
