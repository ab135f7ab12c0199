"""The filler: blanks of unknown length, written from left to right with both sides in view. The method, whole.

Design choices:
- A row reads `prefix <bos> text`, with `<blank>` wherever something is missing; then, for every blank from left to
  right, `<fill>` and the tokens that go into it. `<blank>` is the vocabulary's <mask>, `<fill>` its <stop>: no family
  uses both for anything else.
- Given rows see all given rows, so both sides of every blank, and no fill. Rows of fills see all given rows and what
  was written before them, in this blank and in those to the left. That is the mask of a prefix language model.
- Blanks can also be written **in step**, one token in each at a time. Then the k-th rows of all fills come together,
  and see each other and all that came before. A share of the examples teaches this order.
- A blank may carry a **hint**, about how many words belong there. Its fill then begins with a token for that number in
  place of `<fill>`. A share of the blanks teaches what hints mean.
- A text that is to be **written on** ends with a blank too, whose fill begins with a token of its own: a blank that
  somebody left at the end of a text wants a phrase, not a page.
- **Positions** put a fill into its place. Given tokens count up, with a jump (`jump`) behind every blank; `<fill>`
  stands at its blank's position, and the tokens behind it at the following ones. So a fill of fewer than `jump` tokens
  lies between its neighbours.
- Every row of a fill predicts the token that comes next there, or `<eos>`, the end of the blank. Nothing else is
  learnt: the loss is the mean cross-entropy over all those predictions in the batch.
- Which tokens are missing in training: see corruption/blanks.py. The rows in memory: corruption/laid_out.py.

Three keys leave out what is new here, to measure what it is worth. With all three, and half of the texts written from
nothing (`everything`), this is the rival that people know: a left-to-right model that has learnt plain texts and
fill-in-the-middle half and half.
- `sight: before`. Given rows see only what is given before them, as in a causal model. Fills still see all of it.
- `positions: plain`. They count the rows. What tells the place of a fill is a number: the k-th blank and its fill begin
  with the same token. Blanks cannot be written in step then, for nobody knows how many rows there will be before the
  second fill; and a hint has no room beside the number.
- `learn: all`. Given tokens are learnt, too, each from what is given before it.

What follows from this:
- One pass teaches every token of every fill, as a left-to-right model learns every token of a text. With nothing given
  it is one.
- A row that has been computed never changes, so writing costs one row a token, and likelihoods are exact.

Decoding: the end of a blank is decided apart from its words, so that temperature and nucleus, which are about words,
do not make fills longer or shorter. It is drawn with the probability that the model gives it; at temperature 0 a blank
ends when that probability reaches `decode.stop_threshold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import chance
from insertlm.core.section import Count, Fraction
from insertlm.families.abilities import Abilities
from insertlm.families.base import FamilyConfig, Losses, Noise, Rows
from insertlm.families.corruption.blanks import MOST, Blanks, BlanksConfig, cut
from insertlm.families.corruption.laid_out import HINTS, Laid, Layout, hint_of, lay_out
from insertlm.families.filling import FillWriter
from insertlm.families.sequential import Sequential, examples_of
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Writer
from insertlm.nn.attention import PackedAttention
from insertlm.nn.eight_bits import EightBits, product, rounded
from insertlm.nn.fused import whole_blocks
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer
from insertlm.text.units import token_traits

__all__ = ["FillConfig", "Filler"]

_HINT, _IN_STEP = -31, -30  # streams of noise, below those of the corruption
_MANY = 256  # texts in a batch


class FillConfig(FamilyConfig, frozen=True, kw_only=True, tag="fill"):
    """The `family` section of a recipe for a filler."""

    suffix: Fraction = 0.15  # of the examples, of which the end is missing, to be written on
    everything: Fraction = 0.1  # of the examples, of which all is missing, to be written from nothing
    share: Fraction = 0.5  # of a text, the most that its blanks take together
    hints: Fraction = 0.25  # of the blanks, which say about how many words belong there
    in_step: Fraction = 0.25  # of the examples, whose blanks are written a token in each at a time
    jump: Count = 64  # positions that stay free behind a blank; longer fills overtake what follows them
    sight: Literal["both", "before"] = "both"  # the sides of itself that a given token sees
    positions: Literal["blank", "plain"] = "blank"  # of a fill: those of its blank, or just behind what is before it
    learn: Literal["fills", "all"] = "fills"  # all: given tokens, too

    def __post_init__(self) -> None:
        if self.positions == "plain" and (self.hints or self.in_step):
            raise ValueError("positions: plain: expected hints: 0 and in_step: 0, which need the positions of blanks")
        if self.learn == "all" and self.sight == "both":
            raise ValueError("learn: all: expected sight: before, because what a token sees it need not learn")

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> Filler:
        return Filler(self, model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        """Positions, of which the jumps take most of what the blanks need."""
        return prefix + 1 + target + MOST * (self.free + 1)

    @property
    def free(self) -> int:
        """How many positions stay free behind a blank."""
        return 0 if self.positions == "plain" else self.jump


class Filler(Sequential):
    framing = 1 + 2 * MOST
    abilities = Abilities(
        parallel=True,
        stop_threshold=True,
        supports_constraints=True,
        takes_hints=True,
        weighs_texts=True,
        left_to_right=True,
    )
    traits: Tensor

    def __init__(self, config: FillConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        plain = config.positions == "plain"
        super().__init__(model, tokenizer, extra=len(HINTS) + 1 + MOST * plain)
        special = self.specials
        self.config = config
        self.abilities = replace(self.abilities, takes_hints=config.hints > 0.0, parallel=config.in_step > 0.0)
        hints, onward = tokenizer.size, tokenizer.size + len(HINTS)
        marks = onward + 1 if plain else None
        ids = special.mask, special.stop, special.eos, hints, onward
        self.layout = Layout(config.free, *ids, causal=config.sight == "before", marks=marks)
        self.blanks = BlanksConfig(suffix=config.suffix, everything=config.everything, share=config.share)
        self.unembedding = self.backbone.unembedding()
        self._rounded: tuple[Tensor, ...] | None = None
        self.register_buffer("traits", torch.from_numpy(token_traits(tokenizer)), persistent=False)

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        """Given: prefix, <bos>."""
        return Rows.of(examples, self.specials.bos)

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        """Every token once, and for every blank <blank> and <fill>."""
        blanks = self._cut(rows, noise)
        return rows.given_length + rows.target_length + 2 * blanks.count

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """Cross-entropy, the mean over all tokens of fills and their ends."""
        x = self.corrupted(rows, noise, capacity)
        hidden = self.hidden(x, x.dropout if self.training else None)
        every = torch.arange(len(hidden), device=hidden.device)
        return self.mean_losses(x, *slot_scores(hidden, self.unembedding.weight, every, x.words))

    def mean_losses(self, x: Laid, mass: Tensor, score: Tensor) -> Losses:
        """mass, score: [P], the log-sum-exp of the logits of each row that predicts, and that of what comes next"""
        count = x.real.sum()
        surprise = (mass - score) * x.real
        ends = (x.words == self.specials.eos) & (x.real > 0)
        loss = surprise.sum() / count
        parts = {"token_loss": _mean(surprise, ~ends & (x.real > 0)), "end_loss": _mean(surprise, ends)}
        over = {"loss": count, "token_loss": count - ends.sum(), "end_loss": ends.sum()}
        return Losses(loss, parts, over)

    def hidden(self, x: Laid, keys: Tensor | None) -> Tensor:
        """Of the rows that predict, [P, width]. keys: [T] for dropout"""
        attention = PackedAttention(x.packing.segments, order=x.order, causal=x.order is None)
        hidden: Tensor = self.backbone(x.tokens, x.positions, attention, keys=keys, wanted=x.rows)
        return hidden

    def corrupted(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Laid:
        blanks = self._cut(rows, noise)
        hint = hint_of(blanks.words(rows.target, self.traits))
        number = torch.arange(MOST, device=hint.device)
        hinted = chance(self.config.hints, noise.seed, noise.example[:, None], noise.epoch[:, None], _HINT, number)
        fill = number.new_tensor([self.layout.opening(None, number=k) for k in range(MOST)])
        plain = torch.where(blanks.onward[:, None], self.layout.onward, fill)
        openings = torch.where(hinted, self.layout.hints + hint, plain)
        in_step = chance(self.config.in_step, *noise, _IN_STEP) if self.config.in_step else None
        all_rows, most = self.config.learn == "all", None
        # About a quarter of the rows predict. With many texts it is never nearly half, and the loss of rows that are
        # spare would cost a tenth of a step.
        few = self.config.suffix + self.config.everything <= 0.4 and not all_rows
        if capacity is not None and len(rows.target) >= _MANY and few:
            most = whole_blocks(capacity // 2)
        return lay_out(
            rows, blanks, noise, self.layout, capacity, most=most, openings=openings, in_step=in_step, all_rows=all_rows
        )

    def check_completion(self, completion: Completion) -> None:
        super().check_completion(completion)
        prompt, step = completion.prompt, 1 + self.layout.jump
        gaps, given = sorted(prompt.gaps), len(prompt.prefix) + 1
        ends = [
            given + gap + k * step + len(fill) for k, (gap, fill) in enumerate(zip(gaps, completion.fills, strict=True))
        ]
        behind = given + len(prompt.start) + step * sum(gap < len(prompt.start) for gap in gaps)
        if (last := max(behind, 1 + max(ends, default=0))) > (most := self.model.max_length):
            raise InsertlmError(f"the text and its {len(gaps)} blanks need {last:,} positions; the model has {most:,}")

    def predict(self, completions: Sequence[Completion]) -> Tensor:
        rows = self.rows(examples_of(completions)).to(self.device)
        edges, openings = list[list[tuple[int, int]]](), list[list[int]]()
        for each in completions:
            spare = MOST - len(each.fills)
            edges.append([*each.ranges, *[(len(each.text), len(each.text))] * spare])
            prompt, gaps = each.prompt, sorted(each.prompt.gaps)
            opened = [
                self.layout.opening(prompt.words.get(gap), prompt.writes_on(gap), k) for k, gap in enumerate(gaps)
            ]
            openings.append([*opened, *[self.layout.fill] * spare])
        count = torch.tensor([len(each.fills) for each in completions], device=self.device)
        begin, end = torch.tensor(edges, device=self.device).unbind(2)
        blanks = Blanks(count, begin, end, onward=torch.zeros_like(count, dtype=torch.bool))
        nothing = Noise(0, *torch.zeros(2, len(completions), dtype=torch.int64, device=self.device))
        x = lay_out(rows, blanks, nothing, self.layout, openings=torch.tensor(openings, device=self.device))
        with self.backbone.autocast():
            return self.hidden(x, None)

    def _cut(self, rows: Rows, noise: Noise) -> Blanks:
        traits = self.traits.to(rows.target.device)  # the trainer asks for rows on the host
        return cut(rows.target, rows.target_length, traits, self.blanks, noise)

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        longest = super().check(prompts, settings)
        if settings.parallel > 1:
            raise InsertlmError(
                f"decode.parallel: a filler writes a token a step (1), or one in every open blank (0); got "
                f"{settings.parallel}"
            )
        for prompt in prompts:
            count = len(prompt.gaps)
            if count > MOST:
                raise InsertlmError(f"a filler has learnt texts with up to {MOST} blanks; got {count}")
            # Positions jump behind every blank, and those of a fill count on from its own.
            used = len(prompt.prefix) + len(prompt.start) + 1 + count * (1 + self.layout.jump)
            least = [*map(prompt.owed, sorted(prompt.gaps))]
            needed = max(used, used + least[-1] - self.layout.jump) if least else used
            if needed > self.model.max_length:
                raise InsertlmError(
                    f"a prompt of {len(prompt.prefix) + len(prompt.start):,} tokens with {count} blanks needs "
                    f"{needed:,} positions; the model has {self.model.max_length:,}"
                )
        return longest

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return FillWriter(self, self.layout, prompts, settings, longest)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of all ids, for writing, [R, d] to [R, V]. In the precision of the blocks; an unembedding rounded to that is
        kept."""
        weight: Tensor = self.unembedding.weight
        precision, eight_bits = self.backbone.precision, isinstance(self.backbone.blocks[0].qkv, EightBits)
        if weight.dtype == precision:
            return F.linear(hidden.to(precision), weight)
        if self._rounded is None or self._rounded[0].device != weight.device:
            self._rounded = rounded(weight) if eight_bits else (weight.to(precision),)
        return (product if eight_bits else F.linear)(hidden.to(precision), *self._rounded)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return ((values * chosen).sum() / chosen.sum().clamp(min=1)).detach()
