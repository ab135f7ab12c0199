"""Training on a corpus, from the recipe to text: what is logged, and that a resumed run ends where another does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from running import CPU, logged, quiet

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.evaluation.losses import mean_losses
from insertlm.model import load
from insertlm.recipe import Recipe, build_family, parse_recipe
from insertlm.storage import checkpoints
from insertlm.tasks import text
from insertlm.text.subwords import train_bpe
from insertlm.training import rows as module
from insertlm.training.loop import train

STORIES = [f"The {animal} number {i} sat on the mat." for i in range(30) for animal in ("cat", "dog")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    train_bpe(STORIES, 290).save(tmp_path / "tokenizer.json")
    return tmp_path


def recipe_of(folder: Path, family: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    tree = {
        "task": {
            "name": "text",
            "train": str(folder / "a.jsonl"),
            "tokenizer": str(folder / "tokenizer.json"),
            "block": 24,
            "share": 0.2,
        },
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "dropout": 0.1},
        "family": family or {"name": "ilm"},
        "optim": {"learning_rate": 3e-3, "warmup": 2},
        "train": {"steps": 20, "batch_size": 4, "log_every": 5, "save_every": 6, "validate_every": 8, **changes},
        "decode": {"max_steps": 5},
    }
    return parse_recipe(tree, "test")


@pytest.mark.parametrize("family", [{"name": "ilm"}, {"name": "mdm", "block": 24}, {"name": "arm"}, {"name": "it"}])
def test_every_family_learns_from_text(folder: Path, family: dict[str, Any]) -> None:
    run = folder / "run"
    train(recipe_of(folder, family), run, CPU, quiet())
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    assert all(line["data_wait"] >= 0 for line in lines if "loss" in line)
    validations = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert list(validations) == [8, 16, 20]
    assert validations[20] < validations[8]
    assert not any("validation_sequence_accuracy" in line for line in lines)


def test_a_resumed_run_ends_where_an_undisturbed_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another stretch of steps is read ahead."""
    recipe, whole, parts = recipe_of(folder), folder / "whole", folder / "parts"
    train(recipe, whole, CPU, quiet())
    monkeypatch.setattr(module, "_CELLS", 5 * 4 * 28)
    plain, calls = checkpoints.commit, iter(range(9))

    def commit(*what: Any, **settings: Any) -> Path:
        place = plain(*what, **settings)
        if next(calls) in (0, 1):
            raise InsertlmError("that is enough")
        return place

    monkeypatch.setattr(checkpoints, "commit", commit)
    for _ in range(2):
        with pytest.raises(InsertlmError, match="that is enough"):
            train(recipe, parts, CPU, quiet())
    train(recipe, parts, CPU, quiet())
    assert logged(whole) == logged(parts)
    a, b = (checkpoints.load(run / "checkpoints" / "step-00000020").tensors for run in (whole, parts))
    for part, tensors in a.items():
        assert all(torch.equal(tensor, b[part][name]) for name, tensor in tensors.items())


def test_a_run_does_not_go_on_with_other_texts(folder: Path) -> None:
    recipe, run = recipe_of(folder), folder / "run"
    train(recipe, run, CPU, quiet())
    (folder / "a.jsonl").touch()  # the same texts again
    text._open.cache_clear()
    train(recipe, run, CPU, quiet())
    text._open.cache_clear()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES[:40]))
    with pytest.raises(InsertlmError, match="its training texts have changed since it began; choose another --run"):
        train(recipe, run, CPU, quiet())


def share(folder: Path, parallel: str, processes: Processes) -> None:
    train(recipe_of(folder, parallel=parallel), folder / parallel, processes, quiet())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_that_share_a_corpus_learn_as_one(
    folder: Path, parallel: str, in_processes: Callable[[int, Callable[[Processes], None]], list[None]]
) -> None:
    """Its three validations, of batches that do not divide among them, included."""
    train(recipe_of(folder), folder / "one", CPU, quiet())
    in_processes(2, partial(share, folder, parallel))
    for one, shared in zip(logged(folder / "one"), logged(folder / parallel), strict=True):
        assert shared == pytest.approx(one, rel=1e-4)
    assert load(folder / parallel, "cpu").step == 20


def test_a_run_keeps_its_vocabulary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run"
    train(recipe_of(folder), run, CPU, quiet())
    (folder / "tokenizer.json").unlink()
    (folder / "a.jsonl").unlink()
    model = load(run, "cpu")
    assert model.recipe.task.tokenizer.size == 290
    first, second = model.generate(["", ""], temperature=1.0)
    assert model.decode(first.ids)
    assert first.ids != second.ids
    capsys.readouterr()
    assert main(["generate", str(run), "--count", "2", "--device", "cpu"]) == 0
    assert "solved" not in capsys.readouterr().out
    assert main(["generate", str(run), "--prompt", "Once", "--device", "cpu"]) == 2
    assert "a text model writes from nothing" in capsys.readouterr().err


