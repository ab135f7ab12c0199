"""What families share that write one token after another: they know the probability of all they can write.

The next token, or the end, is decided where the model sees what is given and what was written before. So the
probability of a text is a product, and one pass over the finished text computes all its factors.

Every factor is a softmax over the words and the end, which is what decoding draws from at temperature 1. (In training
the softmax is over the whole vocabulary. Decoding bars special tokens such as <blank>, and what it cannot write must
not take a share of the probability.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from insertlm.families.base import Family
from insertlm.inference.engine import exclusively
from insertlm.inference.score import Completion, Score
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.losses import slot_logsumexp
from insertlm.tasks.base import Examples

__all__ = ["Decisions", "Sequential", "examples_of"]

_TOGETHER = 64  # texts


@dataclass(frozen=True)
class Decisions:
    """Of a fill of n tokens. tokens: [n] log-probability of each   ends: [n + 1] that of ending instead, then of
    ending behind the last. Both float64, on the host"""

    tokens: Tensor
    ends: Tensor

    @property
    def value(self) -> float:
        """The log-probability of the fill and its end."""
        return float(self.tokens.sum() + self.ends[-1])


class Sequential(Family):
    """A family that writes from left to right, in one gap after the other."""

    unembedding: nn.Linear

    @abstractmethod
    def predict(self, completions: Sequence[Completion]) -> Tensor:
        """Hidden rows [P, d], a row for each token of every fill and one for its end, in the order of writing."""

    def weigh(self, prompt: Prompt, fills: Sequence[Sequence[int]], options: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability of each of these as the next fill of a prompt, its end included, when the fills before it
        have been written."""
        later: list[Sequence[int]] = [[]] * (len(prompt.gaps) - len(fills) - 1)
        completions = [Completion(prompt, [*fills, option, *later]) for option in options]
        parts = (completions[first : first + _TOGETHER] for first in range(0, len(options), _TOGETHER))
        return [found[len(fills)].value for part in parts for found in self.decisions(part)]

    @torch.inference_mode()
    def decisions(self, completions: Sequence[Completion]) -> list[list[Decisions]]:
        """Those of every fill of every completion, all computed together."""
        end = self.specials.eos
        fills = [fill for each in completions for fill in each.fills]
        expected = torch.tensor(
            [token for fill in fills for token in (*fill, end)], dtype=torch.int64, device=self.device
        )
        with exclusively(self.device):
            hidden = self.predict(completions)
            vectors = self.unembedding.weight
            barred = torch.ones(len(vectors), dtype=torch.bool, device=self.device)
            barred[self.writable], barred[end] = False, False
            total = slot_logsumexp(hidden, vectors, barred.nonzero().squeeze(1))
            token = (hidden * vectors[expected]).sum(-1) - total
            # An end within a fill is no end that could be written.
            token = token.masked_fill(~torch.isin(expected, self.writable), -torch.inf).double().cpu()
            ends = (hidden @ vectors[end] - total).double().cpu()
        found, first = list[list[Decisions]](), 0
        for each in completions:
            found.append([])
            for fill in each.fills:
                last = first + len(fill)
                found[-1].append(Decisions(token[first:last], ends[first : last + 1]))
                first = last + 1
        return found

    def check_completion(self, completion: Completion) -> None:
        super().check_completion(completion)
        self.check([completion.prompt], DecodeConfig())

    def score(self, prefix: Sequence[int], text: Sequence[int], batch_size: int = 64) -> Score:
        completion = Completion.behind([], text, prefix)
        self.check_completion(completion)
        [[found]] = self.decisions([completion])
        *stops, stop = found.ends.exp().tolist()
        return Score(list(text), stop, [*[0.0] * len(text), 1.0], found.tokens.exp().tolist(), stops)


def examples_of(completions: Sequence[Completion]) -> Examples:
    """The finished texts, as a batch of training has them."""
    prefix, target = ([*part] for part in zip(*((each.prompt.prefix, each.text) for each in completions), strict=True))
    return Examples(*_matrix(prefix), *_matrix(target))


def _matrix(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Padded, and the lengths."""
    length = np.array([len(row) for row in rows], np.int32)
    matrix = np.zeros((len(rows), int(length.max())), np.int32)
    for cells, row in zip(matrix, rows, strict=True):
        cells[: len(row)] = row
    return matrix, length
