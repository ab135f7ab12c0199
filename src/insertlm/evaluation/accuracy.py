"""How good what a model writes is: one way to measure for all families, the task's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.decoding.trajectory import Trajectory
from insertlm.families.base import Family
from insertlm.tasks.base import Examples, Task
from insertlm.training.distributed import Processes

__all__ = ["accuracy", "generate"]


def generate(
    family: Family,
    prompts: Sequence[Prompt],
    settings: DecodeConfig,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
    processes: Processes | None = None,
) -> Iterator[Trajectory]:
    """Decode any number of prompts, `batch_size` at a time. `progress` is told how many are done.

    Several processes share the batches, which are those of one process, and all get all texts.
    """

    def write(first: int) -> list[Trajectory]:
        batch = prompts[first : first + batch_size]
        texts = family.decode(batch, settings)
        progress(first + len(batch))
        return texts

    starts = range(0, len(prompts), batch_size)
    yield from chain.from_iterable(map(write, starts) if processes is None else processes.map(write, starts))


def accuracy(task: Task, examples: Examples, written: Sequence[Sequence[int]]) -> dict[str, float]:
    """The task's scores of all texts, in percent: each the mean over the examples that have it."""
    values: dict[str, list[float]] = {}
    for example, text in zip(examples, written, strict=True):
        for name, value in task.scores(example, text).items():
            values.setdefault(name, []).append(value)
    return {name: 100 * sum(values[name]) / len(values[name]) for name in sorted(values)}
