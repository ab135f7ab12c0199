"""A run that is killed again and again ends, bit for bit, where an undisturbed one ends."""

from __future__ import annotations

import json
import random
import shutil
import time
from io import StringIO
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from running import CPU, STEPS, logged, quiet, recipe_of

from insertlm.core.errors import InsertlmError
from insertlm.nn.adaln import AdaptiveBlock
from insertlm.recipe import OptimConfig, Recipe, load_recipe
from insertlm.storage import checkpoints
from insertlm.tasks.star import Star
from insertlm.text.tokenizers import matching_ids
from insertlm.training.loop import train

KILLS = 5


def start(run: Path) -> ForkProcess:
    """A process that trains; forked, so that it need not import everything again."""
    process = get_context("fork").Process(target=train, args=(recipe_of(), run, CPU, quiet()))
    process.start()
    return process


def finish(run: Path) -> int | None:
    process = start(run)
    process.join()
    return process.exitcode


def progress(run: Path) -> int:
    """The step of the newest line, whole or not."""
    place = run / "metrics.jsonl"
    lines = place.read_text().splitlines() if place.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def kill_at(run: Path, step: int, delay: float) -> bool:
    """Start the run and kill it a moment after it logs `step`; whether it was still under way."""
    process = start(run)
    try:
        while process.is_alive() and progress(run) < step:
            time.sleep(0.002)
        time.sleep(delay)
        if not process.is_alive():
            assert process.exitcode == 0
            return False
    finally:
        process.kill()
        process.join()
    return True


def assert_same_end(left: Path, right: Path) -> None:
    assert logged(left) == logged(right)
    ends = [checkpoints.latest(run / "checkpoints") for run in (left, right)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].name == ends[1].name == f"step-{STEPS:08d}"
    a, b = (checkpoints.load(end).tensors for end in ends if end)
    assert a.keys() == b.keys() == {"weights", "ema", "optimizer"}
    for part in a:
        assert a[part].keys() == b[part].keys()
        for name, tensor in a[part].items():
            assert tensor.dtype == b[part][name].dtype
            assert torch.equal(tensor.view(-1).view(torch.uint8), b[part][name].view(-1).view(torch.uint8)), name


def test_a_killed_run_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert finish(undisturbed) == 0
    chance = random.Random(22)
    moments = sorted(chance.sample(range(1, STEPS - 50), KILLS))
    landed, resumed = 0, 0
    for step in moments:
        resumed += checkpoints.latest(killed / "checkpoints") is not None
        landed += kill_at(killed, step, chance.uniform(0, 0.05))
    assert landed >= KILLS - 1, "the run was over before it could be killed"
    assert resumed >= 2, "no kill came after a checkpoint"
    assert finish(killed) == 0
    assert_same_end(undisturbed, killed)
    assert [line["step"] for line in logged(killed) if "validation_sequence_accuracy" in line] == [
        *range(12, STEPS, 12),
        STEPS,
    ]


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(steps=8)
    train(recipe, tmp_path, CPU, quiet())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train(recipe, tmp_path, CPU, quiet())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


def test_losses_are_logged_at_least_as_often_as_asked(tmp_path: Path) -> None:
    """And at every checkpoint, so that no mean spans one."""
    train(recipe_of(steps=16, validate_every=0), tmp_path, CPU, quiet())
    assert [line["step"] for line in logged(tmp_path)] == [5, 7, 10, 14, 15, 16]
    assert all(line.keys() == {"step", "loss", "token_loss", "stop_loss", "learning_rate"} for line in logged(tmp_path))


def test_validation_does_not_change_the_losses(tmp_path: Path) -> None:
    """Neither the training nor what is said of it, also where a validation falls between two lines of the log."""
    for every in (0, 3, 4):
        train(recipe_of(steps=16, validate_every=every), tmp_path / str(every), CPU, quiet())
    plain, *others = ([line for line in logged(tmp_path / str(every)) if "loss" in line] for every in (0, 3, 4))
    assert others == [plain, plain]


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train(recipe_of(steps=3), tmp_path, CPU, quiet())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InsertlmError, match=r"train\.batch_size is 8, not 4"):
        train(recipe_of(steps=3, batch_size=4), tmp_path, CPU, quiet())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# --- Weights of another run


