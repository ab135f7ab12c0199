"""Blanks: a few gaps in a text that is otherwise intact, as people leave them when they ask for infilling.

Of every example one of three things is drawn:
- **blanks**: one to six gaps. A gap is a run of whole units, which are words, clauses or sentences (one kind for all
  gaps of an example), so it begins and ends where a user's blank would. Its size is log-uniform: one unit is likeliest,
  and a share of the text that is divided among the gaps is the most, so gaps are the shorter the more there are. Gaps
  of words have no more than a long phrase, and several of them leave most of the text: who leaves out more leaves out a
  clause or a sentence, rarely several, or all between the first sentence and the last. What is written follows these
  lengths, so they are those of blanks that people leave, not evenly spread. Some gaps are empty, so that a model learns
  that a blank may stay so. Between two gaps stands at least one unit.
- **suffix**: all that follows some word is missing, so that a model learns to write on. That is not a blank at the end
  of a text, which is a phrase or a sentence like any other blank, so it is marked.
- **everything**: nothing is given, so that a model learns to write from nothing.

What a unit is follows from the tokens alone (see text/units.py): the corpus need not know of blanks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from insertlm.core.noise import chance, hash32, uniform
from insertlm.core.packing import running_sum
from insertlm.core.section import Fraction, Section
from insertlm.families.base import Noise
from insertlm.text.units import CLOSES, ENDS_CLAUSE, ENDS_SENTENCE, MARKS, STARTS_WORD

__all__ = ["MOST", "Blanks", "BlanksConfig", "cut", "unit_of"]

MOST = 6  # blanks of a text
_COUNTS = (0.36, 0.22, 0.16, 0.12, 0.08, 0.06)  # how often there are one, two, three … of them
_PHRASE = 12  # the most words of a gap that is one of words
_SCATTERED = 0.4  # of a text, the most that several gaps of words take together
_ALONE = 0.85  # of the gaps that are clauses or sentences, which are a single one
_BETWEEN = 0.6  # through n - 2: of the single gaps in a text of n > 3 clauses or sentences, which are all but the first
# and the last; the longer a text, the rarer it is that so much is left out
_CLAUSES, _SENTENCES = 0.15, 0.35  # of the examples with blanks, in which units are these; else words
_EMPTY = 0.05  # of the blanks, into which nothing goes
_MARKS_STAY = 0.5  # of the blanks, behind which the punctuation marks stay: “She went to the ___.”

# Streams of noise: what a draw is for. They are below those of the other corruptions.
_KIND, _UNIT, _COUNT, _SIZE, _PLACE, _NOTHING, _CUT, _MARKS, _LONE, _BARE = range(-29, -19)


class BlanksConfig(Section, frozen=True, kw_only=True):
    """How often each kind of corruption is drawn, and how much of a text blanks may take. The rest of the examples has
    blanks."""

    suffix: Fraction = 0.15  # of the examples, of which the end is missing
    everything: Fraction = 0.1  # of the examples, of which all is missing
    share: Fraction = 0.5  # of a text, the most that its blanks take together (not where a single unit has more)

    def __post_init__(self) -> None:
        if self.suffix + self.everything > 1:
            raise ValueError(f"suffix and everything: expected 1 or less together, got {self.suffix + self.everything}")


@dataclass(frozen=True)
class Blanks:
    """The gaps of a batch, from left to right. Unused ones come last and begin behind the text.

    count: [B], how many an example has   begin, end: [B, MOST], the first token of each, and the first behind it
    onward: [B] bool, whether the text is to be written on: its only gap is no blank that somebody left at its end
    """

    count: Tensor
    begin: Tensor
    end: Tensor
    onward: Tensor

    @property
    def used(self) -> Tensor:
        """[B, MOST] bool"""
        return torch.arange(MOST, device=self.count.device) < self.count[:, None]

    def words(self, tokens: Tensor, traits: Tensor) -> Tensor:
        """How many words each gap holds, [B, MOST]. tokens: [B, L]   traits: [V] uint8"""
        trait = traits[tokens]
        starts = (trait & STARTS_WORD > 0) & (trait & MARKS == 0)
        starts[:, 0] = True
        before = torch.nn.functional.pad(running_sum(starts), (1, 0))
        return before.gather(1, self.end) - before.gather(1, self.begin)

    def gap_of(self, width: int) -> Tensor:
        """The number of the gap each token is in, from 1; 0 for those that stay. [B, width]"""
        column = torch.arange(width, device=self.count.device)
        inside = (column >= self.begin[:, :, None]) & (column < self.end[:, :, None])
        return (inside * torch.arange(1, MOST + 1, device=column.device)[:, None]).sum(1)


def unit_of(tokens: Tensor, length: Tensor, traits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of the word, of the clause and of the sentence that each token belongs to, each [B, L], from 0.

    tokens: [B, L]   length: [B]   traits: [V] uint8, of text/units.py
    """
    trait = traits[tokens]
    starts = trait & STARTS_WORD > 0
    starts[:, 0] = True
    ends = []
    for what in (ENDS_CLAUSE | ENDS_SENTENCE, ENDS_SENTENCE):
        end = trait & what > 0
        # A closing quote or bracket behind the mark belongs to what it ends.
        behind = torch.nn.functional.pad(end, (1, 0))[:, :-1] & (trait & CLOSES > 0)
        ended = torch.nn.functional.pad(end | behind, (1, 0))[:, :-1]
        first = starts & ended
        first[:, 0] = True
        ends.append(first)
    words, clauses, sentences = (running_sum(first) - 1 for first in (starts, *ends))
    return words, clauses, sentences


