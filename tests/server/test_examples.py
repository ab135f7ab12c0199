"""Examples that a model brings along: written beforehand by docs/record_example.py, read by the server."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import insertlm
from insertlm.core.errors import InsertlmError
from insertlm.model import bundled
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.server.examples import FILE, Written, read_examples
from insertlm.storage.folders import find
from insertlm.text.subwords import train_bpe

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "record_example.py"))
FIRST = {
    "text": "Dear {name:about 5 words}, thank you for {reason:2-4 words}. See you on {day|Monday|Friday}. ___",
    "seed": 4,
    "samples": 2,
    "max_tokens": 40,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A filler that is not trained, with two examples."""
    folder = tmp_path / "filler"
    folder.mkdir()
    train_bpe(["Dear Lily, thank you for a cat in the park. See you on Monday."], 300).save(folder / "tokenizer.json")
    tree = {
        "task": {"name": "text", "train": "a.txt", "tokenizer": str(folder / "tokenizer.json"), "block": 100},
        "family": {"name": "fill"},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "max_length": 600},
        "train": {"steps": 1},
        "decode": {"temperature": 1.0},
    }
    recipe = parse_recipe(tree, "test")
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    save_file(build_family(recipe).state_dict(), folder / "model.safetensors")
    examples = [{"name": "A letter", "request": FIRST}, {"name": "Another", "request": {"text": "a ___"}}]
    (folder / FILE).write_text(json.dumps({"about": "Nothing.", "examples": examples}), encoding="utf-8")
    return folder


def replayed(written: Written) -> list[str]:
    """The texts as the page builds them, from the cells and the insertions."""
    texts = []
    for text in written.texts:
        cells = [*written.cells]
        for event in text.events:
            cells.insert(event.at, event.text)
        texts.append("".join(cells))
    return texts


def test_the_first_example_is_written_as_the_model_fills_it_in(folder: Path) -> None:
    SCRIPT["record"](folder)
    first, second = read_examples(folder).examples
    request: dict[str, Any] = {key: FIRST[key] for key in ("seed", "samples", "max_tokens")}
    alone = insertlm.load(folder, "cpu").infill(str(FIRST["text"]), **request)
    assert first.written is not None
    assert [text.text for text in first.written.texts] == [each.text for each in alone]
    assert [text.note is None for text in first.written.texts] == [each.complete for each in alone]
    assert all({*text.probabilities["day"]} == {"Monday", "Friday"} for text in first.written.texts)
    for text in first.written.texts:
        assert "".join(piece.text for piece in text.pieces) == text.text
    assert (second.name, second.written) == ("Another", None)
    assert json.loads((folder / FILE).read_text(encoding="utf-8"))["examples"][0]["request"] == FIRST


def test_it_is_written_anew_over_what_cannot_be_read(folder: Path) -> None:
    SCRIPT["record"](folder)
    once = (folder / FILE).read_bytes()
    told = json.loads(once)
    told["examples"][0]["written"] = {"answer": "of another version"}
    (folder / FILE).write_text(json.dumps(told), encoding="utf-8")
    SCRIPT["record"](folder)
    assert (folder / FILE).read_bytes() == once


def test_a_first_example_that_cannot_be_filled_in_is_told_and_nothing_is_written(folder: Path) -> None:
    told = {"examples": [{"name": "None", "request": {"text": "no blank"}}]}
    (folder / FILE).write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(InsertlmError, match=r"^the first example: the text has no blank; expected ___"):
        SCRIPT["record"](folder)
    assert json.loads((folder / FILE).read_text(encoding="utf-8")) == told


def test_examples_of_bundled_models_can_be_read_and_played() -> None:
    told = [read_examples(find(name)).examples for name in bundled()]
    played = [example.written for example, *_ in filter(None, told)]
    assert played and None not in played
    for written in filter(None, played):
        assert [text.note for text in written.texts] == [None] * len(written.texts)
        assert ["".join(text.split()) for text in replayed(written)] == [
            "".join(text.text.split()) for text in written.texts
        ]
