"""Runs that end by the clock, `train.minutes`: here a step takes a second and a half, and a validation a hundred."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from running import CPU, logged, quiet, recipe_of

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.recipe import OptimConfig, Recipe
from insertlm.storage import checkpoints
from insertlm.training import clock, loop
from insertlm.training.loop import train
from insertlm.training.optim import Ema
from insertlm.training.step import TrainStep

A_STEP = 1.5


def recipe(minutes: float = 1.0, cooldown: float = 0.5, **changes: Any) -> Recipe:
    plain = recipe_of(**{"steps": 1000, "minutes": minutes, "log_every": 1, "validate_every": 0, **changes})
    optim = msgspec.structs.replace(plain.optim, learning_rate=1.0, warmup=0, cooldown=cooldown)
    return msgspec.structs.replace(plain, optim=optim)


def slow_down(monkeypatch: pytest.MonkeyPatch, a_step: float = A_STEP) -> None:
    now = [1000.0]
    step, validate = TrainStep._count, loop._Run._validate

    def slow_step(self: TrainStep, number: int) -> None:
        now[0] += a_step
        step(self, number)

    def slow_validation(self: Any) -> float:
        now[0] += 100
        return validate(self)

    fake = SimpleNamespace(monotonic=lambda: now[0])
    for module in (clock, loop):
        monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(TrainStep, "_count", slow_step)
    monkeypatch.setattr(loop._Run, "_validate", slow_validation)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in logged(run) if "loss" in line]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("validate_every", [0, 7])
def test_a_run_ends_by_the_clock_with_its_cooldown_complete(tmp_path: Path, validate_every: int) -> None:
    assert train(recipe(validate_every=validate_every), tmp_path, CPU, quiet()) == 40  # not of 1,000 steps
    assert rates(tmp_path) == pytest.approx([min(1.0, (60 - A_STEP * step) / 30) for step in range(40)])
    [saved] = (tmp_path / "checkpoints").iterdir()
    assert (checkpoints.step_of(saved), checkpoints.seconds_of(saved)) == (40, 60.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(recipe(validate_every=validate_every), tmp_path, CPU, quiet()) == 40
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("slow")
def test_the_end_that_comes_first_counts(tmp_path: Path) -> None:
    """Here the steps, of which the clock would have allowed two more."""
    assert train(recipe(steps=38), tmp_path, CPU, quiet()) == 38
    by_steps = [(38 - step) / 19 for step in range(38)]
    assert rates(tmp_path) == pytest.approx([min(1.0, share) for share in by_steps])


@pytest.mark.usefixtures("slow")
def test_a_run_that_goes_on_has_the_minutes_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends, bit for bit, where an undisturbed one ends."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(recipe(), whole, CPU, quiet()) == 40
    plain = checkpoints.commit

    def killed(*what: Any, **more: Any) -> Path:
        place = plain(*what, **more)
        if checkpoints.step_of(place) in (14, 35):
            raise InsertlmError("that is enough")
        return place

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "commit", killed)
        for _ in range(2):
            with pytest.raises(InsertlmError, match="that is enough"):
                train(recipe(), parts, CPU, quiet())
    assert train(recipe(), parts, CPU, quiet()) == 40
    assert logged(parts) == logged(whole)
    ends = [checkpoints.load(run / "checkpoints" / "step-00000040").tensors for run in (whole, parts)]
    for part, named in ends[0].items():
        assert all(torch.equal(value, ends[1][part][name]) for name, value in named.items()), part


@pytest.mark.usefixtures("slow")
def test_the_average_has_the_last_steps_though_nobody_knew_that_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(Ema, "_update", lambda self, done, steps: counted.append((done, steps)))
    assert train(recipe(minutes=0.25), tmp_path, CPU, quiet()) == 10  # an update is due every four steps
    assert counted == [(4, 4), (8, 4), (10, 2)]


def test_weights_are_rounded_by_steps_or_clock() -> None:
    config = OptimConfig(rounded=0.25)
    assert [config.rounds(step, 100) for step in (74, 75)] == [False, True]
    assert [config.rounds(1, 100, elapsed) for elapsed in (0.7, 0.8)] == [False, True]
    assert not OptimConfig().rounds(99, 100, 0.99)


@pytest.mark.usefixtures("slow")
def test_minutes_may_change_but_not_below_what_is_done(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=200)
    assert train(recipe(), tmp_path, CPU, quiet()) == 40
    with pytest.raises(InsertlmError, match=r"train\.minutes is 0\.5, but \S+ has 1 minutes already; choose another"):
        train(recipe(minutes=0.5), tmp_path, CPU, quiet())
    assert train(recipe(minutes=1.5), tmp_path, CPU, console) == 60
    said = "train.minutes was 1: the rate had begun to fall, rises again and falls from minute 0.75 on"
    assert said in console.file.getvalue()  # type: ignore[attr-defined]


# --- Several processes


def slow_rank(run: Path, minutes: float, processes: Processes) -> tuple[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, A_STEP + processes.rank)
        return train(recipe(minutes, save_every=1000), run, processes, quiet()), processes.seconds


def test_processes_end_together_by_the_slowest_clock(
    tmp_path: Path, in_processes: Callable[[int, Callable[[Processes], Any]], list[Any]]
) -> None:
    # 18 and 6 steps of 2.5 seconds, and each time the one after which everyone knows.
    assert in_processes(2, partial(slow_rank, tmp_path, 0.75)) == [(19, 45.0)] * 2
    assert in_processes(2, partial(slow_rank, tmp_path, 1.0)) == [(26, 60.0)] * 2
    assert rates(tmp_path)[19:] == pytest.approx([0.5, 0.5, *(0.5 - 2.5 * step / 30 for step in range(1, 6))])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_ends_in_time_though_its_host_runs_ahead(tmp_path: Path) -> None:
    """By the real clock: a log line, which waits for the device, is due only after the end."""
    recipe = recipe_of(steps=10**6, minutes=0.05, log_every=10**6, save_every=10**6, validate_every=0)
    steps = train(recipe, tmp_path, Processes(torch.device("cuda")), quiet())
    [saved] = (tmp_path / "checkpoints").iterdir()
    assert checkpoints.step_of(saved) == steps
    assert checkpoints.seconds_of(saved) == pytest.approx(3.0, abs=0.2)
    [line] = logged(tmp_path)
    assert line["learning_rate"] == recipe.optim.rate(steps - 1, 10**6, 1.0)