def cut(tokens: Tensor, length: Tensor, traits: Tensor, config: BlanksConfig, noise: Noise) -> Blanks:
    """Draw the gaps of a batch.

    tokens: [B, L]   length: [B]   traits: [V] uint8
    """
    return Blanks(*_cut(tokens, length, traits, config.suffix, config.everything, config.share, *noise))


@torch.library.custom_op("insertlm::cut_blanks", mutates_args=())
def _cut(
    tokens: Tensor,
    length: Tensor,
    traits: Tensor,
    suffix: float,
    everything: float,
    share: float,
    seed: int,
    example: Tensor,
    epoch: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An operator of its own: torch 2.11's compiler fails on what it makes of the draws, and they are no hot spot."""
    noise = Noise(seed, example, epoch)
    kind = uniform(*noise, _KIND)
    from_nothing, writing_on = kind < everything, kind < everything + suffix
    unit, units, of_words = _units(tokens, length, traits, writing_on, noise)
    count, start, size = _gaps(units, share, of_words, noise)

    # A suffix is one gap from some unit on, the text as a whole one from the first.
    first = torch.where(from_nothing, 0, 1 + ((hash32(*noise, _CUT) * (units - 1).clamp(min=0)) >> 32))
    whole = (from_nothing | writing_on)[:, None]
    only = torch.arange(MOST, device=count.device) == 0
    start = torch.where(whole, torch.where(only, first[:, None], units[:, None]), start)
    size = torch.where(whole, torch.where(only, (units - first)[:, None], 0), size)
    count = torch.where(whole.squeeze(1), 1, count)

    real = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
    before = torch.where(real, unit, torch.iinfo(torch.int64).max)[:, None]  # [B, 1, L]
    begin, end = ((before < edge[:, :, None]).sum(2) for edge in (start, start + size))
    return count, begin, _without_marks(tokens, traits, begin, end, whole, noise), writing_on & ~from_nothing


@_cut.register_fake
def _(tokens: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = tokens.new_empty(tokens.shape[0], dtype=torch.int64)
    begin, end = (count.new_empty(tokens.shape[0], MOST) for _ in range(2))
    return count, begin, end, count.new_empty(tokens.shape[0], dtype=torch.bool)


def _without_marks(tokens: Tensor, traits: Tensor, begin: Tensor, end: Tensor, whole: Tensor, noise: Noise) -> Tensor:
    """Where gaps end that leave the punctuation marks behind them as they are, up to two. whole: [B, 1], which have
    none behind them. [B, MOST]"""
    own = _each(noise)
    stay = chance(_MARKS_STAY, *own, _MARKS, torch.arange(MOST, device=tokens.device)) & ~whole
    for _ in range(2):
        last = traits[tokens.gather(1, (end - 1).clamp(min=0))]
        is_mark = (last & MARKS > 0) & (last & STARTS_WORD == 0)
        end = torch.where(stay & is_mark & (end - begin > 1), end - 1, end)
    return end


def _units(
    tokens: Tensor, length: Tensor, traits: Tensor, writing_on: Tensor, noise: Noise
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the kind that is drawn for each example: the unit of each token, [B, L], how many there are, and whether they
    are words, [B]."""
    words, clauses, sentences = unit_of(tokens, length, traits)
    kind = uniform(*noise, _UNIT)[:, None]
    unit = torch.where(kind < _CLAUSES, clauses, torch.where(kind < _CLAUSES + _SENTENCES, sentences, words))
    last = (length - 1).clamp(min=0)[:, None]
    alone = unit.gather(1, last) == 0  # a text of one sentence still has words
    of_words = alone | writing_on[:, None] | (kind >= _CLAUSES + _SENTENCES)
    unit = torch.where(of_words, words, unit)
    units = torch.where(length > 0, unit.gather(1, last).squeeze(1) + 1, 0)
    return unit, units, of_words.squeeze(1)


def _gaps(units: Tensor, share: float, of_words: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """How many gaps, [B], and the first unit and the size of each, [B, MOST]. units: [B]   of_words: [B] bool"""
    number = torch.arange(MOST, device=units.device)
    own = _each(noise)
    picked = uniform(*noise, _COUNT)
    count = torch.ones_like(units)
    for share_of_fewer in accumulate(_COUNTS[:-1]):
        count = count + (picked >= share_of_fewer)
    count = torch.minimum(count, (units // 2).clamp(min=1))  # a unit between any two
    used = number < count[:, None]
    together = torch.where(of_words & (count > 1), min(share, _SCATTERED), share)
    most = (together * units / count)[:, None].floor().clamp(min=1)
    most = torch.where(of_words[:, None], most.clamp(max=_PHRASE), most)
    most = torch.where(~of_words[:, None] & chance(_ALONE, *own, _LONE, number), 1.0, most)
    size = (uniform(*own, _SIZE, number) * (most + 1).log()).exp().floor().clamp(max=most).long()
    size = torch.where(used & ~chance(_EMPTY, *own, _NOTHING, number), size, 0)
    # What is left over is spread before, between and behind the gaps: sorted draws from as many places as there are.
    room = (units - size.sum(1) - (count - 1)).clamp(min=0)[:, None]
    places = (hash32(*own, _PLACE, number) * (room + 1)) >> 32
    places = torch.where(used, places, room).sort(1).values
    start = places + number + running_sum(size) - size
    between = units - 2
    bare = (~of_words & (count == 1) & (units > 3) & (uniform(*noise, _BARE) * between < _BETWEEN))[:, None]
    size, start = torch.where(bare & used, between[:, None], size), torch.where(bare, 1, start)
    return count, torch.where(used, start, units[:, None]), size


def _each(noise: Noise) -> Noise:
    """For draws that every gap has one of."""
    return Noise(noise.seed, noise.example[:, None], noise.epoch[:, None])
