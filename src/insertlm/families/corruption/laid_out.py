"""A batch for the filler: texts with <blank> where a gap is, then the tokens of each gap behind its <fill>."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insertlm.core.noise import hash32
from insertlm.core.packing import Packing, running_sum
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.blanks import MOST, Blanks

__all__ = ["Laid", "lay_out"]

_DROPOUT = 0  # stream of noise


@dataclass(frozen=True)
class Laid:
    """A batch, packed: given rows, then those of the fills.

    tokens, positions: [T]   dropout: [T] int32 keys   packing: of the T rows
    given: how many columns of its matrix hold what is given
    rows: [P] packed rows that predict   words: [P] what comes next there   real: [P] bool, False in the spare tail
    """

    tokens: Tensor
    positions: Tensor
    dropout: Tensor
    packing: Packing
    given: int
    rows: Tensor
    words: Tensor
    real: Tensor


def lay_out(
    rows: Rows, blanks: Blanks, noise: Noise, jump: int, blank: int, fill: int, eos: int, capacity: int | None = None
) -> Laid:
    """Put the tokens of each gap behind the text, in which a blank takes their place.

    rows: what is given ends with <bos>   blank, fill, eos: ids   capacity: rows of the buffer, see Packing
    """
    batch, width = rows.target.shape
    device = rows.target.device
    column = torch.arange(width, device=device)
    gap = blanks.gap_of(width)  # [B, L], from 1
    there = column < rows.target_length[:, None]
    begins = torch.zeros(batch, width + 1, dtype=torch.int64, device=device)
    number = torch.arange(1, MOST + 1, device=device).expand(batch, -1)
    # Gaps that are not used begin behind the text like one at its end may: they must not take its number.
    begins.scatter_reduce_(1, blanks.begin, torch.where(blanks.used, number, 0), "amax")

    # The text twice, each time with a cell before every token, and one at the end, for what a gap may begin with.
    front = rows.given.shape[1]
    markers = begins > 0
    in_front = torch.arange(front, device=device) < rows.given_length[:, None]
    text, fills = _interleave(markers, there & (gap == 0)), _interleave(markers, gap > 0)
    packing = Packing(torch.cat([in_front, text, fills], 1), capacity)
    given = front + text.shape[1]

    words = torch.nn.functional.pad(rows.target, (0, 1))
    tokens = torch.cat(
        [
            rows.given,
            _interleave(torch.full_like(begins, blank), rows.target),
            _interleave(torch.full_like(begins, fill), rows.target),
        ],
        1,
    )
    # Where each gap's <blank> stands: behind what is given before it, and the jumps of the blanks to its left.
    size = (blanks.end - blanks.begin) * blanks.used
    gone = running_sum(size) - size
    at = rows.given_length[:, None] + blanks.begin - gone + (number - 1) * (1 + jump)  # [B, MOST]
    at = torch.nn.functional.pad(at, (1, 0))  # gap 0: none
    place = packing.where - packing.starts[:, None]
    jumps = jump * running_sum(_interleave(markers.long(), torch.zeros_like(rows.target)))
    jumps = jumps - jump * _interleave(markers.long(), torch.zeros_like(rows.target))  # a blank is before its own jump
    start = torch.nn.functional.pad(blanks.begin, (1, 0))
    offset = 1 + column - start.gather(1, gap)
    positions = torch.cat(
        [
            place[:, :front],
            place[:, front:given] + jumps,
            _interleave(at.gather(1, begins), at.gather(1, gap) + offset),
        ],
        1,
    )
    # What comes next: behind <fill> the first token of its gap, behind a token the next one; behind the last, the end.
    after = torch.nn.functional.pad(gap, (0, 2))
    next_word = torch.cat([words, words[:, -1:]], 1)
    behind_marker = torch.where(after[:, : width + 1] == begins, next_word[:, : width + 1], eos)
    behind_token = torch.where(after[:, 1 : width + 1] == gap, next_word[:, 1 : width + 1], eos)
    keys = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _DROPOUT, place)
    predicted = Packing(fills, capacity)
    return Laid(
        tokens=packing.pack(tokens),
        positions=packing.pack(positions),
        dropout=packing.pack(keys).int(),
        packing=packing,
        given=given,
        rows=predicted.pack(packing.where[:, given:]),
        words=predicted.pack(_interleave(behind_marker, behind_token)),
        real=predicted.pack(fills),
    )


def _interleave(markers: Tensor, tokens: Tensor) -> Tensor:
    """[B, L+1] and [B, L] to [B, 2L+1]: a marker before every token, and one at the end."""
    pairs = torch.stack([markers[:, :-1], tokens.to(markers.dtype)], 2).flatten(1)
    return torch.cat([pairs, markers[:, -1:]], 1)
