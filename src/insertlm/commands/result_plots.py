"""The commands that draw what evaluations found: `plot accuracy` of tasks, `plot frontier | time | judge` of texts."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from insertlm.errors import InsertlmError
from insertlm.files import reason
from insertlm.section import Count

if TYPE_CHECKING:
    from insertlm.plots import Trace

__all__ = ["plot_accuracy", "plot_frontier", "plot_judge", "plot_time"]

_FAMILIAR = {"points": "evaluate frontier", "rubrics": "evaluate judge", "sequence_accuracy": "evaluate RUN"}


def plot_frontier(args: Namespace) -> None:
    from insertlm.plots import frontier_figure, save

    records = _read(args.files, "points", "evaluator")
    data = next((found for record in records if (found := record.get("data"))), None)
    point = (data["entropy"], data["nll"]) if data else None
    save(frontier_figure(_traces(records, "entropy"), point), args.out)
    print(f"wrote {args.out}")


def plot_time(args: Namespace) -> None:
    from insertlm.plots import save, timing_figure

    save(timing_figure(_traces(_read(args.files, "points", "evaluator"), "seconds")), args.out)
    print(f"wrote {args.out}")


def plot_judge(args: Namespace) -> None:
    from insertlm.plots import Judged, judge_figure, save

    models = []
    for record in _read(args.files, "rubrics", "judge"):
        rubrics = record["rubrics"].items()
        scores = {name: None if found["score"] is None else (found["score"], found["error"]) for name, found in rubrics}
        models.append(Judged(record["label"], scores))
    save(judge_figure(models), args.out)
    print(f"wrote {args.out}")


def plot_accuracy(args: Namespace) -> None:
    from insertlm.plots import Result, accuracy_figure, save

    records = [_record(path, "sequence_accuracy") for path in args.files]
    found = [_evaluation(path, record) for path, record in zip(args.files, records, strict=True)]
    _refuse_to_mix(args.files, records, "split", "on")
    labels = [_label(each, found) for each in found]
    results = [
        Result(label, each.sequence_accuracy, each.count, each.sizes)
        for label, each in zip(_told_apart(labels, labels, args.files), found, strict=True)
    ]
    save(accuracy_figure(results), args.out)
    print(f"wrote {args.out}")


# --- Accuracies


_Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]


class _Evaluation(msgspec.Struct):
    """What a picture needs of a record; older ones do not tell the family. sizes: see _by_size"""

    model: str
    split: str
    count: Count
    sequence_accuracy: _Percent
    sizes: dict[tuple[int, int], _Percent]
    decode: dict[str, Any]
    family: str = ""

    @property
    def name(self) -> str:
        return self.family.upper() or self.model


def _evaluation(path: Path, record: dict[str, Any]) -> _Evaluation:
    try:
        return msgspec.convert({**record, "sizes": _by_size(record)}, _Evaluation)
    except msgspec.ValidationError as error:
        raise InsertlmError(f"{path}: {error}; {_expected('sequence_accuracy')}") from error


def _label(each: _Evaluation, found: Sequence[_Evaluation]) -> str:
    """The family, the model if the family has several, and what was decoded otherwise than by others of the family."""
    kin = [other for other in found if other.name == each.name]
    model = f" ({each.model})" if len({other.model for other in kin}) > 1 else ""
    own = {key: value for key, value in each.decode.items() if any(other.decode.get(key) != value for other in kin)}
    told = [key if value is True else f"{key} {value}" for key, value in own.items() if value is not False]
    return ", ".join([f"{each.name}{model}", *told])


def _by_size(record: dict[str, Any]) -> dict[tuple[int, int], Any]:
    """Of zebra puzzles: the accuracy by houses and attributes."""
    matches = ((re.fullmatch(r"sequence_accuracy_(\d)x(\d)", key), share) for key, share in record.items())
    return {(int(match[1]), int(match[2])): share for match, share in matches if match}


# --- Sweeps


def _traces(records: Sequence[dict[str, Any]], x: str) -> list[Trace]:
    """A line through points that differ in the first key of a sweep only; its label tells the others. x: entropy or
    seconds"""
    from insertlm.plots import Trace

    traces = []
    for record in records:
        lines = defaultdict(list)
        for point in record["points"]:
            (key, value), *others = point["settings"].items()
            if (found := point["summary"]) is not None:
                place = found["entropy"] if x == "entropy" else point["seconds_per_text"]
                fixed = ", ".join(f"{name} {other}" for name, other in others)
                label = f"{record['label']}{f' ({fixed})' if fixed else ''}, {key}"
                lines[label].append((place, found["nll"], f"{value}"))
        traces += [Trace(label, *zip(*line, strict=True)) for label, line in lines.items()]
    if not traces:
        raise InsertlmError("nothing to draw: all texts of all points are empty")
    return traces


# --- Reading


def _read(files: Sequence[Path], holds: str, by: str) -> list[dict[str, Any]]:
    """The records of one kind of evaluation, by one evaluator or judge, with labels that tell them apart."""
    records = [_record(path, holds) for path in files]
    _refuse_to_mix(files, records, by, "by")
    labels = _told_apart([record["label"] for record in records], [_name(record) for record in records], files)
    return [{**record, "label": label} for record, label in zip(records, labels, strict=True)]


def _refuse_to_mix(files: Sequence[Path], records: Sequence[dict[str, Any]], key: str, how: str) -> None:
    first = records[0].get(key)
    for path, record in zip(files, records, strict=True):
        if (other := record.get(key)) != first:
            raise InsertlmError(
                f"{path} was measured {how} {other}, {files[0]} {how} {first}; expected results of one {key}"
            )


def _told_apart(labels: Sequence[str], names: Sequence[Any], files: Sequence[Path]) -> list[str]:
    """With the file behind a label whose name is that of another, too."""
    return [
        f"{label} ({path})" if names.count(name) > 1 else label
        for label, name, path in zip(labels, names, files, strict=True)
    ]


def _name(record: dict[str, Any]) -> tuple[str, ...]:
    """What its lines are called: the label and, of a sweep, the keys."""
    return record["label"], *(key for point in record.get("points", [])[:1] for key in point["settings"])


def _record(path: Path, holds: str) -> dict[str, Any]:
    expected = _expected(holds)
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}; {expected}") from error
    except ValueError as error:
        raise InsertlmError(f"{path}: not JSON; {expected}") from error
    if not isinstance(record, dict) or holds not in record:
        raise InsertlmError(f"{path}: {expected}")
    return record


def _expected(holds: str) -> str:
    return f"expected a result of insertlm {_FAMILIAR[holds]}"
