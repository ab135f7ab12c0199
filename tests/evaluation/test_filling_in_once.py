"""`insertlm evaluate infilling --model`: what a model writes is kept, however often it is stopped or judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.evaluation import generation
from insertlm.evaluation.generation import fill_once
from insertlm.evaluation.journal import Journal
from insertlm.infill.requests import Request
from insertlm.model import Model, load
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.text.subwords import train_bpe

TEXT = "The cat sat on the mat. It was a very fine day. Then it went home."
BLANKS = [(4, 7), (24, 47)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text that is not trained."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    train_bpe([TEXT] * 20, 300).save(folder / "tokenizer.json")
    tree = {
        "task": {"name": "text", "train": "a.jsonl", "tokenizer": str(folder / "tokenizer.json"), "block": 80},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "max_length": 90},
        "family": {"name": "ilm"},
        "train": {"steps": 2},
        "decode": {"max_steps": 6, "temperature": 1.0, "position_top_k": 0},
    }
    recipe = parse_recipe(tree, "test")
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(build_family(recipe).state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder, "cpu")


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_a_stopped_call_goes_on_and_writes_the_same(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(TEXT, BLANKS)] * 7
    settings = model.settings()
    whole = fill_once(model, requests, settings, 5, Journal())
    filled = model.fill(requests, settings, 5)
    assert [record["output"] for record in whole] == [each.text for each in filled]
    assert [record["fills"] for record in whole] == [each.fills for each in filled]
    assert len({record["output"] for record in whole}) > 1  # the seeds matter
    for record, each in zip(whole, filled, strict=True):
        assert (record["tokens"], record["complete"]) == (len(each.trajectory.events), each.complete)
        assert 0 < record["steps"] <= record["tokens"]

    monkeypatch.setattr(generation, "_BATCH", 3)
    done: list[int] = []

    def stop(number: int) -> None:
        done.append(number)
        if number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "j.jsonl") as journal:
        fill_once(model, requests, settings, 5, journal, stop)
    assert done == [3, 6]
    written: list[int] = []
    begin = Model.begin_infill

    def count(self: Model, requests: Any, settings: Any, seed: int = 0) -> Any:
        written.append(seed)
        return begin(self, requests, settings, seed)

    monkeypatch.setattr(Model, "begin_infill", count)
    with Journal(tmp_path / "j.jsonl") as journal:
        assert without_time(fill_once(model, requests, settings, 5, journal)) == without_time(whole)
    assert written == [11]  # the seventh alone
    with Journal(tmp_path / "j.jsonl") as journal:
        other = fill_once(model, requests, model.settings(temperature=0.0), 5, journal)
    assert written[1:] == list(range(5, 12))  # other settings are other texts
    assert other != whole


def test_a_text_that_does_not_fit_is_refused_alone(model: Model) -> None:
    long = " ".join([TEXT] * 9)
    found = fill_once(model, [Request(long, BLANKS), Request(TEXT, BLANKS)], model.settings(), 0, Journal())
    assert "the model takes" in found[0]["refused"]
    assert "refused" not in found[1]


def test_what_a_family_refuses_is_refused_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    check = type(model.family).check

    def one_blank(self: Any, prompts: Any, settings: Any) -> int:
        if any(len(prompt.gaps) > 1 for prompt in prompts):
            raise InsertlmError("one blank is enough")
        return check(self, prompts, settings)

    monkeypatch.setattr(type(model.family), "check", one_blank)
    found = fill_once(model, [Request(TEXT, BLANKS), Request(TEXT, BLANKS[:1])], model.settings(), 0, Journal())
    assert found[0]["refused"] == "one blank is enough"
    assert len(found[1]["fills"]) == 1


def save_set(path: Path, *texts: str) -> None:
    lines = ({"pieces": [text[:4], text[7:]], "removed": [text[4:7]], "text": text} for text in texts)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read(path: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return record


def test_the_command_fills_in_once_and_is_judged_twice(
    folder: Path,
    causal_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_set(Path("set.jsonl"), TEXT, " ".join([TEXT] * 9), TEXT)
    call = ["evaluate", "infilling", "set.jsonl", "--model", str(folder), "--seed", "3", "--device", "cpu"]
    assert main([*call, "--evaluator", "none"]) == 0
    printed = capsys.readouterr().out
    assert "1 texts that the model cannot take are left out: text 2: " in printed
    assert "ΔNLL" not in printed
    alone = read("set-tiny-infilling.json")
    assert (alone["seed"], alone["fills"]["texts"], len(alone["refused"])) == (3, 2, 1)
    assert alone["settings"]["max_steps"] == 6
    assert "against_the_truth" not in alone

    def refuse(*_: Any) -> Any:
        raise AssertionError("written again")

    monkeypatch.setattr(Model, "begin_infill", refuse)
    assert main([*call, "--evaluator", str(causal_model)]) == 0
    judged = read("set-tiny-infilling-tiny-lm.json")
    assert judged["fills"] == alone["fills"]
    assert judged["texts"] == alone["texts"]
    assert judged["against_the_truth"]["count"] == 2
    change = judged["against_the_truth"]["change"]
    assert change["nll_low"] <= change["nll"] <= change["nll_high"]
    assert {path.name for path in Path().glob("*.journal.jsonl")} == {
        "set-tiny-fills.journal.jsonl",
        "set-tiny-infilling-tiny-lm.journal.jsonl",
        "originals-tiny-lm.journal.jsonl",
    }


def test_the_gap_to_told_lengths_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_set(Path("set.jsonl"), TEXT, TEXT.replace("cat", "dog"))
    call = ["evaluate", "infilling", "set.jsonl", "--model", str(folder), "--evaluator", "none", "--device", "cpu"]
    assert main([*call, "--true-lengths", "--out", "told.json"]) == 0
    assert read("told.json")["true_lengths"] is True
    capsys.readouterr()
    assert main([*call, "--told-lengths", "told.json"]) == 0
    assert "gap to told lengths" in capsys.readouterr().out
    figures = {gap["figure"]: gap for gap in read("set-tiny-infilling.json")["gaps"]}
    assert set(figures) == {"ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU"}
    assert main([*call, "--count", "1", "--told-lengths", "told.json"]) == 2
    assert "told.json: expected a result of insertlm evaluate infilling for the same texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--decode.temperature", "1"], "--decode.temperature: expected --model, which fills in the texts anew"),
        (["--true-lengths"], "--true-lengths: expected --model, which fills in the texts anew"),
        (["--guessed-lengths", "x.json"], "--guessed-lengths: expected --told-lengths, too; "),
        ([], "set.jsonl, line 1: expected pieces, removed, text and output: "),
        (["--model", "MODEL", "--decode.temperature", "hot"], "hot"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_set(Path("set.jsonl"), TEXT)
    call = ["evaluate", "infilling", "set.jsonl", "--evaluator", "none"]
    assert main([*call, *(str(folder) if word == "MODEL" else word for word in arguments)]) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert line in message


def test_a_model_that_can_take_no_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_set(Path("set.jsonl"), " ".join([TEXT] * 9))
    assert main(["evaluate", "infilling", "set.jsonl", "--model", str(folder), "--evaluator", "none"]) == 2
    assert "can take none of 1 texts: text 1: the text has" in capsys.readouterr().err


def test_processes_that_share_a_journal_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as one, Journal(path) as other:
        one.add("a", {"x": 1})
        other.add("b", {"x": 2})  # opened when the file was not there yet
        one.add("c", {"x": 3})
    assert [Journal(path)[key]["x"] for key in "abc"] == [1, 2, 3]
