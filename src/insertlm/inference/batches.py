"""Any number of prompts, decoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from insertlm.core.processes import Processes
from insertlm.inference.engine import Author
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory

__all__ = ["generate"]


def generate(
    family: Author,
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
