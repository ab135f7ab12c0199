"""A tiny filler, and what it should compute: dense, in one pass, with every row's mask written out."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.families.base import Noise
from insertlm.families.corruption.blanks import MOST, Blanks
from insertlm.families.corruption.laid_out import Laid
from insertlm.families.fill import FillConfig, Filler
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer

__all__ = ["WORDS", "blanks_at", "examples", "filler", "noise_for", "order_of", "reference"]

WORDS = WordTokenizer((*"abcdefghij", ".", ","))
_MODEL = ModelConfig(layers=2, width=32, heads=2, hidden=64)


def blanks_at(width: int, *gaps: tuple[int, int]) -> Blanks:
    spare = [(width, width)] * (MOST - len(gaps))
    begin, end = (torch.tensor([list(edge)]) for edge in zip(*gaps, *spare, strict=True))
    return Blanks(torch.tensor([len(gaps)]), begin, end, torch.tensor([False]))


def filler(config: FillConfig | None = None, seed: int = 0) -> Filler:
    torch.manual_seed(seed)
    return (config or FillConfig()).build(_MODEL, WORDS)


def noise_for(count: int, epoch: int = 0) -> Noise:
    return Noise(1, torch.arange(count), torch.full((count,), epoch))


def examples(count: int = 24, longest: int = 17) -> Examples:
    draw = np.random.default_rng(3)
    length = draw.integers(1, longest + 1, count).astype(np.int32)
    target = draw.integers(0, len(WORDS.words), (count, longest), dtype=np.int32)
    return Examples(np.zeros((count, 0), np.int32), np.zeros(count, np.int32), target, length)


def order_of(x: Laid) -> Tensor:
    assert x.order is not None
    return x.order


class _Dense:
    """Every row's mask written out, in float64."""

    def __init__(self, sees: Tensor) -> None:
        self.sees = sees

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~self.sees, -torch.inf).softmax(-1), v)


def reference(model: Filler, x: Laid, *, writing: bool = False) -> Tensor:
    """−log P of every prediction of one example, with nothing packed or cached. [P]

    writing: special tokens but <eos> are not in play
    """
    fills = torch.isin(torch.arange(len(x.tokens)), x.rows)
    row = torch.arange(len(x.tokens))
    starts = (x.tokens >= WORDS.size) | (x.tokens == model.specials.stop)
    age = row - torch.where(fills & starts, row, 0).cummax(0).values  # of a row in its fill
    together = x.order is not None and len({*x.order[fills & starts].tolist()}) == 1
    before = row[None] <= row[:, None]
    earlier = age[None] <= age[:, None] if together else before
    given = before if model.config.sight == "before" else ~fills[:, None]
    sees = torch.where(fills[None], fills[:, None] & earlier, fills[:, None] | given)
    hidden = model.backbone(x.tokens, x.positions, _Dense(sees))
    logits = model.unembedding(hidden[x.rows])
    if writing:
        out = torch.ones(logits.shape[1], dtype=torch.bool)
        out[[*WORDS.writable, WORDS.specials.eos]] = False
        logits = logits.masked_fill(out, -torch.inf)
    return F.cross_entropy(logits, x.words, reduction="none")
