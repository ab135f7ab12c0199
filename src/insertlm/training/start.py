"""The weights that a fresh run begins with, `train.start`: those of another model, as far as they fit.

That is a model of ours (a run, an exported folder, a bundled one), or a pretrained causal model: a folder of
transformers, an id on the Hugging Face Hub, or a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.nn.adapters.llama import Pretrained, read_pretrained
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import Recipe, load_recipe
from insertlm.storage.folders import find, is_ours, read_weights
from insertlm.text.subwords import SubwordTokenizer, has_tokenizer, load_tokenizer
from insertlm.text.tokenizers import matching_ids
from insertlm.training.step import TrainStep

__all__ = ["begin_with"]

_BY_ID = ("backbone.embedding.weight", "unembedding.weight")  # have a row for every id
_APART = 0.1  # how far new rows begin from the mean of all, as a share of what others are apart
_FREE = {"dropout", "prefix_lm", "max_length"}  # keys of `model` that no weight depends on


def begin_with(name: str, step: TrainStep, recipe: Recipe) -> None:
    """Take up the averaged weights of the model of that name; of another family, what both have."""
    if is_ours(name):
        _begin_with_ours(name, step, recipe)
    else:
        _begin_with_pretrained(name, step, recipe)


def _begin_with_ours(name: str, step: TrainStep, recipe: Recipe) -> None:
    # Ids mean the same for texts only if the tokenizer is the same. Tasks have words, which can be matched.
    folder, task = find(name), recipe.task
    if not task.fits_files(folder):
        raise InsertlmError(f"{name}: has another tokenizer than task.tokenizer")
    other = load_recipe(folder / "recipe.yaml")
    weights: Mapping[str, Tensor] = read_weights(folder)[0]
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


def _begin_with_pretrained(name: str, step: TrainStep, recipe: Recipe) -> None:
    """Its network and its words. Heads that a causal model lacks stay fresh, and so do tokens that are new to it."""
    tokenizer = recipe.task.tokenizer
    if not isinstance(tokenizer, SubwordTokenizer):
        raise InsertlmError(f"{name}: is a model of text; expected one of the task {recipe.task.tag}")
    if has_tokenizer(name) and load_tokenizer(name).fingerprint != tokenizer.fingerprint:
        raise InsertlmError(f"{name}: has another tokenizer than task.tokenizer; expected task.tokenizer: {name}")
    base = read_pretrained(name)
    _check_shape(name, base.config, recipe.model)
    rows = len(base.weights[_BY_ID[0]])
    if tokenizer.known > rows:
        raise InsertlmError(f"{name}: has {rows:,} words; task.tokenizer has {tokenizer.known:,}")
    weights = _with_new_words(base, tokenizer.known, step.family.backbone.embedding.num_embeddings, recipe.train.seed)
    try:
        step.begin_with(weights, akin=True)
    except InsertlmError as error:
        raise InsertlmError(f"{name}: {error}") from error


def _check_shape(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    found, expected = (msgspec.to_builtins(config) for config in (ours, theirs))
    odd = [key for key, value in expected.items() if key not in _FREE and found[key] != value]
    if odd:
        needed = ", ".join(f"{key}: {expected[key]}" for key in odd)
        raise InsertlmError(f"{name}: the section model describes another network; expected there {needed}")


def _with_new_words(base: Pretrained, known: int, rows: int, seed: int) -> dict[str, Tensor]:
    """Its weights, with rows for all tokens. known: how many tokens it knows. The others begin near the mean of these:
    not at it, or tokens of different meaning would begin as one."""
    noise = torch.Generator().manual_seed(seed)
    weights = dict(base.weights)
    for name in _BY_ID:
        if name in weights:
            old = weights[name][:known]
            new = torch.randn(rows - known, old.shape[1], generator=noise)
            weights[name] = torch.cat([old, old.mean(0) + _APART * old.std(0) * new])
    return weights


def _renumbered(weights: Mapping[str, Tensor], ids: Sequence[int | None]) -> dict[str, Tensor]:
    """The weights for another vocabulary. ids: for each of its ids, that of the same word in the old one; a word that
    was not there begins as the mean of all."""
    known = torch.tensor([number is not None for number in ids])
    old = torch.tensor([number or 0 for number in ids])
    changed = {name: weights[name] for name in _BY_ID if name in weights}
    changed = {name: torch.where(known[:, None], value[old], value.mean(0)) for name, value in changed.items()}
    return {**weights, **changed}
