"""The frontier: NLL and entropy of a model's texts over decoding settings.

A low NLL alone says little: it falls with the temperature until all texts are the same. A model is better where it has
a lower NLL at the same entropy. Points also hold the time that their texts took, for plots of NLL against time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from insertlm.evaluation.evaluator import Evaluator
from insertlm.evaluation.generation import TextGenerator, generate_once
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.nll import Summary, score_texts, summarise
from insertlm.inference.settings import DecodeConfig
from insertlm.recipe import override_decode

__all__ = ["Point", "grid_of_settings", "sweep"]


@dataclass(frozen=True)
class Point:
    """One combination of settings. settings: the keys that the sweep varies   seconds_per_text: of writing, not of
    scoring   empty: how many texts have no tokens   summary: of the others (None: all are empty)"""

    settings: dict[str, Any]
    seconds_per_text: float
    empty: int
    summary: Summary | None


def grid_of_settings(
    base: DecodeConfig, sweeps: Mapping[str, Sequence[str]]
) -> list[tuple[dict[str, Any], DecodeConfig]]:
    """All combinations of the values, which are given as text: the keys that vary, and the whole section."""
    grid = []
    for values in product(*sweeps.values()):
        overrides = [(f"decode.{key}", value) for key, value in zip(sweeps, values, strict=True)]
        settings = override_decode(base, overrides)
        grid.append(({key: getattr(settings, key) for key in sweeps}, settings))
    return grid


def sweep(
    generator: TextGenerator,
    grid: Sequence[tuple[dict[str, Any], DecodeConfig]],
    count: int,
    evaluator: Evaluator,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Write and score `count` texts for every point. The journal keeps texts and scores as they come, and what it has
    is not computed again. `progress` is called with the number of finished points."""
    points = []
    for number, (varied, settings) in enumerate(grid, start=1):
        written = generate_once(generator, settings, count, journal)
        scores = score_texts(written.texts, evaluator, journal)
        empty = scores.count(None)
        summary = None if empty == len(scores) else summarise(scores)
        points.append(Point(varied, written.seconds / count, empty, summary))
        progress(number)
    return points
