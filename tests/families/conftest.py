"""A tiny left-to-right model, a tiny Insertion Transformer, and what each computes, as its definition reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insertlm.families.arm import ARM, ArmConfig
from insertlm.families.it import IT, ItConfig
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer


@pytest.fixture(scope="session")
def tiny_arm() -> Callable[..., ARM]:
    """Not trained, ready to decode. Words are ids 0 … words-1."""

    def build(
        *,
        words: int = 6,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        prefix_lm: bool = False,
    ) -> ARM:
        model = ModelConfig(layers=2, width=8, heads=2, hidden=12, dropout=dropout, prefix_lm=prefix_lm)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            arm = ArmConfig().build(model, WordTokenizer(tuple(map(str, range(words))), reserved=1))
        return arm.to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def next_logits(
    softmax_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Callable[[ARM, list[int], list[int]], Tensor]:
    """Of the token behind <bos> and behind every token of the text, from one whole row: prefix <bos> text.

    [len(text) + 1, vocabulary]
    """

    def compute(arm: ARM, prefix: list[int], text: list[int]) -> Tensor:
        row = torch.tensor([*prefix, arm.specials.bos, *text])
        mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()
        if arm.model.prefix_lm:
            mask[: len(prefix) + 1, : len(prefix) + 1] = True
        hidden = arm.backbone(row, torch.arange(len(row)), lambda layer, q, k, v: softmax_attention(q, k, v, mask))
        logits: Tensor = hidden[len(prefix) :] @ arm.unembedding.weight.T
        return logits

    return compute


@pytest.fixture(scope="session")
def tiny_it() -> Callable[..., IT]:
    """Not trained, in float64, ready to decode. Words are ids 0 … 5.

    sharp: what the unembedding is scaled by; some slots then are sure that they are done
    """

    def build(*, prefix_lm: bool = False, dropout: float = 0.0, seed: int = 0, sharp: float = 4.0) -> IT:
        model = ModelConfig(layers=2, width=8, heads=2, hidden=12, dropout=dropout, prefix_lm=prefix_lm)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            it = ItConfig().build(model, WordTokenizer(tuple("012345"), reserved=1))
        it.unembedding.weight.data *= sharp
        return it.double().eval()

    return build


@pytest.fixture(scope="session")
def slot_rows(
    softmax_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Callable[[IT, list[int], list[int]], Tensor]:
    """Hidden rows of <bos> and the text, from one whole row in reading order: <stop> prefix <bos> text."""

    def compute(it: IT, prefix: list[int], text: list[int]) -> Tensor:
        row = torch.tensor([it.specials.stop, *prefix, it.specials.bos, *text])
        place = torch.arange(len(row))
        inside = (place >= 1) & (place <= len(prefix))
        mask = ~inside[:, None] | inside | torch.tensor(not it.model.prefix_lm)
        hidden: Tensor = it.backbone(row, place, lambda layer, q, k, v: softmax_attention(q, k, v, mask))
        return hidden[1 + len(prefix) :]

    return compute
