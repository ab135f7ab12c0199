"""Where models are: bundled ones, run folders, exported folders, the Hugging Face Hub; and the weights in them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.storage import checkpoints as checkpoint
from insertlm.storage.hub import fetch, is_hub_id
from insertlm.storage.weights import unpack

__all__ = ["bundled", "find", "is_bundled", "read_weights"]

_ASSETS = Path(__file__).parents[1] / "assets"


def bundled() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.parent.name for path in _ASSETS.glob("*/recipe.yaml"))


def is_bundled(folder: Path) -> bool:
    return folder.parent == _ASSETS


def find(name: str) -> Path:
    """The folder of a model, by its name, path or id."""
    if not name:
        raise InsertlmError("the name of a model is empty; expected a run folder or the name of a bundled model")
    if name in bundled():
        return _ASSETS / name
    try:
        if (Path(name) / "recipe.yaml").is_file():
            return Path(name)
    except OSError as error:
        raise InsertlmError(f"{name}: cannot be read: {reason(error)}") from error
    if is_hub_id(name):
        return fetch(name)
    known = f", or a bundled model ({', '.join(names)})" if (names := bundled()) else ""
    raise InsertlmError(f"{name}: no model there; expected a run folder with recipe.yaml{known}")


def read_weights(folder: Path) -> tuple[dict[str, Tensor], int | None]:
    """Released weights, or the averaged ones of a run's newest checkpoint and its step."""
    released = folder / "model.safetensors"
    if not released.is_file():
        newest = checkpoint.latest(folder / "checkpoints")
        if newest is None:
            raise InsertlmError(f"{folder}: no checkpoint yet; expected {folder / 'checkpoints'}/step-…")
        return checkpoint.load_part(newest, "ema"), checkpoint.step_of(newest)
    try:
        return unpack(load_file(released)), None
    except (SafetensorError, OSError) as error:
        raise InsertlmError(f"{released}: expected a safetensors file: {' '.join(str(error).split())}") from error
