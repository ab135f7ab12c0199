"""Models of text for tests: not trained, so that they write anything, broken characters too."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import torch

from insertlm.families.base import Family
from insertlm.inference.settings import DecodeConfig
from insertlm.infill.drafts import begin
from insertlm.infill.requests import Request
from insertlm.infill.results import Infilling
from insertlm.infill.stream import Stream
from insertlm.model import Model
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import Recipe
from insertlm.text.tokenizers import Specials

__all__ = ["FREE", "Few", "Letters", "build", "filled", "free", "infill", "text_model"]

FREE = DecodeConfig(temperature=1.0, position_top_k=0, max_steps=12)


def free(family: Family, **changes: Any) -> DecodeConfig:
    """The same for families that draw no places, too."""
    usual = {"position_top_k": 0 if family.abilities.draws_places else 1}
    return msgspec.structs.replace(FREE, **(usual | changes))


class Letters:
    """A lossless tokenizer: bytes, and a few words with the space before them."""

    words = tuple(bytes([byte]) for byte in range(256)) + tuple(
        word.encode() for word in (" the", " cat", " dog", "dog")
    )
    specials = Specials(*range(len(words), len(words) + 6))
    size = len(words) + 6
    alphabet: ClassVar[Sequence[int]] = range(len(words))
    _pattern = re.compile(b"|".join(re.escape(word) for word in words[:255:-1]) + b"|.", re.DOTALL)

    @property
    def writable(self) -> list[int]:
        return list(self.alphabet)

    @property
    def names(self) -> list[Hashable]:
        return [*self.words, *self.specials]

    def encode(self, text: str) -> list[int]:
        return [self.words.index(match[0]) for match in self._pattern.finditer(text.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.words[i] for i in ids).decode(errors="replace")


class Few(Letters):
    """The same of which few are written: banned and required words come about often."""

    alphabet = (*Letters().encode("acdgot "), *range(256, 260))


def build(config: Any, tokenizer: Any = Letters, max_length: int = 200) -> Family:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(layers=1, width=8, heads=2, hidden=12, max_length=max_length)
        family: Family = config.build(model, tokenizer())
        for parameter in family.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return family.double().eval().requires_grad_(False)


def text_model(family: Family, name: str = "text") -> Model:
    """As if it had been loaded from a folder of that name."""
    task = SimpleNamespace(kind="text", tokenizer=Letters(), parse_prompt=lambda text: [])
    recipe = SimpleNamespace(task=task, decode=free(family))
    return Model(family, cast(Recipe, recipe), Path(name))


def infill(
    family: Family,
    tokenizer: Any,
    requests: Sequence[Request],
    settings: DecodeConfig,
    seed: int = 0,
    batch_size: int = 64,
) -> list[Infilling]:
    """As `Model.fill` does, with another tokenizer."""
    drafts = begin(family, tokenizer, requests, settings, seed)
    return Stream(family, drafts, settings, batch_size, watched=False).results


def filled(family: Family, request: Request, seeds: Sequence[int] = (0,), **changes: Any) -> list[Infilling]:
    return [infill(family, Letters(), [request], free(family, **changes), seed)[0] for seed in seeds]
