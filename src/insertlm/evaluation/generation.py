"""Texts that a model writes, from nothing or into blanks. A journal keeps them, so that no text is written twice."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal, key_of
from insertlm.families.base import Family
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.infill.drafts import BestOf, InfillDraft
from insertlm.infill.requests import Request
from insertlm.infill.stream import Stream
from insertlm.model import Model
from insertlm.recipe import portable, to_yaml

__all__ = ["BATCH", "GeneratedTexts", "TextGenerator", "fill_once", "fingerprint", "generate_once", "unconditional"]

BATCH = 64  # texts written at once


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
        return [model.decode(path.ids) for path in model.write(prompts, settings, BATCH)]

    return TextGenerator(key_of(*_identity(model), seed), generate)


def _identity(model: Model) -> tuple[str, str]:
    # The recipe without paths, so that a moved model finds its texts.
    return fingerprint(model.family), to_yaml(portable(model.recipe))


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


def fill_once(
    model: Model,
    requests: Sequence[Request],
    settings: DecodeConfig,
    seed: int,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
    batch_size: int = BATCH,
) -> list[dict[str, Any]]:
    """What the model writes into the blanks of every request, as the fields of `Infilled`, and the mean log-probability
    of its tokens. The i-th has the seed `seed + i`. Of a text that the model cannot take, such as one that is too long,
    the reason, as `refused`. Texts of the journal are not written again."""
    identity = key_of(*_identity(model), msgspec.to_builtins(settings))
    keys = [key_of("fill", identity, asdict(request), seed + i) for i, request in enumerate(requests)]
    if any(key not in journal for key in keys):
        for first in range(0, len(requests), batch_size):
            part = slice(first, first + batch_size)
            _fill_batch(model, requests[part], settings, seed + first, keys[part], journal)
            progress(min(first + batch_size, len(requests)))
    return [journal[key] for key in keys]


def _fill_batch(
    model: Model, requests: Sequence[Request], settings: DecodeConfig, seed: int, keys: Sequence[str], journal: Journal
) -> None:
    """Write the texts that the journal does not have."""
    begun: list[tuple[str, InfillDraft | BestOf]] = []
    for number, (key, request) in enumerate(zip(keys, requests, strict=True)):
        if key not in journal:
            try:
                [draft] = model.begin_infill([request], settings, seed + number)
                model.family.check([draft.prompt], settings)
            except InsertlmError as error:
                journal.add(key, {"refused": str(error)})
            else:
                begun.append((key, draft))
    start = time.perf_counter()
    written = Stream(model.family, [draft for _, draft in begun], settings, len(requests), watched=False).results
    seconds = (time.perf_counter() - start) / max(1, len(begun))  # they are written together
    for (key, _), filled in zip(begun, written, strict=True):
        path = filled.trajectory
        likely = [event.log_probability for event in path.events]
        record = {"output": filled.text, "fills": filled.fills, "complete": filled.complete}
        record["log_probability"] = math.fsum(likely) / len(likely) if likely else None
        journal.add(key, {**record, "tokens": len(path.events), "steps": len(path.steps), "seconds": seconds})
