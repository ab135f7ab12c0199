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

from insertlm.core.noise import hash32
from insertlm.core.packing import Packing
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.families.corruption.packed import corrupt, packed_length
from insertlm.families.corruption.slots import Slots, slots_of
from insertlm.families.insertion import InsertionWriter, spread
from insertlm.inference.policies import certainty, margin
from insertlm.inference.sampling import draws
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Step, Writer
from insertlm.nn.attention import attention_over
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer

__all__ = ["IT", "ItConfig"]

_SLOT, _TOKEN = 0, 1  # streams of noise in decoding
_AT_ONCE = 1024  # slots whose logits are held at the same time


class ItConfig(FamilyConfig, frozen=True, kw_only=True, tag="it"):
    """The `family` section of a recipe for an Insertion Transformer."""

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> IT:
        return IT(model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        return prefix + target + IT.framing


# --- Model ------------------------------------------------------------------------------------------------------------


class IT(Family):
    abilities = Abilities(orders=("certainty", "margin", "mass"), parallel=True, stop_threshold=True)

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
        slots = Packing(self.canvas.slots, counts=self.canvas.counts.open.clip(min=1))
        slot_rows = hidden.index_select(0, slots.pack(where))
        outlook = self._look(slot_rows)
        end = spread(outlook.end, slots).exp()
        stop = end.masked_fill(~self.canvas.open, torch.inf).amin(1)
        stop = stop.masked_fill(stop.isinf(), torch.nan)  # no slot is open, so there is nothing to be sure of
        threshold = self.threshold(stop)
        unsettled = self.canvas.open & (end < (threshold[:, None] if isinstance(threshold, Tensor) else threshold))
        slot, real = self._best(spread(outlook.score, slots), unsettled)
        row = slots.where.gather(1, slot).clamp(min=0).flatten()
        token, log_probability = self._choose(number, slot, slot_rows.index_select(0, row), outlook.mass[row])
        real = real & ~self._doubled(torch.where(real, slot, -1), token)
        return Step(stop >= threshold, self.full, stop, torch.where(real, slot, -1), token, log_probability)

    def _look(self, slot_rows: Tensor) -> _Outlook:
        parts = [self._look_at(piece @ self.words.T) for piece in torch.split(slot_rows, _AT_ONCE)]
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

    def _best(self, score: Tensor, unsettled: Tensor) -> tuple[Tensor, Tensor]:
        """The slots to write to, best first, and which of these count: no more than `parallel` asks for, are unsettled
        and have room. score, unsettled: [B, C]. Returns [B, K] twice"""
        most = int(self.canvas.counts.open.max())
        order = score.masked_fill(~unsettled, -torch.inf).argsort(stable=True, dim=1, descending=True)
        slot = order[:, : max(1, min(self.settings.parallel or most, most))]
        room = (self.canvas.limit - self.canvas.length)[:, None]
        return slot, unsettled.gather(1, slot) & (torch.arange(slot.shape[1], device=slot.device) < room)

    def _doubled(self, slot: Tensor, token: Tensor) -> Tensor:
        """Which insertions repeat a word on its left while it is repeated on its right too, [B, K] bool."""
        if slot.shape[1] == 1:
            return torch.zeros_like(slot, dtype=torch.bool)
        canvas, nobody = self.canvas, torch.full_like(self.canvas.tokens, -1)
        last = nobody.shape[1] - 1  # a place that no word has
        there = nobody.scatter(1, torch.where(canvas.used, canvas.ranks, last), canvas.tokens)
        rank = torch.where(slot >= 0, canvas.ranks.gather(1, slot.clamp(min=0)), last)
        written = nobody.scatter(1, rank, token)
        right = (rank + 1).clamp(max=last)
        return (slot >= 0) & (there.gather(1, right) == token) & (written.gather(1, right) == token)

    def _choose(self, number: int, slot: Tensor, rows: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """A token for each slot, with its log-probability there: [B, K]. rows: [B*K, d]   mass: [B*K]"""
        tokens, scores = [], []
        count = slot.shape[1]
        texts = torch.arange(len(slot)).repeat_interleave(count).tolist()
        seed = hash32(_SLOT, self.seed[:, None], slot).flatten()  # slots of one text draw independently
        own = self.own(number)
        numbers = torch.full_like(seed, own) if isinstance(own, int) else own.repeat_interleave(count)
        for first in range(0, len(rows), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            logits = rows[part] @ self.words[:-1].T
            tokens.append(self.choose(logits, draws(_TOKEN, seed[part], numbers[part]), texts[part]))
            scores.append(logits.gather(1, tokens[-1][:, None]).squeeze(1))
        token = self.family.writable[torch.cat(tokens)]
        return token.view_as(slot), (torch.cat(scores) - mass).view_as(slot)
