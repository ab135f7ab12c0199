"""The Insertion Transformer of Stern et al. (2019) as a decoder alone: the ILM's closest rival, whole, in one file.

Design choices, those of Stern et al. unless said:
- Rows, corruption and backbone are the ILM's, see ilm.py. The two differ in what a slot learns and in how writing ends.
  <stop> stays in its place, so that both see the same rows, but there is no stop head.
- Slots are <bos> and every visible token of the text, read from that token's hidden row as in the ILM (Stern et al.
  join the rows on both sides of a slot). Prefix tokens are no slots: nothing is ever inserted behind them.
- Each slot has a softmax of its own over the vocabulary. Its target is uniform over the tokens missing in it, or <eos>,
  "end of slot", if none is. An example's loss is the mean over its slots, a batch's the mean over its examples.
- Decoding: a slot is closed while P(<eos>) reaches `decode.stop_threshold`; a text is complete when all its open slots
  are closed. Of the others the best one gets a token (`decode.parallel` 1; with greedy decoding, this is the likeliest
  pair of slot and token), or the n best do (n), or all (0): then a text can double in every step.
- Where the same word stands twice in a row and one of the two is missing, it may be inserted on either side of the
  other, so each of the two slots learns it with probability one half. A threshold up to one half can therefore close
  both too early; recipes have 0.7. If both slots would write that word in one step, only the right one does.

The Insertion Transformer that the ILM's authors released differs in ways that cost it accuracy. We do not repeat these:
- the loss of a slot with c missing tokens was divided by c + 1, so that a single missing token weighed half;
- the last slot never had <eos> as its target, so nothing taught the model to stop there;
- padding could be deleted, and so the model learned to insert it;
- prefix slots took part, always with the target <eos>, and the mean ran over the slots of the whole batch, so that long
  rows counted more;
- slots were chosen by the log-sum-exp of their logits, which the loss never compares between slots; we use
  probabilities;
- an <eos> drawn as a token left a visible <mask> in the text; here <eos> closes slots and is never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.families.corruption.packed import corrupt, packed_length
from insertlm.families.corruption.slots import Slots, slots_of
from insertlm.families.insertion import InsertionWriter, spread
from insertlm.inference.policies import certainty, margin
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Step, Writer
from insertlm.nn.attention import attention_over
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer

__all__ = ["IT", "ItConfig"]

_AT_ONCE = 1024  # slots whose logits are held at the same time


class ItConfig(FamilyConfig, frozen=True, kw_only=True, tag="it"):
    """The `family` section of a recipe for an Insertion Transformer."""

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> IT:
        return IT(model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        return prefix + target + IT.framing


# --- Model ------------------------------------------------------------------------------------------------------------


class IT(Family):
    abilities = Abilities(
        orders=("certainty", "margin", "mass"),
        parallel=True,
        confidence=True,
        stop_threshold=True,
        supports_constraints=True,
    )

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.unembedding = self.backbone.unembedding()

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        return Rows.of(examples, self.specials.stop, self.specials.bos)

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        return packed_length(rows, noise)

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """The loss, and the parts of it that come from slots with missing tokens and from slots without."""
        x = corrupt(rows, noise, capacity)
        slots = slots_of(x, capacity)
        keys = x.dropout if self.training else None
        attention = attention_over(x.packing, rows.given_length - 2, self.model.prefix_lm)
        hidden = self.backbone(x.tokens, x.positions, attention, keys=keys, wanted=slots.rows)
        # One call scores the missing tokens in their slots and <eos> in all slots, without holding any logits.
        every = torch.arange(len(hidden), device=hidden.device)
        row = torch.cat([slots.of.flatten(), every])
        token = torch.cat([rows.target.flatten(), torch.full_like(every, self.specials.eos)])
        mass, scores = slot_scores(hidden, self.unembedding.weight, row, token)
        score, end = torch.split(scores, [rows.target.numel(), len(hidden)])
        token_loss, end_loss = self._slot_losses(mass, score.view_as(rows.target), end, slots, x.deleted)
        return Losses(token_loss + end_loss, {"token_loss": token_loss.detach(), "end_loss": end_loss.detach()})

    def _slot_losses(
        self, mass: Tensor, score: Tensor, end: Tensor, slots: Slots, deleted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """−log P of the missing tokens, averaged in each slot, and of <eos> in slots where none is missing.

        mass, end: [S] log-sum-exp of a slot's logits, and the logit of <eos>   deleted: [B, L] bool
        score: [B, L] logit of every target token in its slot
        """
        # Each missing token weighs 1 / (tokens missing in its slot), so every slot counts once, and every example too.
        count, cells = slots.packing.lengths, slots.packing.where
        surprise = (mass.index_select(0, slots.of.flatten()).view_as(score) - score) * deleted
        token_loss = (surprise / slots.missing[slots.of].clamp(min=1)).sum(1) / count
        empty = slots.packing.keep & (slots.missing[cells] == 0)
        end_loss = ((mass - end).index_select(0, cells.flatten()).view_as(empty) * empty).sum(1) / count
        return token_loss.mean(), end_loss.mean()

    # --- Writing

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return _Writing(self, prompts, settings, longest)


class _Outlook(NamedTuple):
    """What slots expect, each [S]. mass: log-sum-exp of the logits   end: log P(<eos>)   score: the largest is written
    to first"""

    mass: Tensor
    end: Tensor
    score: Tensor


class _Writing(InsertionWriter):
    """An Insertion Transformer at work. words: [V, d] unembedding of what it may write, <eos> last"""

    family: IT
    mixes = True

    def __init__(self, family: IT, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> None:
        super().__init__(family, prompts, settings, longest)
        weight = family.unembedding.weight
        self.words = torch.cat([weight[family.writable], weight[family.specials.eos, None]])

    def step(self, number: int) -> Step:
        """A token for the best slots that are not done. A text's stop probability is that of its least sure slot."""
        hidden, where = self.hidden()
        slots, barred = self.slots, None
        slot_rows = hidden.index_select(0, slots.pack(where))
        outlook = self._look(slot_rows)
        end = spread(outlook.end, slots).exp()
        stop = end.masked_fill(~self.canvas.open, torch.inf).amin(1)
        stop = stop.masked_fill(stop.isinf(), torch.nan)  # no slot is open, so there is nothing to be sure of
        threshold = self.threshold(stop)
        closed = end >= (threshold[:, None] if isinstance(threshold, Tensor) else threshold)
        scope = self.scope(number, stop >= threshold, closed & self.canvas.open)
        if scope.barred is not None:  # what slots are worth depends on what may go there
            slots, barred = scope.slots, scope.barred
            slot_rows = hidden.index_select(0, slots.pack(where))
            outlook = self._look(slot_rows, barred)
        score = spread(outlook.score, slots).masked_fill(~(scope.slots.keep & self.canvas.open), -torch.inf)
        cell, real = self.best(scope.among(score))
        row = slots.where.gather(1, cell).clamp(min=0).flatten()

        def logits_of(part: slice) -> Tensor:
            logits = slot_rows.index_select(0, row[part]) @ self.words[:-1].T
            return logits if barred is None else logits.masked_fill(barred[row[part]], -torch.inf)

        word, logit, best = self.choose_several(number, cell, logits_of)
        token, mass = self.family.writable[word], outlook.mass[row].view_as(cell)
        real &= logit > -torch.inf
        real[:, 1:] &= (best - mass).exp()[:, 1:] >= self.settings.confidence
        real &= ~self.repeats(torch.where(real, cell, -1), token)
        full = scope.full if barred is None else scope.full | ~real.any(1)
        return Step(scope.complete, full, stop, torch.where(real, cell, -1), token, logit - mass)

    def _look(self, slot_rows: Tensor, barred: Tensor | None = None) -> _Outlook:
        parts = []
        for first in range(0, len(slot_rows), _AT_ONCE):
            piece = slice(first, first + _AT_ONCE)
            logits = slot_rows[piece] @ self.words.T
            if barred is not None:
                logits[:, :-1].masked_fill_(barred[piece], -torch.inf)
            outlook = self._look_at(logits)
            nothing = logits[:, :-1].amax(1) == -torch.inf
            parts.append(outlook._replace(score=outlook.score.masked_fill(nothing, -torch.inf)))
        return _Outlook(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _look_at(self, logits: Tensor) -> _Outlook:
        """logits: [S, V], <eos> last"""
        mass = logits.logsumexp(1)
        end = logits[:, -1] - mass
        if self.settings.order == "mass":  # the probability of anything but <eos>
            return _Outlook(mass, end, -end)
        if self.settings.order == "margin":  # the lead over the second best, which may be <eos>
            return _Outlook(mass, end, margin(logits[:, :-1], mass, logits[:, -1]))
        return _Outlook(mass, end, certainty(logits[:, :-1], mass))
