"""What a run logs, how it validates, what it keeps, and that its seed and precision are those of its recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from running import CPU, logged, quiet, recipe_of
from safetensors.torch import load_file

import insertlm
from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.recipe import OptimConfig, Recipe, build_family
from insertlm.release import rounded
from insertlm.storage import checkpoints
from insertlm.training import loop, validation
from insertlm.training.loop import train
from insertlm.training.step import TrainStep


def test_the_rate_that_is_logged_is_that_of_the_last_step(tmp_path: Path) -> None:
    recipe = recipe_of(steps=16, validate_every=0)
    train(recipe, tmp_path, CPU, quiet())
    for line in logged(tmp_path):
        assert line["learning_rate"] == recipe.optim.rate(int(line["step"]) - 1, 16)


def test_no_mean_spans_a_checkpoint_of_the_best(tmp_path: Path) -> None:
    train(recipe_of(steps=16, save_every=100, log_every=100, validate_every=6, keep_best=True), tmp_path, CPU, quiet())
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == [6, 12, 16]


def test_speed_is_that_of_the_steps_since_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation takes a hundred seconds here, and a step one."""
    clock = [0.0]
    step, validate = TrainStep.__call__, loop._Run._validate

    def slow_step(self: TrainStep, *when: Any) -> Any:
        clock[0] += 1
        return step(self, *when)

    def slow_validation(self: Any) -> float:
        clock[0] += 100
        return validate(self)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(TrainStep, "__call__", slow_step)
    monkeypatch.setattr(loop._Run, "_validate", slow_validation)
    train(recipe_of(steps=16, validate_every=3), tmp_path, CPU, quiet())
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {line["steps_per_second"] for line in lines if "loss" in line} == {1.0}


def test_every_example_of_a_validation_has_a_seed_of_its_own() -> None:
    prompts = validation._prompts(recipe_of().task.examples("validation"))
    assert [prompt.seed for prompt in prompts] == list(range(10))


# --- Seed and precision


def test_fresh_weights_depend_on_the_seed() -> None:
    families = [dict(build_family(recipe_of(seed=seed)).named_parameters()) for seed in (1, 1, 2)]
    name = "backbone.embedding.weight"
    first, again, other = (named[name] for named in families)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_order_depends_on_the_seed(tmp_path: Path) -> None:
    """And the noise with it, whose seed is the same."""
    first, still = tmp_path / "first", OptimConfig(learning_rate=0.0)
    assert train(recipe_of(steps=1), first, CPU, quiet())
    for run, seed in (("one", 1), ("again", 1), ("other", 2)):
        recipe = recipe_of(steps=1, start=str(first), seed=seed, validate_every=0)
        assert train(msgspec.structs.replace(recipe, optim=still), tmp_path / run, CPU, quiet())
    one, again, other = (logged(tmp_path / run)[0]["loss"] for run in ("one", "again", "other"))
    assert one == again != other


def test_a_run_computes_in_the_precision_of_its_recipe(tmp_path: Path) -> None:
    for precision in ("auto", "float32", "bfloat16"):
        recipe = recipe_of(steps=2, validate_every=0, precision=precision)
        assert train(recipe, tmp_path / precision, CPU, quiet())
    auto, full, half = (logged(tmp_path / precision) for precision in ("auto", "float32", "bfloat16"))
    assert auto == full
    assert full != half


def test_denormal_numbers_are_zero_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes many times slower with them, and averages of gradients shrink to them."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot leave them out")

    def denormal() -> float:
        return float(torch.tensor([1e-30]) * 1e-10)

    seen = list[float]()

    def go(run: object) -> int:
        seen.append(denormal())
        return 1

    monkeypatch.setattr(loop._Run, "go", go)
    assert train(recipe_of(steps=1, validate_every=0), tmp_path, CPU, quiet())
    assert seen == [0.0]
    assert denormal() > 0


# --- The best checkpoint


def test_a_score_that_is_only_as_good_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "accuracy", lambda *_: {"sequence_accuracy": 50.0})
    train(recipe_of(steps=16, save_every=100, validate_every=3, keep=9, keep_best=True), tmp_path, CPU, quiet())
    assert sorted(map(checkpoints.step_of, (tmp_path / "checkpoints").iterdir())) == [3, 16]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([math.nan, 10.0, math.nan, 20.0])
    monkeypatch.setattr(validation, "accuracy", lambda *_: {"sequence_accuracy": next(scores)})
    train(recipe_of(steps=12, save_every=100, validate_every=3, keep=9, keep_best=True), tmp_path, CPU, quiet())
    assert sorted(map(checkpoints.step_of, (tmp_path / "checkpoints").iterdir())) == [6, 12]


