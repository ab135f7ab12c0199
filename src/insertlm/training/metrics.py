"""What a run reports while it trains: a JSON-lines file, which can be read back, and TensorBoard or W&B if asked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec
import numpy as np

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, write_atomically, writing

__all__ = [
    "Measure",
    "MetricsLog",
    "Tracker",
    "TrackerKind",
    "accuracies",
    "losses",
    "open_tracker",
    "read_metrics",
    "training_seconds",
    "validation_losses",
]

_SLOWEST = 3.0  # times the median: a line that took longer was not training alone

TrackerKind = Literal["none", "tensorboard", "wandb"]


class MetricsLog:
    """`metrics.jsonl`, one JSON object per line. A killed run that goes on leaves the file of an undisturbed one.

    (A run that is asked to stop has a line and a checkpoint where it stopped, and the next mean begins there.)

    resume_step: the step of the checkpoint that training goes on from. Lines of later steps are dropped: the run wrote
    them before it was killed and will write them again. None: a fresh start, all lines are dropped.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        with writing(path):
            write_atomically(path, b"" if resume_step is None else _lines_until(path, resume_step))
            # Unlike the rest of a run folder it grows in place: replacing it at every line would cost too much.
            self._file = path.open("ab")

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Append one line and hand it to the system, so that a killed process loses none."""
        # NaN and Infinity, which json writes by default, are not JSON: jq, JavaScript and most strict readers refuse
        # the file because of one diverged loss. null reads everywhere, and as a missing value in tables.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with writing(self._path):
            self._file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):  # it flushes what a failed write left in the buffer
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Measure(msgspec.Struct, frozen=True):
    """The keys of a line that are read back. A line without a step counts as one before the first.

    steps_per_second: since the last line with this key, or since the checkpoint that training went on from
    """

    step: int = -1
    steps_per_second: float | None = None
    loss: float | None = None
    validation_loss: float | None = None
    validation_sequence_accuracy: float | None = None


def read_metrics(path: Path) -> list[Measure]:
    """The lines of a `metrics.jsonl`, even while a run writes it."""
    try:
        return [measure for _, measure in _whole_lines(path)]
    except FileNotFoundError as error:
        raise InsertlmError(f"{path}: no such file; expected the metrics of a run") from error
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error


def accuracies(measures: Iterable[Measure]) -> list[tuple[int, float]]:
    """Step and sequence accuracy in percent, of each validation."""
    found = ((measure.step, measure.validation_sequence_accuracy) for measure in measures)
    return [(step, share) for step, share in found if share is not None]


def validation_losses(measures: Iterable[Measure]) -> list[tuple[int, float]]:
    """Step and loss of each validation, of tasks without right answers."""
    found = ((measure.step, measure.validation_loss) for measure in measures)
    return [(step, loss) for step, loss in found if loss is not None]


def losses(measures: Iterable[Measure]) -> list[tuple[int, float]]:
    """Step and mean training loss of each line."""
    found = ((measure.step, measure.loss) for measure in measures)
    return [(step, loss) for step, loss in found if loss is not None]


def training_seconds(measures: Sequence[Measure], steps: Sequence[int]) -> list[float]:
    """How long training had taken at each of these steps, without validation and saving.

    Compilation, or a machine that sleeps, makes a line stand out; such a line counts as `_SLOWEST` times the median. So
    a run that was resumed took as long as one that was not.
    """
    timed = [(measure.step, 1 / measure.steps_per_second) for measure in measures if measure.steps_per_second]
    most = _SLOWEST * statistics.median(seconds for _, seconds in timed) if timed else 0.0
    ends = [0, *(step for step, _ in timed)]
    spent = [(b - a) * min(seconds, most) for (a, b), (_, seconds) in zip(pairwise(ends), timed, strict=True)]
    seconds: list[float] = np.interp(steps, ends, np.cumsum([0.0, *spent])).tolist()
    return seconds


def _lines_until(path: Path, step: int) -> bytes:
    """The whole lines of the file up to `step`."""
    lines = _whole_lines(path) if path.exists() else ()
    return b"".join(line + b"\n" for line, measure in lines if measure.step <= step)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, Measure]]:
    # A kill can tear only the last line. A torn one is never valid JSON, because the last `}` closes the first `{`.
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield line, msgspec.json.decode(line, type=Measure)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number < len(lines):
                raise InsertlmError(f"{path}, line {number}: expected a JSON object with a step: {error}") from error


class Tracker(Protocol):
    """A place outside the run folder's own log where curves are drawn."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_tracker(kind: TrackerKind, folder: Path, config: Mapping[str, Any], resume_step: int | None = None) -> Tracker:
    """Start tracking the run in `folder`. config: the whole recipe, shown beside the curves   resume_step: TensorBoard
    hides what was drawn beyond it before the run was interrupted; in W&B a resumed run is a new one of the same name
    """
    if kind == "tensorboard":
        return _TensorBoard(folder, config, resume_step)
    if kind == "wandb":
        return _WeightsAndBiases(folder, config)
    return _Silent()


class _Silent:
    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InsertlmError("tracking to TensorBoard needs tensorboard: pip install 'insertlm[log]'") from error
        self._place = folder / "tensorboard"
        purge = None if resume_step is None else resume_step + 1
        with writing(self._place):
            self._writer = SummaryWriter(str(self._place), purge_step=purge)
            self._writer.add_text("recipe", f"```\n{json.dumps(dict(config), indent=2, default=str)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with writing(self._place):  # its writer thread hands a full disk's error to a later call
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with writing(self._place):
            self._writer.close()


class _WeightsAndBiases:
    """A run of the W&B project `insertlm`, named like the folder; local files in `RUN/wandb`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            # By name: in a folder that has a `wandb` folder of earlier runs, plain `import wandb` would succeed.
            from wandb import Error, init
        except ImportError as error:
            raise InsertlmError("tracking to W&B needs wandb: pip install 'insertlm[log]'") from error
        try:
            self._run = init(project="insertlm", name=folder.name, dir=str(folder), config=dict(config))
        except Error as error:
            raise InsertlmError(f"W&B did not start: {' '.join(str(error).split())}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
