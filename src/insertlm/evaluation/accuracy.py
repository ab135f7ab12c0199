"""How good what a model writes is: one way to measure for all families, the task's."""

from __future__ import annotations

from collections.abc import Sequence

from insertlm.tasks.base import Examples, Task

__all__ = ["accuracy"]


def accuracy(task: Task, examples: Examples, written: Sequence[Sequence[int]]) -> dict[str, float]:
    """The task's scores of all texts, in percent: each the mean over the examples that have it."""
    values: dict[str, list[float]] = {}
    for example, text in zip(examples, written, strict=True):
        for name, value in task.scores(example, text).items():
            values.setdefault(name, []).append(value)
    return {name: 100 * sum(values[name]) / len(values[name]) for name in sorted(values)}
