"""A tiny Insertion Transformer, and its hidden rows computed as the definition reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insertlm.backbone.transformer import ModelConfig
from insertlm.families.it import IT, ItConfig
from insertlm.tokenizers import WordTokenizer


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
