"""The commands that draw what evaluations of texts found: `plot frontier | time | judge`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.errors import InsertlmError
from insertlm.files import reason

if TYPE_CHECKING:
    from insertlm.plots import Trace

__all__ = ["plot_frontier", "plot_judge", "plot_time"]

_FAMILIAR = {"points": "evaluate frontier", "rubrics": "evaluate judge"}


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


def _read(files: Sequence[Path], holds: str, by: str) -> list[dict[str, Any]]:
    """The records of one kind of evaluation, by one evaluator or judge, with labels that tell them apart."""
    records = [_record(path, holds) for path in files]
    for path, record in zip(files, records, strict=True):
        if record[by] != records[0][by]:
            raise InsertlmError(
                f"{path} was measured by {record[by]}, {files[0]} by {records[0][by]}; expected results of one {by}"
            )
    names = [_name(record) for record in records]
    for path, record, name in zip(files, records, names, strict=True):
        if names.count(name) > 1:
            record["label"] = f"{record['label']} ({path})"
    return records


def _name(record: dict[str, Any]) -> tuple[str, ...]:
    """What its lines are called: the label and, of a sweep, the keys."""
    return record["label"], *(key for point in record.get("points", [])[:1] for key in point["settings"])


def _record(path: Path, holds: str) -> dict[str, Any]:
    expected = f"expected a result of insertlm {_FAMILIAR[holds]}"
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}; {expected}") from error
    except ValueError as error:
        raise InsertlmError(f"{path}: not JSON; {expected}") from error
    if not isinstance(record, dict) or holds not in record:
        raise InsertlmError(f"{path}: {expected}")
    return record