def test_a_fresh_run_begins_with_the_averaged_weights_of_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(recipe_of(steps=20), first, CPU, quiet())
    began = average_of(first)
    still = recipe_of(steps=1, start=str(first), seed=2)
    assert train(msgspec.structs.replace(still, optim=OptimConfig(learning_rate=0.0)), second, CPU, quiet())
    assert all(torch.equal(value, began[name]) for name, value in average_of(second).items())


def test_of_another_family_it_takes_what_both_have(tmp_path: Path) -> None:
    """Here all but the stop head, which is as fresh as ever, and which an ARM that begins with it leaves behind."""
    arm, ilm, back, alone = (tmp_path / name for name in ("arm", "ilm", "back", "alone"))
    still = OptimConfig(learning_rate=0.0)
    assert train(recipe_of("arm", steps=9), arm, CPU, quiet())
    for run, family, start in ((ilm, "ilm", str(arm)), (back, "arm", str(ilm)), (alone, "ilm", "")):
        recipe = recipe_of(family, steps=1, start=start, seed=2)
        assert train(msgspec.structs.replace(recipe, optim=still), run, CPU, quiet())
    began, taken, fresh = map(average_of, (arm, ilm, alone))
    assert all(torch.equal(value, taken[name]) for name, value in began.items())
    heads = taken.keys() - began.keys()
    assert heads
    assert all(name.startswith("stop.") and torch.equal(taken[name], fresh[name]) for name in heads)
    assert all(torch.equal(value, began[name]) for name, value in average_of(back).items())


def test_of_another_vocabulary_it_takes_the_words_both_have(tmp_path: Path) -> None:
    """Words that are new begin as the mean of all that were there, and all else is as it was."""
    small, large = tmp_path / "small", tmp_path / "large"
    assert train(recipe_of(steps=9), small, CPU, quiet())
    recipe = recipe_of(steps=1, start=str(small))
    assert isinstance(recipe.task, Star)
    more = msgspec.structs.replace(recipe.task, nodes=13)
    still = msgspec.structs.replace(recipe, task=more, optim=OptimConfig(learning_rate=0.0))
    assert train(still, large, CPU, quiet())
    began, taken = map(average_of, (small, large))
    assert began.keys() == taken.keys()
    there = matching_ids(more.tokenizer, recipe.task.tokenizer)
    assert [more.tokenizer.words[number] for number, old in enumerate(there) if old is None] == ["10", "11", "12"]
    for name, value in taken.items():
        if name in ("backbone.embedding.weight", "unembedding.weight"):
            mean = began[name].mean(0)
            for number, old in enumerate(there):
                torch.testing.assert_close(value[number], mean if old is None else began[name][old])
        else:
            assert torch.equal(value, began[name])


def test_an_mdm_takes_a_plain_backbone_for_every_time(tmp_path: Path) -> None:
    ilm, mdm = tmp_path / "ilm", tmp_path / "mdm"
    assert train(recipe_of(steps=9), ilm, CPU, quiet())
    recipe = recipe_of("mdm", steps=1, start=str(ilm))
    assert train(msgspec.structs.replace(recipe, optim=OptimConfig(learning_rate=0.0)), mdm, CPU, quiet())
    began, taken = (
        {name: x for name, x in average_of(run).items() if name.startswith("backbone.")} for run in (ilm, mdm)
    )
    expected = AdaptiveBlock.adopt(began)
    assert taken.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in taken.items())


