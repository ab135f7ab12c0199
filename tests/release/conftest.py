"""Runs as `insertlm train` leaves them: tiny models of text, not trained, with weights far from their beginnings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from insertlm.model import load
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.release.folder import export
from insertlm.text.subwords import load_tokenizer, train_bpe

STORIES = [f"The {animal} number {i} sat on the mat." for i in range(30) for animal in ("cat", "dog")]
PIECES = [
    "[PAD]",
    "[unused1]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "dog",
    "##s",
    "sat",
    "on",
    "mat",
    ".",
]


FAMILIES: dict[str, dict[str, Any]] = {"mdm": {"block": 24}, "fill": {"jump": 8}, "both": {"jump": 8}}


def save_run(
    folder: Path,
    family: str = "ilm",
    pieces: bool = False,
    model: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    **decode: Any,
) -> Path:
    """pieces: with BERT's kind of vocabulary, which lacks <bos>, instead of byte-level BPE   model, keys: some of the
    keys of the model and of its family"""
    folder.mkdir()
    tokenizer = folder / ("vocab.txt" if pieces else "tokenizer.json")
    if pieces:
        tokenizer.write_text("\n".join(PIECES), encoding="utf-8")
    else:
        train_bpe(STORIES, 290).save(tokenizer)
    tree = {
        "task": {"name": "text", "train": "/home/me/private/a.jsonl", "tokenizer": str(tokenizer), "block": 24},
        "model": {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "max_length": 60, **(model or {})},
        "family": {"name": family, **FAMILIES.get(family, {}), **(keys or {})},
        "train": {"steps": 20},
        "decode": {"max_steps": 12, **decode},
    }
    recipe = parse_recipe(tree, "test")
    fresh = build_family(recipe)
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: value + 0.4 * torch.randn(value.shape, generator=noise) for name, value in fresh.state_dict().items()
    }
    for name in weights.keys() & {"unembedding.weight", "stop.out.weight"}:
        weights[name] *= 0.1  # undecided: samples differ, and texts end neither at once nor never
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    if pieces:
        load_tokenizer(str(tokenizer)).save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return save_run


@pytest.fixture(scope="session", params=["bpe", "pieces"])
def text_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "tiny", pieces=request.param == "pieces")


@pytest.fixture(scope="session")
def exported(text_run: Path) -> Path:
    folder = text_run.with_name("exported")
    export(load(text_run, "cpu"), folder)
    return folder
