"""The left-to-right rival: the autoregressive model, whole, in one file.

Design choices, the published ones unless said:
- A row reads `prefix <bos> text`. Every token sees itself and what is before it, in the prefix too. (With
  `model.prefix_lm`, which is not the paper's, the tokens of the prefix and <bos> see each other in both directions.)
- Nothing is corrupted: from <bos> on, each token predicts the next one, and the last token predicts <eos>, which is
  never fed itself.
- The loss is the cross-entropy of target tokens and <eos>, not of the prefix. It is the mean over all of these in the
  batch, so a long text counts for more than a short one.
- The backbone is the one of all families, and so is the unembedding. There is no stop head: <eos> says complete.
- Decoding computes the prefix, <bos> and the given text once, then one row a step (the published code computes all rows
  in every step). Only words and <eos> can be drawn, and <eos> ends the text. So `decode.stop_threshold` is refused, and
  so are the settings that choose a place, because the only place is the end.
- A text with rules (inference/rules.py) is asked what they allow before each token is drawn.
- The recorded probabilities are the model's own among words and <eos>, before temperature, top-k and top-p. That of
  <eos> is the stop probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import hash32
from insertlm.core.packing import Packing, Segments
from insertlm.families.abilities import Abilities
from insertlm.families.base import FamilyConfig, Losses, Noise, Rows
from insertlm.families.fill_rules import FillRules, allow
from insertlm.families.sequential import Sequential, examples_of
from insertlm.inference.sampling import draws
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step, Writer
from insertlm.nn.attention import Attention, CachedAttention, PrefixCache, attention_over
from insertlm.nn.fused import whole_blocks
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer

__all__ = ["ARM", "ArmConfig", "Packed", "pack"]

# Streams of noise: what a draw is for, in training and in writing.
_DROPOUT = 0
_TOKEN, _CHOICE = 0, 1

_HELD = ("length", "before", "limit", "hidden")  # by the writer, of every text


class ArmConfig(FamilyConfig, frozen=True, kw_only=True, tag="arm"):
    """The `family` section of a recipe for a left-to-right model."""

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> ARM:
        return ARM(model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        return prefix + target + ARM.framing


# --- Batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A packed batch, and what is to be predicted in it.

    tokens, positions: [T]   dropout: [T] int32 keys   packing: of the T rows
    rows: [P] packed rows that predict   words: [P] what comes next there   real: [P] bool, False in the spare tail
    """

    tokens: Tensor
    positions: Tensor
    dropout: Tensor
    packing: Packing
    rows: Tensor
    words: Tensor
    real: Tensor


def pack(rows: Rows, noise: Noise, capacity: int | None = None) -> Packed:
    """Lay sequences end to end, without their <eos>."""
    fed = torch.cat([rows.given, rows.target[:, :-1]], 1)
    here = torch.arange(rows.given.shape[1], device=rows.given.device) < rows.given_length[:, None]
    there = rows.real
    packing = Packing(torch.cat([here, there[:, 1:]], 1), capacity)  # all target cells but that of <eos>
    position = packing.where - packing.starts[:, None]
    key = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _DROPOUT, position)
    # Two bounds on the rows that predict: there are no more than rows in all, and no more than target cells (in whole
    # blocks of rows). The first is lower where texts differ much in length, the second behind long prefixes. Spare rows
    # cost little here, because nothing attends within these rows.
    predicted = Packing(there, None if capacity is None else min(capacity, whole_blocks(there.numel())))
    before = (packing.starts + rows.given_length - 1)[:, None]
    return Packed(
        tokens=packing.pack(fed),
        positions=packing.pack(position),
        dropout=packing.pack(key).int(),
        packing=packing,
        rows=predicted.pack(before + torch.arange(there.shape[1], device=there.device)),
        words=predicted.pack(rows.target),
        real=predicted.pack(there),
    )


# --- Model ------------------------------------------------------------------------------------------------------------


