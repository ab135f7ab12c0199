"""An exported folder that has been damaged is refused, and says what is wrong with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.model import load
from insertlm.nn import transformer
from insertlm.storage.checksums import SUMS

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (WEIGHTS, flip_a_bit),
        (WEIGHTS, lengthen),
        ("config.json", flip_a_bit),
        ("tokenizer.json", flip_a_bit),
        ("recipe.yaml", lengthen),  # still the same recipe
        ("modeling_insertlm.py", lengthen),
    ],
)
def test_a_file_that_was_changed_is_named(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    with pytest.raises(InsertlmError, match=rf"^{re.escape(str(folder / name))}: altered: its SHA-256 is "):
        load(folder, "cpu")


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InsertlmError, match=r"config\.json: missing; .*SHA256SUMS names it$"):
        load(folder, "cpu")


def test_the_card_may_be_edited(folder: Path) -> None:
    (folder / "README.md").write_text("My own words.", encoding="utf-8")
    load(folder, "cpu")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(
    folder: Path, wrong: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """One entry is enough, and without hashes, too."""
    (folder / SUMS).unlink()
    weights = load_file(folder / WEIGHTS)
    name = "backbone.blocks.1.up.weight"
    weights[name][3, 5] = wrong
    save_file(weights, folder / WEIGHTS)
    assert main(["infill", "The ___ sat.", "--model", str(folder), "--device", "cpu"]) == 2
    line = f"insertlm: {folder}: the weights are no numbers: {name} has NaN or infinite entries; expected those of a"
    assert capsys.readouterr().err.startswith(line)


def test_a_width_that_does_not_fit_is_refused_before_anything_so_wide_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / SUMS).unlink()
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("width: 16", "width: 64000000"), encoding="utf-8")

    def keys(width: int) -> Any:
        pytest.fail(f"{width} columns are made")

    monkeypatch.setattr(transformer, "column_keys", keys)
    with pytest.raises(InsertlmError, match=r"do not fit the recipe: they are 16 wide, expected 64,000,000$"):
        load(folder, "cpu")


def test_a_weight_without_columns_is_refused(folder: Path) -> None:
    (folder / SUMS).unlink()
    save_file({**load_file(folder / WEIGHTS), "backbone.blocks.0.down.weight": torch.tensor(1.0)}, folder / WEIGHTS)
    with pytest.raises(InsertlmError, match=r"do not fit the recipe: backbone\.blocks\.0\.down\.weight is "):
        load(folder, "cpu")