@pytest.mark.parametrize("family", [{"name": "ilm"}, {"name": "mdm", "block": 24}, {"name": "arm"}, {"name": "it"}])
def test_a_run_is_evaluated_without_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str], family: dict[str, Any]
) -> None:
    """By its likelihood where the family has one, and by its fills where it can fill in blanks."""
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    run, name = folder / "run", family["name"]
    train(recipe_of(folder, family), run, CPU, quiet())
    capsys.readouterr()
    command = ["evaluate", str(run), "--device", "cpu"]
    assert main([*command, "--count", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    record = json.loads((run / "evaluation-test.json").read_text(encoding="utf-8"))
    assert (record["count"], record["family"], record["split"]) == (3, name, "test")
    likelihood, filled = record["likelihood"], record["infilling"]
    assert (likelihood is None) == (name == "it") == ("no likelihood: " in out)
    assert (filled is None) == (name == "arm") == ("no infilling: " in out)
    if likelihood is not None:
        assert likelihood["count"] == 3 and likelihood["nll_per_word"] > 0
        assert likelihood["exact"] == (3 if name == "arm" else likelihood["exact"])
        assert f"{likelihood['nll_per_word']:.3f}" in out
    if filled is not None:
        assert (filled["texts"], filled["blanks"]) == (3, 3)
        assert 0 <= filled["overlap"]["rougeL"]["value"] <= 100
        assert ("told how many tokens" in out) == (name == "mdm")
    before = (run / "evaluation-test.journal.jsonl").read_bytes()
    assert main([*command, "--count", "3"]) == 0
    assert (run / "evaluation-test.journal.jsonl").read_bytes() == before, "nothing is done twice"
    capsys.readouterr()
    assert main(["compare", str(run)]) == 0
    assert "test: " in capsys.readouterr().out
    assert main([*command, "--count", "61"]) == 2
    assert re.fullmatch(r"insertlm: --count 61: the test split has \d+ documents\n", capsys.readouterr().err)


def test_another_vocabulary_is_another_run(folder: Path) -> None:
    run = folder / "run"
    train(recipe_of(folder), run, CPU, quiet())
    train_bpe(STORIES, 280).save(folder / "tokenizer.json")
    with pytest.raises(InsertlmError, match=r"holds a run of another recipe \(task\.tokenizer has changed since\)"):
        train(recipe_of(folder), run, CPU, quiet())


@pytest.mark.parametrize("kind", ["text", "star"])
def test_a_run_does_not_begin_with_a_model_of_another_vocabulary(folder: Path, kind: str) -> None:
    place = "star-hard-mini"
    if kind == "text":
        place = str(folder / "first")
        train(recipe_of(folder), Path(place), CPU, quiet())
        train_bpe(STORIES, 280).save(folder / "tokenizer.json")
    recipe = recipe_of(folder)
    recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, start=place))
    with pytest.raises(InsertlmError, match=rf"train\.start: {place}: has another tokenizer than task\.tokenizer"):
        train(recipe, folder / "second", CPU, quiet())


def test_the_loss_of_a_validation_is_the_same_every_time_and_hardly_depends_on_the_batch(folder: Path) -> None:
    for name, parts in (("ilm", {"loss", "token_loss", "stop_loss"}), ("arm", {"loss", "token_loss"})):
        recipe = recipe_of(folder, {"name": name})
        family = build_family(recipe).eval()
        examples = recipe.task.examples("train", 12)
        one, again, other = (mean_losses(family, examples, size, bf16=False, processes=CPU) for size in (4, 4, 5))
        assert one == again
        assert one.keys() == parts
        assert one == pytest.approx(other, rel=1e-5)


def test_a_corpus_without_a_document_ends_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.jsonl").write_text("{\n")
    with pytest.raises(InsertlmError, match="no usable document: 1 lines hold no document"):
        train(recipe_of(folder), folder / "run", CPU, quiet())
    assert not (folder / "run").exists()


def test_that_nothing_is_left_for_validation_is_known_before_the_first_step(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "The cat sat."}\n')
    with pytest.raises(InsertlmError, match="no document for the validation split"):
        train(recipe_of(folder), folder / "run", CPU, quiet())
    assert not (folder / "run").exists()


def test_a_validation_is_of_the_averaged_weights_on_the_validation_split(folder: Path) -> None:
    """Without dropout, so what is logged is what the model that is kept has."""
    recipe, run = recipe_of(folder), folder / "run"
    train(recipe, run, CPU, quiet())
    examples = recipe.task.examples("validation")
    expected = mean_losses(load(run, "cpu").family, examples, 4, bf16=False, processes=CPU)
    assert logged(run)[-1] == {
        "step": 20,
        **{f"validation_{name}": pytest.approx(value, rel=1e-6) for name, value in expected.items()},
    }


def test_the_best_checkpoint_of_a_corpus_has_the_lowest_loss(folder: Path) -> None:
    run = folder / "run"
    train(recipe_of(folder, save_every=100, validate_every=4, keep_best=True, keep=9), run, CPU, quiet())
    losses = {line["step"]: line["validation_loss"] for line in logged(run) if "validation_loss" in line}
    best = checkpoints.best(run / "checkpoints")
    assert best is not None
    assert checkpoints.step_of(best) == min(losses, key=losses.__getitem__)
    assert checkpoints.score_of(best) == -losses[checkpoints.step_of(best)]