class ARM(Sequential):
    framing = 1  # <bos>
    abilities = Abilities(appends=True, left_to_right=True, weighs_texts=True)

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        self.unembedding = self.backbone.unembedding()

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        """Given are the prefix and <bos>; the target ends with <eos>."""
        rows = Rows.of(examples, self.specials.bos)
        target = F.pad(rows.target, (0, 1)).scatter(1, rows.target_length[:, None], self.specials.eos)
        return replace(rows, target=target, target_length=rows.target_length + 1)

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        return rows.given_length + rows.target_length - 1

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """Cross-entropy, the mean over all target tokens and <eos> of the batch."""
        x = pack(rows, noise, capacity)
        keys = x.dropout if self.training else None
        attention = attention_over(x.packing, rows.given_length, self.model.prefix_lm, causal=True)
        hidden = self.backbone(x.tokens, x.positions, attention, keys=keys, wanted=x.rows)
        every = torch.arange(len(hidden), device=hidden.device)
        mass, score = slot_scores(hidden, self.unembedding.weight, every, x.words)
        tokens = rows.target_length.sum()
        loss = ((mass - score) * x.real).sum() / tokens
        return Losses(loss, {"token_loss": loss.detach()}, over={"loss": tokens, "token_loss": tokens})

    def predict(self, completions: Sequence[Completion]) -> Tensor:
        rows = self.rows(examples_of(completions)).to(self.device)
        x = pack(rows, Noise(0, *torch.zeros(2, len(completions), dtype=torch.int64, device=self.device)))
        given = torch.tensor([len(each.prompt.start) for each in completions], device=self.device)
        written = rows.real & (torch.arange(rows.target.shape[1], device=self.device) >= given[:, None])
        attention = attention_over(x.packing, rows.given_length, self.model.prefix_lm, causal=True)
        with self.backbone.autocast():
            hidden: Tensor = self.backbone(x.tokens, x.positions, attention, wanted=x.rows[written[rows.real]])
        return hidden

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        longest = super().check(prompts, settings)
        for prompt in prompts:
            end = len(prompt.start)
            if prompt.open is not None and prompt.open != {end}:
                raise InsertlmError(
                    f"a prompt opens the gaps {sorted(prompt.open)}; this family writes at the end of the text alone, "
                    f"expected [{end}]"
                )
        return longest

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return _Writing(self, prompts, settings, longest)


