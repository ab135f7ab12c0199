"""How good a model is while it is trained, on the validation split."""

from __future__ import annotations

from typing import NamedTuple

from insertlm.core.processes import Processes
from insertlm.evaluation.accuracy import accuracy
from insertlm.evaluation.losses import mean_losses
from insertlm.families.base import Family
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import Prompt
from insertlm.recipe import Recipe
from insertlm.tasks.base import Examples

__all__ = ["Validation", "check", "validate"]

_BATCH = 500


class Validation(NamedTuple):
    """values: for the log   score: higher is better   shown: for the terminal"""

    values: dict[str, float]
    score: float
    shown: str


def check(family: Family, recipe: Recipe) -> None:
    """Refuse a model that cannot write as the recipe asks, before it is trained."""
    if recipe.train.validate_every and recipe.task.has_answers:
        family.check(_prompts(recipe.task.examples("validation")), recipe.decode)


def validate(family: Family, recipe: Recipe, processes: Processes, *, bf16: bool) -> Validation:
    """The accuracy of what the model writes if the task has right answers, else the losses of training. All processes
    share the work and get the result. bf16: products in bfloat16"""
    examples = recipe.task.examples("validation")
    if recipe.task.has_answers:
        written = generate(family, _prompts(examples), recipe.decode, _BATCH, processes=processes)
        # Greedy or not, as the recipe says: the score is about how the model will be used.
        values = accuracy(recipe.task, examples, [text.ids for text in written])
        return Validation(values, values["sequence_accuracy"], f"{values['sequence_accuracy']:.2f} % exact")
    # No text is the right one, so what remains is how well held-out text is predicted.
    values = mean_losses(family, examples, recipe.train.batch_size, bf16=bf16, processes=processes)
    return Validation(values, -values["loss"], f"loss {values['loss']:.4f}")


def _prompts(examples: Examples) -> list[Prompt]:
    # A seed for each, or a model that samples would make the same draws for all.
    return [Prompt(example.prefix, seed) for seed, example in enumerate(examples)]