def test_of_another_family_the_backbone_must_fit(tmp_path: Path) -> None:
    assert train(recipe_of("mdm", steps=2), tmp_path / "mdm", CPU, quiet())
    with pytest.raises(InsertlmError, match=r"another architecture: backbone\.\S+ is in one of them only"):
        train(recipe_of(start=str(tmp_path / "mdm")), tmp_path / "ilm", CPU, quiet())


def test_what_cannot_be_a_model_leaves_no_folder(tmp_path: Path) -> None:
    recipe = recipe_of("mdm")
    two_ways = msgspec.structs.replace(recipe.model, prefix_lm=True)
    with pytest.raises(InsertlmError, match=r"^model\.prefix_lm: expected false for an mdm"):
        train(msgspec.structs.replace(recipe, model=two_ways), tmp_path / "run", CPU, quiet())
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_does_not_begin_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(recipe_of(steps=7), first, CPU, quiet())
    recipe = recipe_of(steps=14, start=str(first))
    assert train(recipe, second, CPU, quiet())
    shutil.rmtree(first)
    done = average_of(second)
    assert train(recipe, second, CPU, quiet())
    assert all(torch.equal(value, done[name]) for name, value in average_of(second).items())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(steps=2, start="star-hard-mini")
    with pytest.raises(InsertlmError, match=r"train\.start: star-hard-mini: has 4 heads, expected 2"):
        train(recipe, tmp_path, CPU, quiet())  # their weights may have the same shapes
    recipe = msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, heads=4))
    with pytest.raises(InsertlmError, match=r"train\.start: star-hard-mini: a checkpoint of another architecture: "):
        train(recipe, tmp_path, CPU, quiet())
    with pytest.raises(InsertlmError, match=r"train\.start: english: .*(heads|text)"):
        train(recipe_of(steps=2, start="english"), tmp_path, CPU, quiet())
    with pytest.raises(InsertlmError, match=r"train\.start: nowhere: no model there"):
        train(recipe_of(start="nowhere"), tmp_path / "new", CPU, quiet())
    assert not (tmp_path / "new").exists()


def average_of(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    return checkpoints.load_part(newest, "ema")


# --- What may change


def test_what_is_reported_and_kept_may_change_and_so_may_the_number_of_steps(tmp_path: Path) -> None:
    """A run that is made longer ends, without a cooldown, where one of that length ends."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # The average of a run's last step counts even if it is not due; so the first part ends where it is due.
    assert train(recipe_of(steps=24, validate_every=0), whole, CPU, quiet())
    assert train(recipe_of(steps=12, validate_every=0), parts, CPU, quiet())
    changed: dict[str, Any] = {"log_every": 3, "save_every": 11, "keep": 5, "keep_best": True, "validate_every": 6}
    assert train(recipe_of(steps=24, **changed), parts, CPU, quiet())
    assert all(torch.equal(value, average_of(whole)[name]) for name, value in average_of(parts).items())
    assert load_recipe(parts / "recipe.yaml").train == recipe_of(steps=24, **changed).train
    with pytest.raises(InsertlmError, match=r"train\.steps is 23, but .* has 24 steps already"):
        train(recipe_of(steps=23), parts, CPU, quiet())


@pytest.mark.parametrize(
    ("cooldown", "steps", "line"),
    [
        (0.2, 25, "train.steps was 10: the rate had begun to fall, rises again and falls from step 20 on"),
        (0.0, 25, ""),
        (0.2, 10, ""),
    ],
)
def test_what_more_steps_do_to_a_cooldown_is_said(tmp_path: Path, cooldown: float, steps: int, line: str) -> None:
    def recipe(steps: int) -> Recipe:
        plain = recipe_of(steps=steps, validate_every=0, save_every=6)
        return msgspec.structs.replace(plain, optim=OptimConfig(cooldown=cooldown))

    console = Console(file=StringIO(), width=200)
    assert train(recipe(10), tmp_path, CPU, quiet())
    assert train(recipe(steps), tmp_path, CPU, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert [part for part in said.splitlines() if "train.steps" in part] == ([line] if line else [])