class _Writing(BatchWriter):
    """An ARM at work on one batch. Of all rows but a text's last, only keys and values are needed again.

    length, before, limit: [B] tokens so far, those of them before the text, and the most there may be
    lengths, left: [B] on the host, tokens so far and how many more a text may get
    hidden: [B, d] of the last token   words: [W+1] ids in play, the last is <eos>   vectors: [W+1, d] theirs
    rules: of the texts that have some, else None
    """

    mixes = True

    def __init__(self, family: ARM, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> None:
        super().__init__(prompts, settings, family.device)
        self.family, device = family, family.device
        self.words = torch.cat([family.writable, torch.tensor([family.specials.eos], device=device)])
        self.vectors = family.unembedding.weight[self.words]
        rows = [[*prompt.prefix, family.specials.bos, *prompt.start] for prompt in prompts]
        self.lengths = np.array([len(row) for row in rows])
        room = (longest - self.lengths).clip(max=settings.max_tokens or longest)
        self.left = room.clip(max=settings.max_steps)
        self.length = torch.from_numpy(self.lengths).to(device)
        self.limit = self.length + torch.from_numpy(room).to(device)
        self.before = torch.tensor([len(prompt.prefix) + 1 for prompt in prompts], device=device)
        self.rules = [FillRules(prompt) if FillRules.apply_to(prompt) else None for prompt in prompts]
        self.hidden, self.cache = self._read(rows)

    def step(self, number: int) -> Step:
        """The next token of every text, or its end."""
        logits = self.hidden @ self.vectors.T
        ruled, beyond = self._rule(logits)
        choice = self.choose(ruled, draws(_TOKEN, self.seed, self.own(number)))
        full = self.length >= self.limit
        for row, ids in beyond.items():
            full[row] |= ids[int(self.words[choice[row]])]
        log_probability = logits.log_softmax(-1)
        return Step(
            complete=choice == len(self.words) - 1,
            full=full,
            stop_probability=log_probability[:, -1].exp(),
            place=(self.length - self.before)[:, None],
            token=self.words[choice][:, None],
            log_probability=log_probability.gather(1, choice[:, None]),
        )

    def _rule(self, logits: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """What rules leave of the logits. And by row, the ids that would pass the most of the blank."""
        beyond = dict[int, Tensor]()
        if any(self.rules):
            logits = logits.clone()
        for row, rules in enumerate(self.rules):
            if rules is None:
                continue
            if (choice := rules.undecided(0)) is not None:
                weights = self.family.weigh(rules.prompt, [], choice.options)
                noise = draws(_CHOICE, self.seed[row, None], 0)
                choice.decide(weights, int(self.choose(logits.new_tensor([weights]), noise, [row])))
            verdict = rules.judge(0, False, [int(self.left[row])], int(self.left[row]))
            every = logits.new_full((self.family.vocabulary,), -torch.inf)
            every[self.words] = logits[row]
            end = every[self.words[-1]].clone()
            logits[row] = allow(verdict, every, every)[self.words]
            logits[row, -1] = -torch.inf if verdict.penalty else end
            if verdict.beyond is not None:
                beyond[row] = verdict.beyond
        return logits, beyond

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.rules = [self.rules[row] for row in rows.tolist()]
        for name in _HELD:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        here = rows.cpu().numpy()
        self.lengths, self.left = self.lengths[here], self.left[here]
        self.cache = self.cache.select(rows)

    def join(self, other: Self, number: int) -> None:
        super().join(other, number)
        self.rules += other.rules
        for name in _HELD:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        # The cache counts on from its longest text, which may have left; what counts is who is here now.
        mine = replace(self.cache, longest=int(self.lengths.max()))
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.left = np.concatenate([self.left, other.left])
        self.cache = mine.join(other.cache, int(self.left.max()))

    def write(self, step: Step) -> Tensor:
        """Append, and compute the row of the new token."""
        count = len(self.row)
        segments = Segments(torch.arange(count + 1, dtype=torch.int32, device=self.row.device), 1, count)
        attention = CachedAttention(self.cache, segments)
        self.hidden = self._run(step.token.squeeze(1), self.length, attention)
        self.cache = attention.kept
        if any(self.rules):  # only they make the host wait for the tokens
            for rules, token in zip(self.rules, step.token[:, 0].tolist(), strict=True):
                if rules is not None:
                    rules.note([len(rules.fills[0]) + 1], [token])
        self.length = self.length + 1
        self.lengths, self.left = self.lengths + 1, self.left - 1
        return step.place

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, PrefixCache]:
        """Compute everything that is given. Returns the hidden rows of the last tokens, and a cache with room for what
        will be written."""
        device = self.family.device
        tokens = torch.tensor([token for row in rows for token in row], device=device)
        positions = torch.cat([torch.arange(len(row)) for row in rows]).to(device)
        columns = torch.arange(self.lengths.max(), device=device)
        packing = Packing(columns < self.length[:, None], counts=self.lengths)
        record: list[tuple[Tensor, Tensor]] = []
        prefix_lm = self.family.model.prefix_lm
        attention = attention_over(packing, self.before, prefix_lm, record=record, causal=True)
        hidden = self._run(tokens, positions, attention, packing.starts + self.length - 1)
        return hidden, PrefixCache.of(record, packing.segments, int(self.left.max()))

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        with self.family.backbone.autocast():
            hidden: Tensor = self.family.backbone(tokens, positions, attention, wanted=wanted)
        return hidden
