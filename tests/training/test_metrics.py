"""The metrics file of an interrupted run is that of an undisturbed one; trackers get every value."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.training.metrics import (
    Measure,
    MetricsLog,
    accuracies,
    open_tracker,
    read_metrics,
    training_seconds,
)


def record(step: int) -> dict[str, float | int | str]:
    return {"step": step, "loss": 1 / (step + 1), "phase": "train – é"}


def write(path: Path, resume_step: int | None, steps: range) -> None:
    with MetricsLog(path, resume_step) as log:
        for step in steps:
            log.write(record(step))


def lines(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# The file


def test_every_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as log:
        for step in range(3):
            log.write(record(step))
            assert lines(path) == [record(each) for each in range(step + 1)]


def test_resumed_equals_undisturbed_wherever_the_last_write_was_cut(tmp_path: Path) -> None:
    undisturbed, resumed = tmp_path / "undisturbed.jsonl", tmp_path / "resumed.jsonl"
    write(undisturbed, None, range(1, 9))
    whole = undisturbed.read_bytes()
    checkpointed = len(b"".join(whole.splitlines(keepends=True)[:5]))
    for cut in range(checkpointed, len(whole) + 1):
        resumed.write_bytes(whole[:cut])
        write(resumed, 5, range(6, 9))
        assert resumed.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.jsonl", "undisturbed.jsonl"]


def test_a_last_line_that_lacks_only_its_newline_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    MetricsLog(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_resume_drops_later_steps_and_keeps_lines_without_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"device": "cpu"}\n{"step": 0}\n{"step": 10}\n{"step": 9, "x": null}\n{"step": 11}\n')
    MetricsLog(path, 9).close()
    assert path.read_text() == '{"device": "cpu"}\n{"step": 0}\n{"step": 9, "x": null}\n'


def test_a_start_from_nothing_drops_what_a_run_without_checkpoint_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, None, range(1, 4))
    write(path, None, range(1, 3))
    assert lines(path) == [record(1), record(2)]


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 5, range(6, 7))
    assert lines(tmp_path / "metrics.jsonl") == [record(6)]


@pytest.mark.parametrize("bad", ["nonsense", "[1]", '{"step": "one"}', "", '{"step": 2'])
def test_a_bad_line_that_is_not_the_last_is_an_error_and_nothing_is_lost(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n'
    path.write_text(text)
    with pytest.raises(InsertlmError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        MetricsLog(path, 1)
    assert path.read_text() == text


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as log:
        log.write({"step": 1, "loss": math.nan, "high": math.inf, "low": -math.inf, "zero": -0.0, "word": "nan"})
    assert lines(path) == [{"step": 1, "loss": None, "high": None, "low": None, "zero": 0.0, "word": "nan"}]


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-320, 1.7976931348623157e308, 2**60]
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        for value in values:
            log.write({"value": value})
    assert [line["value"] for line in lines(tmp_path / "metrics.jsonl")] == values


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "metrics.jsonl"
    for resume_step in (None, 1):
        with pytest.raises(InsertlmError) as caught:
            MetricsLog(path, resume_step)
        assert str(caught.value) == f"cannot write {path}: No such file or directory"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full, a file on a full disk")
def test_a_full_disk_while_writing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    log._file.close()
    log._file = Path("/dev/full").open("ab")  # noqa: SIM115 (the log closes it)
    with pytest.raises(InsertlmError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        log.write(record(1))
    with pytest.raises(InsertlmError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        log.close()


# Reading back


def test_what_is_read_back(tmp_path: Path) -> None:
    """Also while a run is writing: the torn last line is left out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 5, "loss": 1.5, "steps_per_second": 2.0}\n{"step": 5, "validation_sequence_accuracy": 12.5, "x": 1}\n'
        '{"step": 6, "loss": null, "steps_per_second": null}\n{"step": 7, "lo'
    )
    measures = read_metrics(path)
    assert measures == [Measure(5, 2.0, 1.5), Measure(5, validation_sequence_accuracy=12.5), Measure(6)]
    assert accuracies(measures) == [(5, 12.5)]


