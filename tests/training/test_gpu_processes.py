"""Several processes on GPUs, their gradients by NCCL: the same run as one process's, and the same ends.

With a single GPU the processes share it, which NCCL allows since 2.30. Theirs are real command lines, since CUDA does
not survive a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from insertlm.core.processes import RESUME
from insertlm.storage import checkpoints

Launch = Callable[[int], list[dict[str, str]]]
Start = Callable[..., list["subprocess.Popen[str]"]]
RECIPE = Path(__file__).parents[2] / "recipes" / "star_easy" / "ilm.yaml"
SMALL = {
    "task.train": "2000",
    "task.validation": "50",
    "task.test": "200",
    "model.layers": "2",
    "model.width": "64",
    "model.heads": "2",
    "model.hidden": "128",
    "optim.learning_rate": "3e-3",
    "train.steps": "60",
    "train.log_every": "20",
    "train.validate_every": "60",
    "train.precision": "float32",
    "train.compile": "false",
}
SHARED = 23000  # the first NCCL that lets processes share a GPU


def nccl_version() -> int:
    """Of the library that is loaded, not of the one that torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def can_be_two() -> bool:
    return torch.cuda.device_count() > 1 or (torch.cuda.is_available() and nccl_version() >= SHARED)


pytestmark = pytest.mark.skipif(not can_be_two(), reason="two processes need two GPUs, or one and NCCL 2.30")


@pytest.fixture
def start(launch: Launch) -> Iterator[Start]:
    """Starts `insertlm` in so many processes."""
    running: list[subprocess.Popen[str]] = []

    def processes(world: int, *words: str) -> list[subprocess.Popen[str]]:
        alone = torch.cuda.device_count() == 1
        shared = {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"} if alone else {}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "insertlm", *words],
                env={**os.environ, **(variables if world > 1 else {}), **shared},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for variables in launch(world)
        ]
        running.extend(started)
        return started

    yield processes
    for process in running:
        process.kill()


def train(run: Path, **more: str) -> list[str]:
    changed = {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    return ["train", str(RECIPE), "--run", str(run), *(word for key in changed for word in (f"--{key}", changed[key]))]


def ends(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> tuple[list[int], list[str]]:
    """Their codes, and what they say of themselves."""
    said = [process.communicate(timeout=seconds)[1] for process in processes]
    lines = [line for words in said for line in words.splitlines() if line.startswith("insertlm:")]
    return [process.returncode for process in processes], lines


def losses(run: Path) -> list[float]:
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in logged if "loss" in line]


def wait_for(run: Path, step: int) -> None:
    """Until there is a checkpoint of this step or a later one."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        newest = checkpoints.latest(run / "checkpoints")
        if newest is not None and checkpoints.step_of(newest) >= step:
            return
        time.sleep(0.1)
    raise AssertionError("it does not train")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_and_evaluate_as_one(tmp_path: Path, start: Start, parallel: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert ends(start(1, *train(one))) == ([0], [])
    assert ends(start(2, *train(two, train__parallel=parallel))) == ([0, 0], [])
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    scores = []
    for world in (1, 2):
        out = tmp_path / f"scores-{world}.json"
        codes, lines = ends(start(world, "evaluate", str(two), "--out", str(out)))
        assert (codes, lines) == ([0] * world, [])
        scores.append(json.loads(out.read_bytes())["sequence_accuracy"])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sigterm_to_one_saves_for_all_and_one_process_goes_on(tmp_path: Path, start: Start, parallel: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = {"train__steps": "400", "train__save_every": "100", "train__validate_every": "0"}
    both = start(2, *train(two, train__parallel=parallel, **more))
    wait_for(two, 100)
    both[1].send_signal(signal.SIGTERM)
    codes, _ = ends(both)
    assert codes == [RESUME, RESUME]
    assert ends(start(1, *train(two, **more))) == ([0], [])
    assert ends(start(1, *train(one, **more))) == ([0], [])
    assert losses(two)[0] == pytest.approx(losses(one)[0], rel=1e-3)
    assert losses(two)[-1] == pytest.approx(losses(one)[-1], rel=0.2)  # rounding has been amplified for 400 steps


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_process_ends_the_other_within_a_minute(tmp_path: Path, start: Start, parallel: str) -> None:
    run = tmp_path / "run"
    more = {"train__steps": "100000", "train__save_every": "100", "train__validate_every": "0"}
    both = start(2, *train(run, train__parallel=parallel, **more))
    wait_for(run, 100)
    both[1].kill()
    codes, lines = ends(both, 60)
    assert codes == [RESUME, -signal.SIGKILL]
    assert len(lines) == 1
    assert "start it again to go on from the last checkpoint" in lines[0]
