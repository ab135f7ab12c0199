"""Texts that a model writes from nothing. A journal keeps them, so that no text is written twice."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal, key_of
from insertlm.families.base import Family
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.model import Model
from insertlm.recipe import portable, to_yaml

__all__ = ["GeneratedTexts", "TextGenerator", "fingerprint", "generate_once", "unconditional"]

_BATCH = 64  # texts written at once


@dataclass(frozen=True)
class TextGenerator:
    """generate: from settings and a number of texts to the texts   identity: a key for all that they depend on apart
    from these two, under which the journal keeps them"""

    identity: str
    generate: Callable[[DecodeConfig, int], Sequence[str]]


@dataclass(frozen=True)
class GeneratedTexts:
    """seconds: how long all texts took together"""

    texts: list[str]
    seconds: float


def unconditional(model: Model, seed: int) -> TextGenerator:
    """A trained model as a generator; text i depends on the settings and on `seed + i` alone."""
    if model.recipe.task.has_answers:
        raise InsertlmError(f"{model.folder}: its task starts from a prompt; expected a model that writes texts freely")

    def generate(settings: DecodeConfig, count: int) -> list[str]:
        prompts = [Prompt([], seed + number) for number in range(count)]
        return [model.decode(path.ids) for path in model.write(prompts, settings, _BATCH)]

    recipe = to_yaml(portable(model.recipe))  # without paths, so that a moved model finds its texts
    return TextGenerator(key_of(fingerprint(model.family), recipe, seed), generate)


def fingerprint(family: Family) -> str:
    """A hash of the weights."""
    digest = hashlib.sha256()
    for weights in family.state_dict().values():
        digest.update(weights.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def generate_once(generator: TextGenerator, settings: DecodeConfig, count: int, journal: Journal) -> GeneratedTexts:
    """The texts from the journal or, if it does not have them, new ones."""
    # The settings belong to the key: texts of another temperature are other texts.
    key = key_of("texts", generator.identity, msgspec.to_builtins(settings), count)
    if key not in journal:
        start = time.perf_counter()
        texts = list(generator.generate(settings, count))
        journal.add(key, {"texts": texts, "seconds": time.perf_counter() - start})
    return GeneratedTexts(**journal[key])
