"""A batch for the filler: texts with <blank> where a gap is, then the tokens of each gap behind its <fill>.

A blank may carry a hint, about how many words belong into it. Then its fill begins with another token than <fill>: one
of `HINTS`, which stand for numbers of words and are rows of the embedding behind the vocabulary's.

Two parts of the filler can be left out, which makes it the usual left-to-right model with fill-in-the-middle: what is
given may see only what is before it (`causal`), and positions may just count the rows. Then a number says which blank a
fill belongs to: the k-th blank and its fill begin with the same token, one of `marks`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.core.noise import hash32
from insertlm.core.packing import Packing, running_sum
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.blanks import MOST, Blanks

__all__ = ["HINTS", "Laid", "Layout", "hint_of", "lay_out"]

_DROPOUT = 0  # stream of noise

# A hint stands for as many words as it says, up to one less than the next one: exact where people count words.
HINTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192)


class Layout(NamedTuple):
    """jump: positions that stay free behind a blank   blank, fill, end: ids   hints: the id of the first of HINTS
    onward: the id with which the rest of a text begins that is written on"""

    jump: int
    blank: int
    fill: int
    end: int
    hints: int
    onward: int
    causal: bool = False
    marks: int | None = None

    def opening(self, words: int | None, onward: bool = False, number: int = 0) -> int:
        """The token with which the fill of a blank begins. words: about how many belong there; None: not known
        onward: the text is written on from there   number: of the blank in its text, from 0"""
        if words is not None:
            return self.hints + bisect_right(HINTS, words) - 1
        return self.onward if onward else self.fill if self.marks is None else self.marks + number

    def blank_of(self, number: int) -> int:
        """What stands for a blank in the text."""
        return self.blank if self.marks is None else self.marks + number


@dataclass(frozen=True)
class Laid:
    """A batch, packed: given rows, then those of the fills.

    tokens, positions: [T]   dropout: [T] int32 keys   packing: of the T rows
    order: [T] int32, see PackedAttention: 0 for what is given, then the order in which rows of fills are written.
    None: every row sees those before it in memory
    rows: [P] packed rows that predict   words: [P] what comes next there   real: [P] bool, False in the spare tail
    """

    tokens: Tensor
    positions: Tensor
    dropout: Tensor
    packing: Packing
    order: Tensor | None
    rows: Tensor
    words: Tensor
    real: Tensor


def hint_of(words: Tensor) -> Tensor:
    """The place in HINTS of each number of words."""
    return torch.bucketize(words, torch.tensor(HINTS, device=words.device), right=True) - 1


def lay_out(
    rows: Rows,
    blanks: Blanks,
    noise: Noise,
    layout: Layout,
    capacity: int | None = None,
    *,
    most: int | None = None,
    openings: Tensor | None = None,
    in_step: Tensor | None = None,
    all_rows: bool = False,
) -> Laid:
    """Put the tokens of each gap behind the text, in which a blank takes their place.

    rows: what is given ends with <bos>   capacity: rows of the buffer, see Packing   most: of these may predict
    openings: [B, MOST], the ids with which fills begin, if some carry a hint
    in_step: [B] bool, whose blanks are written in step, a token in each, and not one after the other
    all_rows: whether given rows predict, too: each the given token that comes next
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
    opening = torch.full_like(begins, layout.fill) if layout.marks is None else layout.marks + begins - 1
    blank = torch.full_like(begins, layout.blank) if layout.marks is None else opening
    if openings is not None:
        opening = torch.nn.functional.pad(openings, (1, 0)).gather(1, begins)
    tokens = torch.cat(
        [
            rows.given,
            _interleave(blank, rows.target),
            _interleave(opening, rows.target),
        ],
        1,
    )
    # Where each gap's <blank> stands: behind what is given before it, and the jumps of the blanks to its left.
    size = (blanks.end - blanks.begin) * blanks.used
    gone = running_sum(size) - size
    at = rows.given_length[:, None] + blanks.begin - gone + (number - 1) * (1 + layout.jump)  # [B, MOST]
    at = torch.nn.functional.pad(at, (1, 0))  # gap 0: none
    place = packing.where - packing.starts[:, None]
    marked = _interleave(markers.long(), torch.zeros_like(rows.target))
    jumps = layout.jump * (running_sum(marked) - marked)  # a blank is before its own jump
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
    # One blank after the other: rows are written as they lie in memory. In step: the k-th rows of all fills come
    # together.
    written = 1 + torch.arange(fills.shape[1], device=device).expand(batch, -1)
    if in_step is not None:
        together = 1 + _interleave(torch.zeros_like(begins), offset)
        written = torch.where(in_step[:, None], together, written)
    before = place[:, :given] if layout.causal else torch.zeros_like(place[:, :given])
    order = torch.cat([before, before.amax(1, keepdim=True) + written], 1)
    # What comes next: behind <fill> the first token of its gap, behind a token the next one; behind the last, the end.
    after = torch.nn.functional.pad(gap, (0, 2))
    next_word = torch.cat([words, words[:, -1:]], 1)
    behind_marker = torch.where(after[:, : width + 1] == begins, next_word[:, : width + 1], layout.end)
    behind_token = torch.where(after[:, 1 : width + 1] == gap, next_word[:, 1 : width + 1], layout.end)
    keys = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _DROPOUT, place)
    predicts, expected = fills, _interleave(behind_marker, behind_token)
    if all_rows:
        also, behind = _behind_given(rows, blanks, begins, there & (gap == 0))
        predicts, expected = torch.cat([also, fills], 1), torch.cat([behind, expected], 1)
    if most is not None:
        predicts = predicts & (running_sum(predicts.flatten()).view_as(predicts) <= most)
    predicted = Packing(predicts, capacity if most is None else most)
    return Laid(
        tokens=packing.pack(tokens),
        positions=packing.pack(positions if layout.marks is None else place),
        dropout=packing.pack(keys).int(),
        packing=packing,
        order=None if layout.causal and in_step is None else packing.pack(order).int(),
        rows=predicted.pack(packing.where[:, -predicts.shape[1] :]),
        words=predicted.pack(expected),
        real=predicted.pack(predicts),
    )


def _behind_given(rows: Rows, blanks: Blanks, begins: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
    """Which given rows are followed by a given token, and which one that is; both for what is given and then the text.

    begins: [B, L+1], the number of the gap that begins there, 0 for none   stays: [B, L] bool, tokens in no gap
    """
    words, next_stays = (torch.nn.functional.pad(part, (0, 1)) for part in (rows.target, stays))
    free = next_stays & (begins == 0)  # tokens before which there is no blank
    behind = torch.nn.functional.pad(blanks.end, (1, 0)).gather(1, begins)  # the first token behind a gap
    after_blank = (begins > 0) & next_stays.gather(1, behind)
    front = torch.arange(rows.given.shape[1], device=words.device)
    last = front == rows.given_length[:, None] - 1  # <bos>
    predicts = torch.cat([last & free[:, :1], _interleave(after_blank, free[:, 1:] & stays)], 1)
    in_text = _interleave(words.gather(1, behind), words[:, 1:])
    return predicts, torch.cat([words[:, :1].expand(-1, len(front)), in_text], 1)


def _interleave(markers: Tensor, tokens: Tensor) -> Tensor:
    """[B, L+1] and [B, L] to [B, 2L+1]: a marker before every token, and one at the end."""
    pairs = torch.stack([markers[:, :-1], tokens.to(markers.dtype)], 2).flatten(1)
    return torch.cat([pairs, markers[:, -1:]], 1)
