"""A run as a folder with rounded weights, which `insertlm.load` reads. Bundled models are made with it:

    python -m insertlm.release.rounded RUN FOLDER

The folder holds the run's averaged weights, its recipe and its tokenizer. A run that was trained with `optim.rounded`
is stored in four or five bits for a matrix entry, any other in a byte (see storage/weights.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save

from insertlm.core.files import write_atomically
from insertlm.model import load
from insertlm.recipe import portable, to_yaml
from insertlm.storage.weights import pack, pack_groups

__all__ = ["main"]


def main(run: str, folder: str) -> None:
    """Write the folder."""
    model, place = load(run, "cpu", halved=False), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    model.recipe.task.save_files(place)
    packed = (pack_groups if model.recipe.optim.rounded else pack)(model.family.state_dict())
    write_atomically(place / "model.safetensors", save(packed))
    write_atomically(place / "recipe.yaml", to_yaml(portable(model.recipe)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
