"""The door for Python users: load a model, give it prompts, get trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from insertlm.config import Recipe, load_recipe
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Trajectory
from insertlm.errors import InsertlmError
from insertlm.evaluation.accuracy import generate
from insertlm.families.base import Family
from insertlm.training import checkpoint
from insertlm.training.loop import build_family

__all__ = ["BUNDLED", "Model", "load"]

BUNDLED = "star-hard-mini"
_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Model:
    """A trained model with its recipe."""

    family: Family
    recipe: Recipe

    def generate(
        self, prompts: Sequence[str], *, seed: int = 0, batch_size: int = 64, **settings: Any
    ) -> list[Trajectory]:
        """Write one sequence for every prompt, as text of the model's task (star: `"3>8 8>12 0>7 … : 3 12"`).

        `settings` override the recipe's `decode` section, e.g. `temperature=0.8`. Sequence i depends on its prompt, the
        model and `seed + i` alone.
        """
        decode = self.settings(**settings)
        prefixes = [self.recipe.task.parse_prompt(text) for text in prompts]
        ready = [Prompt(prefix, seed + i) for i, prefix in enumerate(prefixes)]
        return list(generate(self.family, ready, decode, batch_size))

    def settings(self, **changes: Any) -> DecodeConfig:
        """The recipe's `decode` section with some keys changed."""
        keys = {**msgspec.to_builtins(self.recipe.decode), **changes}
        try:
            return msgspec.convert(keys, DecodeConfig)
        except msgspec.ValidationError as error:
            raise InsertlmError(f"decode: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        return self.recipe.task.tokenizer.decode(ids)


def load(name_or_path: str | Path = BUNDLED, device: str | None = None) -> Model:
    """A bundled model by name, a run folder of `insertlm train`, or a folder with recipe.yaml and model.safetensors.

    device: such as "cpu" or "cuda"; a GPU is used if there is one.
    """
    folder = _find(str(name_or_path))
    recipe = load_recipe(folder / "recipe.yaml")
    family = build_family(recipe)
    _fill(family, _weights(folder), folder)
    family.eval().requires_grad_(False).to(choose_device(device))
    if family.device.type == "cuda":
        _halve(family)
    return Model(family, recipe)


def choose_device(name: str | None = None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InsertlmError(f"unknown device {name!r}; expected cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InsertlmError("device cuda: no GPU is available to torch; expected --device cpu")
    return device


def _find(name: str) -> Path:
    for folder in (_ASSETS / name, Path(name)):
        if (folder / "recipe.yaml").is_file():
            return folder
    known = ", ".join(sorted(path.name for path in _ASSETS.iterdir() if path.is_dir()))
    raise InsertlmError(f"no model at {name}: expected a run folder with recipe.yaml, or a bundled model ({known})")


def _weights(folder: Path) -> dict[str, Tensor]:
    """The averaged weights of a run's newest checkpoint, or released ones."""
    released = folder / "model.safetensors"
    if not released.is_file():
        newest = checkpoint.latest(folder / "checkpoints")
        if newest is None:
            raise InsertlmError(f"{folder} has no checkpoint yet; expected {folder / 'checkpoints'}/step-…")
        return checkpoint.load_part(newest, "ema")
    try:
        return load_file(released)
    except (SafetensorError, OSError) as error:
        raise InsertlmError(f"{released}: expected a safetensors file: {' '.join(str(error).split())}") from error


def _fill(family: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Weights of any float type into the model's own, if every name and shape fits."""
    expected = {name: tuple(value.shape) for name, value in family.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != found:
        name = min(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        raise InsertlmError(
            f"{folder}: the weights do not fit the recipe: {name} is {found.get(name, 'missing')}, "
            f"expected {expected.get(name, 'nothing of that name')}"
        )
    family.load_state_dict(weights)


def _halve(family: nn.Module) -> None:
    """Matrices of the backbone to bfloat16, in which they are used on a GPU anyway; heads stay float32."""
    for block in family.get_submodule("backbone.blocks").modules():
        if isinstance(block, nn.Linear):
            block.to(torch.bfloat16)
