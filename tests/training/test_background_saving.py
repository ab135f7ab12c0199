"""Checkpoints are made in the background, by all processes, and only good ones stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.storage import checkpoints
from insertlm.training import run_folder
from insertlm.training.run_folder import locked
from insertlm.training.saving import Saver

ONE = Processes(torch.device("cpu"))
InProcesses = Callable[[int, Callable[[Processes], Any]], list[Any]]
# --- In the background


def test_training_goes_on_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is written is the state of the moment, whatever happens to the weights meanwhile."""
    plain, go = checkpoints.write, Event()

    def slow(*what: Any, **more: Any) -> checkpoints.Files:
        go.wait()
        return plain(*what, **more)

    monkeypatch.setattr(checkpoints, "write", slow)
    weights = torch.arange(4.0)
    saver = Saver(tmp_path, ONE, keep=1)
    with saver.finishing():
        saver.save(1, {"weights": {"w": weights}})
        weights.zero_()
        saver.check()
        assert checkpoints.latest(tmp_path) is None
        go.set()
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert torch.equal(checkpoints.load_part(newest, "weights")["w"], torch.arange(4.0))


def fails(folder: Path, processes: Processes) -> str:
    """The second process's disk is full at the second save."""
    saver = Saver(folder, processes, keep=1)
    saver.save(1, {"weights": {str(processes.rank): torch.ones(3)}})
    saver.wait()
    processes.gather(None)
    with pytest.MonkeyPatch.context() as patch:
        if processes.rank == 1:
            patch.setattr(checkpoints, "write", full)
        try:
            saver.save(2, {"weights": {str(processes.rank): torch.ones(3)}})
            saver.wait()
        except InsertlmError as error:
            return str(error)
    return ""


def full(*what: Any) -> checkpoints.Files:
    raise InsertlmError("cannot write checkpoint: No space left on device")


def test_a_full_disk_of_one_process_leaves_the_last_good_checkpoint(tmp_path: Path, in_processes: InProcesses) -> None:
    said = in_processes(2, partial(fails, tmp_path))
    assert all("No space left" in line for line in said)
    newest = checkpoints.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000001"
    assert checkpoints.load_part(newest, "weights").keys() == {"0", "1"}


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    saver = Saver(tmp_path, ONE, keep=1)
    saver.save(1, {"weights": {"w": torch.ones(2)}})
    saver.save(2, {"weights": {"w": torch.tensor([1.0, torch.nan])}})
    with pytest.raises(
        InsertlmError, match=r"w is not finite after step 2; the last good checkpoint is .*step-00000001"
    ):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# --- Which are kept


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    saver = Saver(tmp_path, ONE, keep=2, keep_best=True)
    for step, score in enumerate([1.0, 5.0, None, 3.0, None, 5.0, None, None]):
        saver.save(step, {"weights": {"w": torch.ones(2)}}, score)
        saver.wait()
        if step == 4:
            assert sorted(map(checkpoints.step_of, tmp_path.iterdir())) == [1, 3, 4]
    assert sorted(map(checkpoints.step_of, tmp_path.iterdir())) == [5, 6, 7]
    best = checkpoints.best(tmp_path)
    assert best is not None
    assert best.name == "step-00000005"


# --- One at a time


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_LOCK_PATIENCE", 0.1)
    with locked(tmp_path), pytest.raises(InsertlmError, match="another process trains in"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
