"""Whatever goes wrong, all processes end, with one line and the same code."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from insertlm.cli.main import main
from insertlm.core import processes as distributed
from insertlm.core.processes import RESUME
from insertlm.data.order import Order
from insertlm.families.base import Losses
from insertlm.storage import checkpoints
from insertlm.training.step import TrainStep

Commands = Callable[[Sequence[str], dict[str, str]], Any]
Launch = Callable[[int], list[dict[str, str]]]
TRAIN = {"steps": 40, "batch_size": 8, "log_every": 5, "save_every": 10}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    star = {"degree": 2, "min_nodes": 3, "max_nodes": 4, "min_plan": 2, "nodes": 10, "train": 50, "validation": 10}
    tree = {
        "task": {"name": "star", **star},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "dropout": 0.1},
        "optim": {"learning_rate": 3e-3, "warmup": 10, "ema": 0.9, "ema_every": 4},
        "train": TRAIN,
        "decode": {"max_steps": 6},
    }
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(tree))
    return place


def train(recipe: Path, *more: str) -> list[str]:
    return ["train", str(recipe), "--run", str(recipe.parent / "run"), "--device", "cpu", *more]


def assert_all_end(ends: Sequence[tuple[int, list[str]]], code: int, line: str, speaker: int = 0) -> None:
    assert [end[0] for end in ends] == [code] * len(ends), ends
    lines = [(rank, said) for rank, end in enumerate(ends) for said in end[1] if said.startswith("insertlm:")]
    assert len(lines) == 1, lines
    assert lines[0][0] == speaker
    assert line in lines[0][1]


# --- Mistakes


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (["--train.batch_size", "9"],) * 2
        + ("train.batch_size 9 cannot be shared by 2 processes; expected a multiple",),
        (["--train.accumulate", "3"],) * 2 + ("2 processes of 3 pieces each; expected a multiple of 6",),
        ([], ["--train.seed", "2"], "process 1 has another recipe than process 0: seed: 2, not seed: 1"),
        (["--train.steps", "x"],) * 2 + ("--train.steps: expected int, got 'x'",),
        (["--nonsense"],) * 2 + ("unknown argument --nonsense",),
    ],
)
def test_mistakes_end_in_one_line_of_the_first_process(
    recipe: Path, commands: Commands, launch: Launch, first: list[str], second: list[str], line: str
) -> None:
    started = [
        commands(train(recipe, *more), variables) for more, variables in zip((first, second), launch(2), strict=True)
    ]
    assert_all_end([command.end() for command in started], 2, line)


def test_a_missing_rendezvous_is_said(recipe: Path, commands: Commands) -> None:
    started = [commands(train(recipe), {"WORLD_SIZE": "2", "RANK": str(rank)}) for rank in range(2)]
    assert_all_end([command.end() for command in started], 2, "MASTER_ADDR and MASTER_PORT not set; expected torchrun")


def test_processes_that_never_meet_say_so(
    recipe: Path, commands: Commands, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_MEET", timedelta(seconds=2))
    started = [commands(train(recipe), launch(2)[0])]
    assert_all_end([command.end() for command in started], 2, "cannot meet the other processes at 127.0.0.1:")


def test_a_mistake_of_one_process_ends_all(recipe: Path, commands: Commands, launch: Launch) -> None:
    a, b = launch(2)
    started = [commands(train(recipe), a), commands(train(recipe.with_name("none.yaml")), b)]
    line = "process 1 of 2: "
    assert_all_end([command.end() for command in started], 2, line, speaker=1)


def test_a_checkpoint_of_another_architecture_is_refused(recipe: Path, commands: Commands, launch: Launch) -> None:
    assert main(train(recipe, "--train.steps", "1")) == 0
    folder = recipe.parent / "run" / "checkpoints"
    state = checkpoints.load(folder / "step-00000001").tensors
    wide = {part: {name: torch.cat([x, x]) for name, x in named.items()} for part, named in state.items()}
    checkpoints.save(folder, 2, wide, keep=1)
    started = [commands(train(recipe), variables) for variables in launch(2)]
    assert_all_end([command.end() for command in started], 2, "a checkpoint of another architecture: ")
    started = [commands(train(recipe, "--train.seed", "2"), variables) for variables in launch(2)]
    assert_all_end([command.end() for command in started], 2, "holds a run of another recipe (train.seed is 1, not 2)")


# --- Signals


def wait_for(run: Path, step: int) -> None:
    """Until the log has this step."""
    place, end = run / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < end:
        lines = place.read_text().splitlines() if place.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines if line.endswith("}")):
            return
        time.sleep(0.01)
    raise AssertionError("it does not train")


def weights(run: Path) -> dict[str, Tensor]:
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    return checkpoints.load_part(newest, "weights")


def test_sigterm_saves_and_asks_to_be_started_again(recipe: Path, commands: Commands, launch: Launch) -> None:
    """The processes agree on the step, and what is started again ends where an undisturbed run does."""
    long = ["--train.steps", "150", "--train.save_every", "140"]
    started = [commands(train(recipe, *long), variables) for variables in launch(2)]
    run = recipe.parent / "run"
    wait_for(run, 5)
    os.kill(started[1].process.pid, signal.SIGTERM)
    assert_all_end([command.end() for command in started], RESUME, "asked to stop; run the same command again")
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    assert 5 <= checkpoints.step_of(newest) < 140
    assert [c.end()[0] for c in [commands(train(recipe, *long), variables) for variables in launch(2)]] == [0, 0]
    disturbed = weights(run)
    run.rename(recipe.parent / "disturbed")
    assert [c.end()[0] for c in [commands(train(recipe, *long), variables) for variables in launch(2)]] == [0, 0]
    assert all(torch.equal(x, disturbed[name]) for name, x in weights(run).items())


def test_sigterm_stops_one_process_too(recipe: Path, commands: Commands) -> None:
    started = commands(train(recipe, "--train.steps", "100000", "--train.save_every", "90000"), {})
    wait_for(recipe.parent / "run", 5)
    os.kill(started.process.pid, signal.SIGTERM)
    assert_all_end([started.end()], RESUME, "asked to stop; run the same command again")
    assert weights(recipe.parent / "run")


def test_ctrl_c_saves_and_says_how_to_go_on(recipe: Path, commands: Commands, launch: Launch) -> None:
    """One process alone, then two, of which a terminal tells both."""
    long = train(recipe, "--train.steps", "100000", "--train.save_every", "90000")
    for each in ([dict[str, str]()], launch(2)):
        started = [commands(long, variables) for variables in each]
        wait_for(recipe.parent / "run", 5)
        for command in started:
            os.kill(command.process.pid, signal.SIGINT)
        assert_all_end([command.end() for command in started], 130, "are saved; run the same command again to go on")
        saved = checkpoints.latest(recipe.parent / "run" / "checkpoints")
        assert saved is not None
        logged = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
        assert checkpoints.step_of(saved) == logged[-1]["step"]
        (recipe.parent / "run").rename(recipe.parent / f"run-{len(each)}")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others(recipe: Path, commands: Commands, launch: Launch, victim: int) -> None:
    started = [commands(train(recipe, "--train.steps", "100000"), variables) for variables in launch(2)]
    wait_for(recipe.parent / "run", 10)
    started[victim].process.kill()
    killed, other = started[victim].end(), started[1 - victim].end()
    assert killed[0] == -signal.SIGKILL
    assert_all_end([other], RESUME, "a process of this run has ended; start it again to go on")


def test_a_process_that_hangs_is_taken_for_dead(
    recipe: Path, commands: Commands, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_PATIENCE", timedelta(seconds=1.5))
    started = [commands(train(recipe, "--train.steps", "100000"), variables) for variables in launch(2)]
    wait_for(recipe.parent / "run", 10)
    os.kill(started[1].process.pid, signal.SIGSTOP)
    assert_all_end([started[0].end()], RESUME, "a process of this run has ended; start it again to go on")


def test_only_a_peer_that_is_gone_counts_as_lost() -> None:
    """Not whatever has to do with a connection, such as a tracker's."""
    assert not distributed._is_lost(RuntimeError("Connection to the tracker was refused"))
    assert distributed._is_lost(dist.DistNetworkError("the store is gone"))


