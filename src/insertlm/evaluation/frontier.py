"""The frontier: NLL and entropy of what a model writes, over ways of decoding.

A low NLL alone says little, since it falls with the temperature until all texts are one; a model is better where it has
the same entropy at a lower NLL. Points know how long their writing took: time against NLL is the same sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from insertlm.evaluation.evaluator import Evaluator
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.nll import Summary, score_texts, summarise
from insertlm.evaluation.writing import Source, write_once
from insertlm.inference.settings import DecodeConfig
from insertlm.recipe import override_decode

__all__ = ["Point", "grid_of_settings", "sweep"]


@dataclass(frozen=True)
class Point:
    """One way of decoding. settings: the keys that vary over the sweep   seconds_per_text: of writing, not of scoring
    empty: texts without tokens   summary: of the others (None: there are none)"""

    settings: dict[str, Any]
    seconds_per_text: float
    empty: int
    summary: Summary | None


def grid_of_settings(
    base: DecodeConfig, sweeps: Mapping[str, Sequence[str]]
) -> list[tuple[dict[str, Any], DecodeConfig]]:
    """All combinations of the values, as texts: the keys that vary, and the whole section."""
    grid = []
    for values in product(*sweeps.values()):
        overrides = [(f"decode.{key}", value) for key, value in zip(sweeps, values, strict=True)]
        settings = override_decode(base, overrides)
        grid.append(({key: getattr(settings, key) for key in sweeps}, settings))
    return grid


def sweep(
    source: Source,
    grid: Sequence[tuple[dict[str, Any], DecodeConfig]],
    count: int,
    evaluator: Evaluator,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Write and score `count` texts for every point. Texts and scores are kept as they come; the journal's points cost
    nothing. `progress` is told how many points are done."""
    points = []
    for number, (varied, settings) in enumerate(grid, start=1):
        written = write_once(source, settings, count, journal)
        scores = score_texts(written.texts, evaluator, journal)
        empty = scores.count(None)
        summary = None if empty == len(scores) else summarise(scores)
        points.append(Point(varied, written.seconds / count, empty, summary))
        progress(number)
    return points
