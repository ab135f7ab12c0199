"""The plots of results: `plot accuracy` of tasks, `plot frontier | time | judge` of texts."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from insertlm.cli.common import short_names
from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.core.section import Count
from insertlm.tasks.registry import name_and_things

if TYPE_CHECKING:
    from insertlm.plots import Trace

__all__ = ["plot_accuracy", "plot_frontier", "plot_judge", "plot_time"]

_COMMANDS = {"points": "evaluate frontier", "rubrics": "evaluate judge", "sequence_accuracy": "evaluate RUN"}


def plot_frontier(args: Namespace) -> None:
    from insertlm.plots import frontier_figure, save

    sweeps = _read(args.files, "points", _Sweep)
    data = next((sweep.data for sweep in sweeps if sweep.data), None)
    point = (data.entropy, data.nll) if data else None
    save(frontier_figure(_traces(sweeps, "entropy"), _title_of_sweeps(sweeps), point), args.out)
    print(f"wrote {args.out}")


def plot_time(args: Namespace) -> None:
    from insertlm.plots import save, timing_figure

    sweeps = _read(args.files, "points", _Sweep)
    save(timing_figure(_traces(sweeps, "seconds"), _title_of_sweeps(sweeps)), args.out)
    print(f"wrote {args.out}")


def plot_judge(args: Namespace) -> None:
    from insertlm.plots import Judged, judge_figure, save, sized

    verdicts = _read(args.files, "rubrics", _Verdicts)
    models = []
    for each in verdicts:
        found = each.rubrics.items()
        models.append(Judged(each.label, {name: None if r.score is None else (r.score, r.error) for name, r in found}))
    counts = sized([each.count for each in verdicts], "texts of each model")
    save(judge_figure(models, f"{counts}, judged by {_model(verdicts[0].judge)}"), args.out)
    print(f"wrote {args.out}")


def plot_accuracy(args: Namespace) -> None:
    from insertlm.plots import Result, accuracy_figure, save, sized

    found = [_result(path, "sequence_accuracy", _Evaluation) for path in args.files]
    _refuse_to_mix(args.files, [each.split for each in found], "split", "on")
    name, things = next((each.about for each in found if each.about[0]), found[0].about)
    _refuse_to_mix(args.files, [each.about[0] or name for each in found], "task", "on")
    labels = _labels(found)
    results = [
        Result(label, each.sequence_accuracy, each.count, each.sizes)
        for label, each in zip(_distinct(labels, labels, args.files), found, strict=True)
    ]
    title = f"{name}: {sized([each.count for each in found], f'{found[0].split} {things}')}"
    save(accuracy_figure(results, title.removeprefix(": ")), args.out)
    print(f"wrote {args.out}")


# --- Accuracies


_Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]


# Files come from users, so their fields are checked; fields that a plot does not need are ignored.
class _Evaluation(msgspec.Struct):
    """The fields of a record that the plot needs. Older records have no family and no task. sizes: see _by_size"""

    model: str
    split: str
    count: Count
    sequence_accuracy: _Percent
    sizes: dict[tuple[int, int], _Percent]
    decode: dict[str, Any]
    family: str = ""
    task: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self.family.upper() or Path(self.model).name

    @property
    def about(self) -> tuple[str, str]:
        """The name of the task, if it is known, and what its examples are called."""
        return name_and_things(self.task or ({"name": "zebra"} if self.sizes else {}))


def _labels(found: Sequence[_Evaluation]) -> list[str]:
    """The family; the model, if the family has several; and the decoding settings that differ within the family."""
    labels = []
    for each, short in zip(found, short_names([each.model for each in found]), strict=True):
        kin = [other for other in found if other.name == each.name]
        model = f" ({short})" if len({other.model for other in kin}) > 1 else ""
        own = {key: value for key, value in each.decode.items() if any(other.decode.get(key) != value for other in kin)}
        told = [_in_words(key, value) for key, value in own.items() if value is not False]
        labels.append(", ".join([f"{each.name}{model}", *told]))
    return labels


def _in_words(key: str, value: Any) -> str:
    """A decoding setting."""
    if value is True:
        return key
    known = {"order": f"{value} order" if value in ("auto", "random") else f"by {value}", "max_steps": f"{value} steps"}
    return known.get(key, f"{key} {value}")


def _by_size(record: dict[str, Any]) -> dict[tuple[int, int], Any]:
    """For zebra puzzles: the accuracy by numbers of houses and attributes."""
    matches = ((re.fullmatch(r"sequence_accuracy_(\d)x(\d)", key), share) for key, share in record.items())
    return {(int(match[1]), int(match[2])): share for match, share in matches if match}


# --- Sweeps and judges


class _Summary(msgspec.Struct):
    nll: float
    entropy: float


class _Point(msgspec.Struct):
    """summary: None if all texts are empty"""

    settings: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]
    seconds_per_text: float
    summary: _Summary | None


class _Sweep(msgspec.Struct):
    label: str
    evaluator: str
    count: Count
    points: list[_Point]
    data: _Summary | None = None

    @property
    def name(self) -> tuple[str, ...]:
        """The names of its lines."""
        return self.label, *(key for point in self.points[:1] for key in point.settings)


class _Rubric(msgspec.Struct):
    score: float | None
    error: float


class _Verdicts(msgspec.Struct):
    label: str
    judge: str
    count: Count
    rubrics: Annotated[dict[str, _Rubric], msgspec.Meta(min_length=1)]

    @property
    def name(self) -> str:
        return self.label


def _title_of_sweeps(sweeps: Sequence[_Sweep]) -> str:
    from insertlm.plots import sized

    counts = sized([sweep.count for sweep in sweeps], "texts a point, written from nothing")
    return f"{counts}, scored by {_model(sweeps[0].evaluator)}"


def _model(file: str) -> str:
    """The name of a model that is in a file."""
    return Path(file).name.removesuffix(".gguf")


def _traces(sweeps: Sequence[_Sweep], x: str) -> list[Trace]:
    """Lines through points that differ only in the first key of a sweep; the name of the model has the other keys.
    x: entropy or seconds"""
    from insertlm.plots import Trace

    traces = []
    for sweep in sweeps:
        lines = defaultdict(list)
        for point in sweep.points:
            (key, value), *others = point.settings.items()
            if (found := point.summary) is not None:
                place = found.entropy if x == "entropy" else point.seconds_per_text
                fixed = ", ".join(f"{name} {other}" for name, other in others)
                model = f"{sweep.label}{f' ({fixed})' if fixed else ''}"
                lines[model, key].append((place, found.nll, f"{value}"))
        traces += [Trace(*names, *zip(*line, strict=True)) for names, line in lines.items()]
    if not traces:
        raise InsertlmError("nothing to draw: the texts of all points are empty")
    return traces


# --- Reading


_OfTexts = TypeVar("_OfTexts", _Sweep, _Verdicts)
_Result = TypeVar("_Result", _Sweep, _Verdicts, _Evaluation)


def _read(files: Sequence[Path], holds: str, kind: type[_OfTexts]) -> list[_OfTexts]:
    """The results of one kind of evaluation, all by one evaluator or judge, with distinct labels."""
    found = [_result(path, holds, kind) for path in files]
    by = "evaluator" if kind is _Sweep else "judge"
    _refuse_to_mix(files, [getattr(each, by) for each in found], by, "by")
    labels = _distinct([each.label for each in found], [each.name for each in found], files)
    return [msgspec.structs.replace(each, label=label) for each, label in zip(found, labels, strict=True)]


def _refuse_to_mix(files: Sequence[Path], found: Sequence[str], key: str, how: str) -> None:
    for path, other in zip(files, found, strict=True):
        if other != found[0]:
            raise InsertlmError(
                f"{path} was measured {how} {other}, {files[0]} {how} {found[0]}; expected results of one {key}"
            )


def _distinct(labels: Sequence[str], names: Sequence[Any], files: Sequence[Path]) -> list[str]:
    """The labels; where several results have one name, with the file in brackets."""
    return [
        f"{label} ({file})" if names.count(name) > 1 else label
        for label, name, file in zip(labels, names, short_names(files), strict=True)
    ]


def _result(path: Path, holds: str, kind: type[_Result]) -> _Result:
    expected = f"expected a result of insertlm {_COMMANDS[holds]}"
    try:
        record = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}; {expected}") from error
    except ValueError as error:
        raise InsertlmError(f"{path}: not JSON; {expected}") from error
    if not isinstance(record, dict) or holds not in record:
        raise InsertlmError(f"{path}: {expected}")
    try:
        return msgspec.convert({**record, "sizes": _by_size(record)}, kind)
    except msgspec.ValidationError as error:
        raise InsertlmError(f"{path}: {error}; {expected}") from error


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are not JSON but which Python would read."""
    raise ValueError(name)
