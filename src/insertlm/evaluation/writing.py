"""Texts that a model writes from nothing, kept so that no call writes them twice."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal, key_of
from insertlm.families.base import Family
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.recipe import portable, to_yaml

if TYPE_CHECKING:
    from insertlm.model import Model

__all__ = ["Source", "Write", "Written", "unconditional", "write_once"]

_BATCH = 64  # texts written at once

Write = Callable[[DecodeConfig, int], Sequence[str]]


@dataclass(frozen=True)
class Source:
    """Something that writes. identity: what its texts are kept under, so all that they depend on beside the settings"""

    identity: str
    write: Write


@dataclass(frozen=True)
class Written:
    """seconds: that the writing of all texts took"""

    texts: list[str]
    seconds: float


def unconditional(model: Model, seed: int) -> Source:
    """A trained model; text i depends on the settings and on `seed + i` alone."""
    if model.recipe.task.has_answers:
        raise InsertlmError(f"{model.folder}: its task starts from a prompt; expected a model that writes texts freely")

    def write(settings: DecodeConfig, count: int) -> list[str]:
        prompts = [Prompt([], seed + number) for number in range(count)]
        return [model.decode(path.ids) for path in model.write(prompts, settings, _BATCH)]

    recipe = to_yaml(portable(model.recipe))  # the same by whatever path the folder was named
    return Source(key_of(_fingerprint(model.family), recipe, seed), write)


def _fingerprint(family: Family) -> str:
    """The same for the same weights, wherever they are kept."""
    digest = hashlib.sha256()
    for weights in family.state_dict().values():
        digest.update(weights.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_once(source: Source, settings: DecodeConfig, count: int, journal: Journal) -> Written:
    """What the journal has, or else what the source writes now."""
    key = key_of("texts", source.identity, msgspec.to_builtins(settings), count)
    if key not in journal:
        start = time.perf_counter()
        texts = list(source.write(settings, count))
        journal.add(key, {"texts": texts, "seconds": time.perf_counter() - start})
    return Written(**journal[key])
