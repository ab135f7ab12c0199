"""An evaluation with everything needed to trust and repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from insertlm.core.processes import Processes
from insertlm.core.version import VERSION
from insertlm.evaluation.accuracy import accuracy
from insertlm.families.base import Family
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.tasks.base import Examples, Task

__all__ = ["Scores", "evaluate", "provenance"]


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent (see accuracy.py), the number of examples and of tokens written, and the time that took.

    others: accuracies that not every task has
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
        """All of it, flat."""
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
    """Write a text for every example. Sampling, if `settings` ask for it, depends on an example's number alone.
    Several processes share the work, and all get the result."""
    prompts = [Prompt(example.prefix, number) for number, example in enumerate(examples)]
    start = time.perf_counter()
    paths = generate(family, prompts, settings, batch_size, progress, processes)
    written = [trajectory.ids for trajectory in paths]
    seconds = time.perf_counter() - start
    shares = accuracy(task, examples, written)
    exact, token = shares.pop("sequence_accuracy"), shares.pop("token_accuracy")
    return Scores(len(examples), exact, token, sum(map(len, written)), seconds, shares)


def provenance(device: torch.device) -> dict[str, str | None]:
    """What produced a number: the hardware, the versions and, in a checkout, the commit."""
    return {
        "device": _hardware(device),
        "torch": torch.__version__,
        "insertlm": VERSION,
        "commit": _commit(),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """Linux tells the model in a file; elsewhere the platform module knows about as much."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine() or "CPU"


def _commit() -> str | None:
    """The commit this file belongs to, with `-dirty` if files were changed since; None outside of a checkout."""
    here = Path(__file__)
    try:
        # An installed copy may lie in the repository of something else, which does not know this file.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # asking must not write
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True, env=quiet
    )
    return done.stdout.strip()
