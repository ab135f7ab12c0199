"""Exact match and token accuracy: the one metric for all families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Trajectory
from insertlm.families.base import Family
from insertlm.tasks.base import Examples

__all__ = ["accuracy", "generate"]


def generate(
    family: Family,
    prompts: Sequence[Prompt],
    settings: DecodeConfig,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Trajectory]:
    """Decode any number of prompts, `batch_size` at a time. `progress` is told how many are done."""
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        yield from family.decode(batch, settings)
        progress(first + len(batch))


def accuracy(examples: Examples, written: Sequence[Sequence[int]]) -> dict[str, float]:
    """Shares in percent.

    sequence: the written text is the target, token for token and in length
    token: share of target positions that hold the right token, averaged over examples; a text that is too short misses
    the rest, and one that is too long is no better for it
    """
    exact, hits = 0, 0.0
    for (_, target), text in zip(examples, written, strict=True):
        exact += list(text) == target
        hits += sum(a == b for a, b in zip(target, text, strict=False)) / len(target)
    return {"sequence_accuracy": 100 * exact / len(examples), "token_accuracy": 100 * hits / len(examples)}
