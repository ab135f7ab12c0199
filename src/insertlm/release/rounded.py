"""A run as a folder with rounded weights, which `insertlm.load` reads. Bundled models are made with it:

    python -m insertlm.release.rounded RUN FOLDER

The folder holds the run's averaged weights with one byte per matrix entry (see storage/weights.py), its recipe and its
tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save

from insertlm.core.files import write_atomically
from insertlm.model import load
from insertlm.recipe import portable, to_yaml
from insertlm.storage.weights import pack

__all__ = ["main"]


def main(run: str, folder: str) -> None:
    """Write the folder."""
    model, place = load(run, "cpu"), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    model.recipe.task.save_files(place)
    write_atomically(place / "model.safetensors", save(pack(model.family.state_dict())))
    write_atomically(place / "recipe.yaml", to_yaml(portable(model.recipe)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
