"""The weights that a fresh run begins with, `train.start`: those of another model, as far as they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.recipe import Recipe, load_recipe
from insertlm.storage.folders import find, read_weights
from insertlm.text.tokenizers import matching_ids
from insertlm.training.step import TrainStep

__all__ = ["begin_with"]

_BY_ID = ("backbone.embedding.weight", "unembedding.weight")  # have a row for every id


def begin_with(name: str, step: TrainStep, recipe: Recipe) -> None:
    """Take up the averaged weights of the model of that name; of another family, what both have."""
    # Ids mean the same for texts only if the tokenizer is the same. Tasks have words, which can be matched.
    folder, task = find(name), recipe.task
    if not task.fits_files(folder):
        raise InsertlmError(f"{name}: has another tokenizer than task.tokenizer")
    other, weights = load_recipe(folder / "recipe.yaml"), read_weights(folder)[0]
    if (theirs := other.model.heads) != (ours := recipe.model.heads):  # which no shape tells
        raise InsertlmError(f"{name}: has {theirs} heads, expected {ours}, as model.heads has it")
    if task.kind != "text":  # else the ids are the same
        if other.task.kind == "text":
            raise InsertlmError(f"{name}: is a model of text; expected one of tasks")
        weights = _renumbered(weights, matching_ids(task.tokenizer, other.task.tokenizer))
    try:
        step.begin_with(weights, akin=other.family.tag != recipe.family.tag)
    except InsertlmError as error:
        raise InsertlmError(f"{name}: {error}") from error


def _renumbered(weights: Mapping[str, Tensor], ids: Sequence[int | None]) -> dict[str, Tensor]:
    """The weights for another vocabulary. ids: for each of its ids, that of the same word in the old one; a word that
    was not there begins as the mean of all."""
    known = torch.tensor([number is not None for number in ids])
    old = torch.tensor([number or 0 for number in ids])
    changed = {name: weights[name] for name in _BY_ID if name in weights}
    changed = {name: torch.where(known[:, None], value[old], value.mean(0)) for name, value in changed.items()}
    return {**weights, **changed}
