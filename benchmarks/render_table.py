"""Records of star_table.py as Markdown tables, with the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = ["markdown"]

Record = Mapping[str, Any]

TASKS = ("star-easy", "star-medium", "star-hard")
NAMES = {"armo": "ARM, oracle order", "arm": "ARM", "mdm": "MDM", "it": "IT", "ilm": "ILM"}
# Table 1 of the paper: sequence and token accuracy by task, apparently of one run each.
PAPER = {
    "armo": {"star-easy": (100.0, 100.0)},
    "arm": {"star-easy": (32.3, 81.7), "star-medium": (75.0, 81.4), "star-hard": (23.0, 43.2)},
    "mdm": {"star-easy": (100.0, 100.0), "star-medium": (36.5, 90.6), "star-hard": (21.0, 54.9)},
    "it": {"star-easy": (35.2, 98.2), "star-medium": (22.1, 80.9), "star-hard": (17.5, 79.9)},
    "ilm": {"star-easy": (100.0, 100.0), "star-medium": (100.0, 100.0), "star-hard": (99.1, 99.7)},
}
PUBLISHED_WAYS = ("", "order random", "stop_threshold 0.5")  # the decoding settings closest to the paper's
COLUMNS = "task | model | weights | decoding | rate | exact match | paper | token accuracy | paper | seeds | minutes"


class _Setting(NamedTuple):
    """The settings that all rows of a table have in common."""

    preset: str
    graphs: int
    steps: int
    batch_size: int
    split: str

    def __str__(self) -> str:
        data = f"{self.graphs:,} training graphs, {self.steps:,} steps of {self.batch_size}"
        return f"The `{self.preset}` preset, {data}, {self.split} split"


class _Row(NamedTuple):
    """What all records of a row have in common; their seeds differ."""

    task: str
    family: str
    decoding: str
    rate: float


_Key = TypeVar("_Key", _Setting, _Row)


def markdown(records: Sequence[Record]) -> str:
    """A table for every setting."""
    settings = _grouped(records, _Setting)
    return "\n\n".join(_table(setting, theirs) for setting, theirs in settings.items())


def _table(setting: _Setting, records: Sequence[Record]) -> str:
    rows = _grouped(records, _Row)
    order = sorted(
        rows, key=lambda row: (TASKS.index(row.task), list(NAMES).index(row.family))
    )  # settings keep their order
    made_with = sorted({_made_with(record) for record in records})
    lines = [f"{setting} ({'; '.join(made_with)}):", "", f"| {COLUMNS} |", "|---" * (COLUMNS.count("|") + 1) + "|"]
    return "\n".join([*lines, *(_line(row, rows[row]) for row in order)])


def _made_with(record: Record) -> str:
    commit, dash, dirty = (record["commit"] or "").partition("-")
    known = [f"commit {commit[:10]}{dash}{dirty}"] if commit else []
    return ", ".join([record["device"], f"torch {record['torch']}", *known])


def _line(row: _Row, records: Sequence[Record]) -> str:
    published = PAPER[row.family].get(row.task) if row.decoding in PUBLISHED_WAYS else None
    exact, token = (f"{number:.1f}" for number in published) if published else ("–", "–")
    cells = [
        row.task,
        NAMES[row.family],
        f"{records[0]['parameters'] / 1e6:.1f}M",
        row.decoding or "–",
        f"{row.rate:g}",
        _spread([record["sequence_accuracy"] for record in records]),
        exact,
        _spread([record["token_accuracy"] for record in records]),
        token,
        ", ".join(str(record["seed"]) for record in records),
        f"{statistics.mean(record['training_minutes'] for record in records):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    """Mean and, if there are several, standard deviation."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def _grouped(records: Sequence[Record], kind: type[_Key]) -> dict[_Key, list[Record]]:
    """Records grouped by the fields of `kind`."""
    groups: dict[_Key, list[Record]] = defaultdict(list)
    for record in records:
        groups[kind(*(record[field] for field in kind._fields))].append(record)
    return groups