def test_metrics_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InsertlmError) as caught:
        read_metrics(tmp_path / "metrics.jsonl")
    assert str(caught.value) == f"{tmp_path / 'metrics.jsonl'}: no such file; expected the metrics of a run"
    with pytest.raises(InsertlmError) as caught:
        read_metrics(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"


def test_training_time_is_that_of_the_steps_between_lines() -> None:
    measures = [Measure(10, 5.0), Measure(12, None, 50.0), Measure(20, 10.0), Measure(24, 4.0)]
    assert training_seconds(measures, [0, 5, 10, 12, 20, 24]) == pytest.approx([0, 1, 2, 2.2, 3, 4])
    assert training_seconds(measures, [30]) == pytest.approx([4])
    assert training_seconds([Measure(3, None, 1.0)], [3]) == [0]


def test_compilation_is_not_training_time() -> None:
    """Neither at the start nor where a run was resumed: such a line counts as three times the usual one."""
    usual = [Measure(step, 10.0) for step in range(100, 2001, 100)]
    slow = [Measure(measure.step, 0.5 if measure.step in (100, 1100) else 10.0) for measure in usual]
    assert training_seconds(usual, [2000]) == pytest.approx([200])
    assert training_seconds(slow, [2000]) == pytest.approx([240])


# Trackers


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    tracker = open_tracker("none", tmp_path, {})
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def scalars(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard itself would draw."""
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker("tensorboard", tmp_path, {"train": {"steps": 3}})
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step**2, "rate": 0.5})
    tracker.close()
    assert scalars(tmp_path) == [(1, 1.0), (2, 0.25), (3, pytest.approx(1 / 9))]


def test_tensorboard_hides_what_a_resumed_run_draws_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3))):
        tracker = open_tracker("tensorboard", tmp_path, {}, resume_step)
        for step in steps:
            tracker.log(step, {"loss": float(step)})
        tracker.close()
    assert scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tensorboard_that_cannot_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(InsertlmError, match=r"cannot write .*tensorboard: "):
        open_tracker("tensorboard", tmp_path, {})


@pytest.mark.parametrize(
    ("kind", "module", "message"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tracking to TensorBoard needs tensorboard: pip install"),
        ("wandb", "wandb", "tracking to W&B needs wandb: pip install"),
    ],
)
def test_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    with pytest.raises(InsertlmError) as caught:
        open_tracker(kind, tmp_path, {})
    assert str(caught.value) == f"{message} 'insertlm[log]'"


def test_a_folder_of_earlier_runs_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # an importable, empty namespace package
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InsertlmError, match="needs wandb"):
        open_tracker("wandb", tmp_path, {})
    sys.modules.pop("wandb", None)


class WandbError(Exception):
    pass


class WandbRun:
    """A stand-in for W&B's run: the tests have neither its package nor its service. It checks how we call it."""

    def __init__(self, project: str, name: str, dir: str, config: dict[str, Any]) -> None:
        if config.get("refuse"):
            raise WandbError("no API key:\nrun `wandb login`")
        self.calls: list[Any] = [(project, name, dir, config)]

    def log(self, data: dict[str, Any], step: int) -> None:
        self.calls.append((step, data))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """Puts a stub in the place of the wandb package; returns the runs that are started."""
    runs: list[WandbRun] = []

    def init(**arguments: Any) -> WandbRun:
        runs.append(WandbRun(**arguments))
        return runs[-1]

    module: Any = ModuleType("wandb")
    module.init, module.Error = init, WandbError
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_gets_the_recipe_and_every_value(tmp_path: Path, wandb: list[WandbRun]) -> None:
    tracker = open_tracker("wandb", tmp_path / "star", {"seed": 1})
    tracker.log(5, {"loss": 0.5})
    tracker.close()
    folder = str(tmp_path / "star")
    assert [run.calls for run in wandb] == [[("insertlm", "star", folder, {"seed": 1}), (5, {"loss": 0.5}), "finish"]]


def test_wandb_that_does_not_start(tmp_path: Path, wandb: list[WandbRun]) -> None:
    with pytest.raises(InsertlmError) as caught:
        open_tracker("wandb", tmp_path, {"refuse": True})
    assert str(caught.value) == "W&B did not start: no API key: run `wandb login`"
    assert wandb == []
