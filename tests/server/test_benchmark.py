"""The benchmark of the server runs, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import server as benchmark
from safetensors.torch import save_file

from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.text.subwords import train_bpe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_bpe(["Lily found a cat in the park and they were happy."], 300).save(tmp_path / "tokenizer.json")
    recipe = parse_recipe(
        {
            "task": {"name": "text", "train": "a.txt", "tokenizer": str(tmp_path / "tokenizer.json"), "block": 100},
            "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "max_length": 200},
            "train": {"steps": 1},
        },
        "test",
    )
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    save_file(build_family(recipe).state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_all_figures_are_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--clients", "3", "--seconds", "0.5", "--tokens", "2", "--requests", "20", "--kills", "8", "--pairs", "2"]
    monkeypatch.setattr(sys, "argv", ["x", str(folder), *few])
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    assert {"device", "torch", "insertlm", "commit", "added_milliseconds", "megabytes_change_percent"} <= found.keys()
    assert found["many_clients"]["errors"] == found["one_client"]["errors"] == found["left_after_kills"] == 0
    assert found["speedup"] > 0