def test_the_best_checkpoint_outlives_later_ones_that_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([10.0, 50.0, 20.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(validation, "accuracy", lambda *_: {"sequence_accuracy": next(scores)})
    train(recipe_of(steps=16, save_every=5, validate_every=3, keep=1, keep_best=True), tmp_path, CPU, quiet())
    found = {checkpoints.step_of(path): checkpoints.score_of(path) for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {6: 50.0, 16: 40.0}


def test_a_run_that_goes_on_knows_the_best_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([50.0, 10.0, 10.0])
    monkeypatch.setattr(validation, "accuracy", lambda *_: {"sequence_accuracy": next(scores)})
    plain = checkpoints.commit

    def killed(*what: Any, **more: Any) -> Path:
        place = plain(*what, **more)
        if checkpoints.step_of(place) == 5:
            raise InsertlmError("that is enough")
        return place

    monkeypatch.setattr(checkpoints, "commit", killed)
    recipe = recipe_of(steps=9, save_every=5, validate_every=4, keep=9, keep_best=True)
    with pytest.raises(InsertlmError, match="that is enough"):
        train(recipe, tmp_path, CPU, quiet())
    scores = iter([10.0, 10.0])
    train(recipe, tmp_path, CPU, quiet())
    assert sorted(map(checkpoints.step_of, (tmp_path / "checkpoints").iterdir())) == [4, 5, 9]


@pytest.mark.parametrize("keep_best", [False, True])
def test_a_damaged_old_checkpoint_does_not_keep_a_run_from_going_on(tmp_path: Path, keep_best: bool) -> None:
    recipe = recipe_of(steps=14, save_every=7, keep=2, validate_every=7, keep_best=keep_best)
    train(recipe, tmp_path, CPU, quiet())
    manifest = tmp_path / "checkpoints" / "step-00000007" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:20])
    assert train(recipe, tmp_path, CPU, quiet())


def test_the_best_checkpoint_can_be_loaded_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([10.0, 50.0, 20.0])
    with monkeypatch.context() as patch:
        patch.setattr(validation, "accuracy", lambda *_: {"sequence_accuracy": next(scores)})
        train(recipe_of(steps=9, save_every=100, validate_every=3, keep_best=True), tmp_path, CPU, quiet())
    steps = {which: insertlm.load(tmp_path, "cpu", checkpoint=which).step for which in ("last", "best", 6, "9")}
    assert steps == {"last": 9, "best": 6, 6: 6, "9": 9}
    best = checkpoints.load_part(tmp_path / "checkpoints" / "step-00000006", "ema")
    found = insertlm.load(tmp_path, "cpu", checkpoint="best").family.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in best.items())
    for which, line in (
        (7, "no checkpoint of step 7; expected one of 6, 9"),
        ("worst", "checkpoint worst: expected last, best or the number of a step"),
    ):
        with pytest.raises(InsertlmError, match=line):
            insertlm.load(tmp_path, "cpu", checkpoint=which)
    with pytest.raises(InsertlmError, match="star-hard-mini: checkpoint best: it holds released weights"):
        insertlm.load("star-hard-mini", "cpu", checkpoint="best")
    chosen = ["--checkpoint", "best", "--split", "validation", "--device", "cpu"]
    assert main(["evaluate", str(tmp_path), *chosen]) == 0
    assert "step 6" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation-validation-best.json").read_text())["step"] == 6


def test_without_validations_there_is_no_best_checkpoint(tmp_path: Path) -> None:
    train(recipe_of(steps=2, validate_every=0), tmp_path, CPU, quiet())
    with pytest.raises(InsertlmError, match=r"no checkpoint was validated; expected train\.validate_every"):
        insertlm.load(tmp_path, "cpu", checkpoint="best")


# --- Logs


@pytest.mark.parametrize("error", [InsertlmError, KeyboardInterrupt, RuntimeError])
def test_trackers_are_closed_whatever_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    closed = []

    class Tracker:
        def log(self, step: int, values: Any) -> None:
            raise error("enough")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(loop, "open_tracker", lambda *_: Tracker())
    with pytest.raises(error):
        train(recipe_of(steps=9), tmp_path, CPU, quiet())
    assert closed == [True]


# --- Memory


def test_what_is_computed_again_changes_nothing(tmp_path: Path) -> None:
    for run, recompute in (("plain", False), ("again", True)):
        assert train(recipe_of(steps=5, validate_every=0, recompute=recompute), tmp_path / run, CPU, quiet())
    assert logged(tmp_path / "plain") == logged(tmp_path / "again")


# --- Tied weights


def test_a_tied_model_is_trained_saved_continued_loaded_and_released(tmp_path: Path) -> None:
    """Its words are in every file once, under the name of the embedding."""

    def recipe(steps: int) -> Recipe:
        plain = recipe_of(steps=steps, validate_every=0)
        return msgspec.structs.replace(plain, model=msgspec.structs.replace(plain.model, tied=True))

    whole, parts, small = (tmp_path / name for name in ("whole", "parts", "small"))
    assert train(recipe(8), whole, CPU, quiet())
    assert train(recipe(4), parts, CPU, quiet())
    assert train(recipe(8), parts, CPU, quiet())
    saved = [checkpoints.load(run / "checkpoints" / "step-00000008").tensors for run in (whole, parts)]
    for part, named in saved[0].items():
        assert not any("unembedding" in name for name in named)
        assert all(torch.equal(value, saved[1][part][name]) for name, value in named.items())
    rounded.main(str(whole), str(small))
    for folder in (whole, small):
        family = insertlm.load(folder, "cpu").family
        assert family.unembedding.weight is family.backbone.embedding.weight  # type: ignore[union-attr]
    assert "unembedding.weight" not in load_file(small / "model.safetensors")
