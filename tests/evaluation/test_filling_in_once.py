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
from insertlm.evaluation import guesses
from insertlm.evaluation.generation import fill_once
from insertlm.evaluation.guesses import guessed, likeliest
from insertlm.evaluation.journal import Journal
from insertlm.infill.requests import Request
from insertlm.model import Model, load
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.tasks.infill_sets import Blanked
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


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """But for the time, and the last digits of the log-probability: they depend on how many texts are in a batch."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {**theirs, "seconds": mine["seconds"], "log_probability": mine["log_probability"]}
        assert mine["log_probability"] == pytest.approx(theirs["log_probability"], abs=1e-5)


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

    done: list[int] = []

    def stop(number: int) -> None:
        done.append(number)
        if number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "j.jsonl") as journal:
        fill_once(model, requests, settings, 5, journal, stop, batch_size=3)
    assert done == [3, 6]
    written: list[int] = []
    begin = Model.begin_infill

    def count(self: Model, requests: Any, settings: Any, seed: int = 0) -> Any:
        written.append(seed)
        return begin(self, requests, settings, seed)

    monkeypatch.setattr(Model, "begin_infill", count)
    with Journal(tmp_path / "j.jsonl") as journal:
        assert_same(fill_once(model, requests, settings, 5, journal), whole)
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


def test_guessed_lengths_are_those_of_another_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of several tries the one that is kept is what the model finds likeliest."""
    monkeypatch.chdir(tmp_path)
    save_set(Path("set.jsonl"), TEXT, TEXT.replace("cat", "dog"))
    removed = "sat on the mat. It was"
    other = {"pieces": ["The cat ", " a fine day."], "removed": [removed]}
    Path("other.jsonl").write_text(json.dumps({**other, "text": "The cat sat on the mat. It was a fine day."}))
    call = ["evaluate", "infilling", "set.jsonl", "--model", str(folder), "--evaluator", "none", "--device", "cpu"]
    assert main([*call, "--guess-lengths", "other.jsonl", "--decode.max_steps", "90"]) == 0
    found = read("set-tiny-infilling.json")
    size = len(load(folder, "cpu").text_tokenizer.encode(f" {removed}"))
    assert found["fills"]["speed"]["tokens"] == 2 * size
    assert (found["guess_lengths"], found["tries"]) == ("other.jsonl", 1)
    seen: list[dict[str, Any]] = []

    def kept(written: list[dict[str, Any]], texts: int) -> list[dict[str, Any]]:
        seen.extend(written)
        return likeliest(written, texts)

    monkeypatch.setattr(guesses, "likeliest", kept)
    assert main([*call, "--guess-lengths", "other.jsonl", "--tries", "5", "--decode.max_steps", "90"]) == 0
    assert len(seen) == 10 and len({record["output"] for record in seen}) > 2
    best = likeliest(seen, 2)
    for number, record in enumerate(best):
        tries = seen[number::2]
        assert record["log_probability"] == max(each["log_probability"] for each in tries)
        assert record["steps"] == sum(each["steps"] for each in tries)
    assert read("set-tiny-infilling.json")["fills"]["speed"]["tokens"] == sum(record["tokens"] for record in best)


def test_more_tries_begin_with_the_same_lengths() -> None:
    example = Blanked(["a", "b", "c"], ["x", "y"], "axbyc")
    others = [Blanked(["", ""], [" ".join("z" * size)], "") for size in range(1, 20)]
    few, many = (guessed([example] * 3, others, tries, 4) for tries in (2, 3))
    assert [request.lengths_of for request in many[:6]] == [request.lengths_of for request in few]
    assert all(len(request.lengths_of or ()) == 2 for request in many)
    assert len({tuple(request.lengths_of or ()) for request in many}) > 6
    with pytest.raises(InsertlmError, match="the set has no removed segment"):
        guessed([example], [], 1, 0)


def test_a_try_that_is_refused_or_empty_is_not_kept() -> None:
    written = [{"refused": "no"}, {"refused": "a"}, like(-2.0), {"refused": "b"}, like(None), {"refused": "c"}]
    first, second = likeliest(written, 2)
    assert (first["log_probability"], first["steps"], second) == (-2.0, 2, {"refused": "a"})


def like(log_probability: float | None) -> dict[str, Any]:
    return {"log_probability": log_probability, "steps": 1, "seconds": 0.5}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--guess-lengths", "x.jsonl"], "--guess-lengths: expected --model, which fills in the texts anew"),
        (["--model", "MODEL", "--tries", "2"], "--tries: expected --guess-lengths, which they are tries of"),
        (["--model", "MODEL", "--true-lengths", "--guess-lengths", "x"], "expected one of the two"),
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
