"""How often what a model writes is right. The task scores the texts, so all families are measured in one way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from insertlm.core.processes import Processes
from insertlm.families.base import Family
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.tasks.base import Examples, Task

__all__ = ["Scores", "accuracy", "evaluate"]


def accuracy(task: Task, examples: Examples, written: Sequence[Sequence[int]]) -> dict[str, float]:
    """The mean of each of the task's scores, in percent, over the examples that have this score."""
    values: dict[str, list[float]] = {}
    for example, text in zip(examples, written, strict=True):
        for name, value in task.scores(example, text).items():
            values.setdefault(name, []).append(value)
    return {name: 100 * sum(values[name]) / len(values[name]) for name in sorted(values)}


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent, the numbers of examples and of tokens written, and how long the writing took.

    others: accuracies that only some tasks have
    """

    count: int
    sequence_accuracy: float
    token_accuracy: float
    tokens: int
    seconds: float
    others: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def record(self) -> dict[str, float]:
        """All of it as one flat dictionary."""
        return {
            **{part.name: getattr(self, part.name) for part in fields(self) if part.name != "others"},
            **self.others,
        }


def evaluate(
    family: Family,
    task: Task,
    examples: Examples,
    settings: DecodeConfig,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
    processes: Processes | None = None,
) -> Scores:
    """Write a text for every example and score it. Sampling depends on the number of the example alone. Several
    processes share the work, and all of them get the result."""
    prompts = [Prompt(example.prefix, number) for number, example in enumerate(examples)]
    # Only writing is timed; scoring depends on the task and says nothing about the model.
    start = time.perf_counter()
    paths = generate(family, prompts, settings, batch_size, progress, processes)
    written = [trajectory.ids for trajectory in paths]
    seconds = time.perf_counter() - start
    shares = accuracy(task, examples, written)
    exact, token = shares.pop("sequence_accuracy"), shares.pop("token_accuracy")
    return Scores(len(examples), exact, token, sum(map(len, written)), seconds, shares)