def test_a_fault_of_the_program_shows_where_and_ends_all(
    recipe: Path, commands: Commands, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Losses:
        raise RuntimeError("Connection lost in thought")

    monkeypatch.setattr(TrainStep, "_eager_losses", broken)
    ends = [command.end() for command in [commands(train(recipe), variables) for variables in launch(2)]]
    assert_all_end(ends, 1, "RuntimeError: Connection lost in thought")
    assert any("in broken" in line for line in ends[0][1])


# --- Numbers


@pytest.mark.parametrize("step", [0, 13, 29])
def test_a_loss_that_is_no_number_is_named_with_its_step_and_examples(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    plain, calls = TrainStep._eager_losses, iter(range(100))

    def broken(self: TrainStep, *what: Any) -> Losses:
        losses = plain(self, *what)
        return losses._replace(total=losses.total * torch.nan) if next(calls) == step else losses

    monkeypatch.setattr(TrainStep, "_eager_losses", broken)
    assert main(train(recipe)) == 2
    examples = ", ".join(map(str, Order(50, 8, 1).batches(step, 1)[0][0]))
    said = capsys.readouterr().err
    assert f"the loss is not finite at step {step} (from 0), whose examples are {examples}; " in said
    good = f"step-000000{step // 10}0" if step >= 10 else "there is no checkpoint yet"
    assert good in said
    assert said.count("\n") == 1
