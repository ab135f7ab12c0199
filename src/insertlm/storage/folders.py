"""Finds models (bundled, run folders, exported folders, the Hugging Face Hub) and reads the weights in them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from insertlm.core.assets import bundled, find_bundled, is_bundled
from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.storage import checkpoints
from insertlm.storage.checksums import check_sums
from insertlm.storage.hub import fetch, has_file, is_hub_id
from insertlm.storage.weights import Unpacked, unpack

__all__ = ["bundled", "find", "is_bundled", "is_ours", "read_weights"]


def find(name: str) -> Path:
    """The folder of a model, by its name, path or id."""
    if not name:
        raise InsertlmError("the name of a model is empty; expected a run folder or the name of a bundled model")
    if (folder := find_bundled(name)) is not None:
        return folder
    try:
        if (Path(name) / "recipe.yaml").is_file():
            return Path(name)
    except OSError as error:
        raise InsertlmError(f"{name}: cannot be read: {reason(error)}") from error
    if is_hub_id(name):
        return fetch(name)
    known = f", or a bundled model ({', '.join(names)})" if (names := bundled()) else ""
    raise InsertlmError(f"{name}: no model there; expected a run folder with recipe.yaml{known}")


def is_ours(name: str) -> bool:
    """Whether this names a model of ours, or something that is none at all, and not a pretrained one of others: a
    folder of transformers, a GGUF file, or such a folder on the Hub."""
    place = Path(name)
    if place.suffix == ".gguf":
        return False
    if name in bundled() or place.is_dir():
        return (place / "recipe.yaml").is_file() or not (place / "config.json").is_file()
    return not is_hub_id(name) or has_file(name, "recipe.yaml")


def read_weights(folder: Path, checkpoint: str | int = "last") -> tuple[Unpacked, int | None]:
    """Released weights, or the averaged ones of one of a run's checkpoints and its step; in both cases verified.
    checkpoint: last, best or the number of its step"""
    released = folder / "model.safetensors"
    if not released.is_file():
        place = checkpoints.select(folder / "checkpoints", checkpoint)
        return unpack(checkpoints.load_part(place, "ema")), checkpoints.step_of(place)
    if checkpoint != "last":
        raise InsertlmError(f"{folder}: checkpoint {checkpoint}: it holds released weights and no checkpoints")
    check_sums(folder)
    try:
        return unpack(load_file(released)), None
    except (SafetensorError, OSError) as error:
        raise InsertlmError(f"{released}: expected a safetensors file: {' '.join(str(error).split())}") from error
