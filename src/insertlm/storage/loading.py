"""A model from its recipe and its weights. Nothing is allocated before names and shapes have been compared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.nn.eight_bits import EightBits
from insertlm.recipe import Recipe, build_family
from insertlm.storage.weights import Unpacked

__all__ = ["fill", "hollow_family"]

_BLOCKS = "backbone.blocks."


def hollow_family(recipe: Recipe, weights: Unpacked, folder: Path) -> Family:
    """The model of a recipe, with parameters that take no memory yet. Refuses weights that do not fit it."""
    try:
        shapes = {name: weights.shape(name) for name in weights}
    except InsertlmError as error:
        raise InsertlmError(f"{folder}: damaged weights: {error}") from error
    # Even a hollow block takes a millisecond, and its buffers take memory: their number and width are compared first.
    blocks = {name.removeprefix(_BLOCKS).partition(".")[0] for name in weights if name.startswith(_BLOCKS)}
    if len(blocks) != recipe.model.layers:
        raise _misfit(folder, f"they have {len(blocks):,} layers, expected {recipe.model.layers:,}")
    width = shapes.get(f"{_BLOCKS}0.down.weight", ())[:1]
    if width not in ((), (recipe.model.width,)):
        raise _misfit(folder, f"they are {width[0]:,} wide, expected {recipe.model.width:,}")
    family = build_family(recipe, hollow=True)
    own = family.state_dict()
    # load_state_dict checks this too, but its message lists every name and does not say which folder.
    for name in sorted(own.keys() | shapes.keys()):
        found, expected = shapes.get(name), tuple(own[name].shape) if name in own else None
        if found != expected:
            raise _misfit(folder, f"{name} is {found or 'missing'}, expected {expected or 'nothing of that name'}")
    return family


def fill(family: Family, weights: Unpacked, folder: Path, device: torch.device) -> None:
    """Give a hollow model its weights, each straight in its own precision and on this device."""
    if wrong := next((name for name in weights if not weights.finite(name)), None):
        raise InsertlmError(
            f"{folder}: the weights are no numbers: {wrong} has NaN or infinite entries; expected those of a training "
            "that did not diverge"
        )
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is in two modules and has to stay one
    for module in family.modules():
        for name, hollow in module.named_parameters(recurse=False):
            if hollow not in made:  # not by empty_like, for which torch would load a second's worth of modules
                made[hollow] = nn.Parameter(torch.empty(hollow.shape, dtype=hollow.dtype, device=device), False)
            setattr(module, name, made[hollow])
    for name in weights:
        module = family.get_submodule(name.rpartition(".")[0])
        if isinstance(module, EightBits) and name.endswith(".weight"):
            module.take(weights[name])
        else:
            weights.write(name, family.get_parameter(name))


def _misfit(folder: Path, what: str) -> InsertlmError:
    return InsertlmError(f"{folder}: the weights do not fit the recipe: {what}")
