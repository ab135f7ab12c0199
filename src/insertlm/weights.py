"""Released weights, in files as small as they can be without harm: a byte for every entry of a matrix.

    python -m insertlm.weights RUN FOLDER

writes the averaged weights of a run with its recipe and its tokenizer, as a folder that `insertlm.load` reads. A matrix is
rounded row by row: the largest entry of a row becomes ±127, and a factor for each row stands beside it under the name
`<matrix>/scale`. Vectors are kept in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

__all__ = ["pack", "unpack"]

_SCALE = "/scale"


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to int8 and a factor per row, the rest to bfloat16."""
    packed = {}
    for name, value in weights.items():
        if value.dim() < 2:
            packed[name] = value.bfloat16()
            continue
        scale = value.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        packed[name] = (value.float() / scale).round().to(torch.int8)
        packed[name + _SCALE] = scale
    return packed


def unpack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `pack` made, back in floating point; other weights stay as they are."""
    return {
        name: value * weights[name + _SCALE] if name + _SCALE in weights else value
        for name, value in weights.items()
        if not name.endswith(_SCALE)
    }


def main(run: str, folder: str) -> None:
    from insertlm.api import load
    from insertlm.config import to_yaml
    from insertlm.export.folder import portable
    from insertlm.files import write_atomically
    from insertlm.tasks.text import Text

    model, place = load(run, "cpu"), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if isinstance(model.recipe.task, Text):
        model.recipe.task.keep(place)
    write_atomically(place / "model.safetensors", save(pack(model.family.state_dict())))
    write_atomically(place / "recipe.yaml", to_yaml(portable(model.recipe)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
