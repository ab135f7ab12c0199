"""What not knowing the lengths costs: a result beside one of a model that was told them, and one that had to guess.

The **gap** is a figure minus the same figure of the result that was told the lengths. With a second result, whose
lengths were guessed, the **share closed** is how much of the way from there to the told one is left behind: 1 means as
good as told, 0 no better than guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["Gap", "gaps", "read_result"]

# Where each figure is in a result of `evaluate infilling`.
_FIGURES = {
    "ΔNLL": ("against_the_truth", "change", "nll"),
    "ROUGE-1": ("fills", "overlap", "rouge1", "value"),
    "ROUGE-2": ("fills", "overlap", "rouge2", "value"),
    "ROUGE-L": ("fills", "overlap", "rougeL", "value"),
    "BLEU": ("fills", "overlap", "bleu"),
}


@dataclass(frozen=True)
class Gap:
    """share_closed None: no guessed result was given, or it is as good as the told one"""

    figure: str
    gap: float
    share_closed: float | None


def read_result(path: Path, texts: str, evaluator: str | None) -> dict[str, Any]:
    """A result of `evaluate infilling` for the same texts. texts: the key of the set"""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise InsertlmError(f"{path}: expected a JSON file of insertlm evaluate infilling") from error
    if not isinstance(record, dict) or record.get("texts") != texts or record.get("evaluator") != evaluator:
        what = "insertlm evaluate infilling for the same texts and evaluator"
        raise InsertlmError(f"{path}: expected a result of {what}")
    return record


def gaps(ours: Mapping[str, Any], told: Mapping[str, Any], guessed: Mapping[str, Any] | None) -> list[Gap]:
    """Of all figures that the results have."""
    found = []
    for name, path in _FIGURES.items():
        here, there = _at(ours, path), _at(told, path)
        if here is None or there is None:
            continue
        start = None if guessed is None else _at(guessed, path)
        share = None if start is None or start == there else (start - here) / (start - there)
        found.append(Gap(name, here - there, share))
    return found


def _at(record: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None
