"""One set of weights, taught both ways: a filler (fill.py) that can also insert anywhere (ilm.py, with gates).

- Layout and sight are data, so one network serves both. In training every text is laid out twice, with blanks of its
  own each time: as a filler has it, and as an ILM has it, partly filled in. Both lie in one buffer, and go through the
  network together. What tells them apart is <stop>, which only rows of an ILM begin with.
- `decode.order: auto` writes blanks from left to right, with an exact cache. Any other order is an ILM's: a token at
  the place that the order chooses, wherever a gate says that something is missing, and all rows are computed anew.
- Likelihoods are the filler's, which are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.packing import Joined
from insertlm.core.section import Fraction, NonNegative
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, Losses, Noise, Rows
from insertlm.families.corruption.base import Corruption
from insertlm.families.corruption.packed import corrupt, packed_length
from insertlm.families.fill import FillConfig, Filler
from insertlm.families.ilm import (
    ILM,
    IlmConfig,
    IlmWriter,
    Inserting,
    StopHead,
    check_places,
    gate_losses,
    token_losses,
)
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import Writer
from insertlm.nn.attention import PackedAttention
from insertlm.nn.fused import whole_blocks
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Both", "BothConfig"]


class BothConfig(FillConfig, frozen=True, kw_only=True, tag="both"):
    """The `family` section of a recipe for weights that are taught both ways."""

    targets: Literal["any", "first"] = "any"  # which missing tokens of a slot are asked for: all, or the leftmost
    blanks: Fraction = 0.85  # share of the texts that are inserted into whose blanks are partly filled in; see ilm.py
    insertion: NonNegative = 16.0  # weight of a text's insertions, in tokens of fills

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sight != "both" or self.positions != "blank":
            raise ValueError("family both: expected sight: both and positions: blank, which an ILM needs")

    @property
    def ilm(self) -> IlmConfig:
        return IlmConfig(stop="slots", targets=self.targets, blanks=self.blanks)

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> Both:
        if model.prefix_lm:
            raise InsertlmError("model.prefix_lm: expected false with family both, got true")
        return Both(self, model, tokenizer)


class Both(Filler, Inserting):
    abilities = replace(ILM.abilities, takes_hints=True, weighs_texts=True)
    gated = True
    config: BothConfig

    def __init__(self, config: BothConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, model, tokenizer)
        hints, in_step = config.hints > 0.0, config.in_step > 0.0
        self.from_left_to_right: Abilities = replace(Filler.abilities, takes_hints=hints, parallel=in_step)
        self.abilities = replace(Both.abilities, takes_hints=hints)
        self.stop = StopHead(model.width)
        # Two, because the thread that asks for lengths must not touch the device.
        self.corruption = self.corruption_on_host = self._corruption()

    # --- Learning

    def _apply(self, *arguments: Any, **more: Any) -> Both:
        """Moves weights and buffers. A corruption is made here and not in a step, which is compiled."""
        super()._apply(*arguments, **more)  # type: ignore[no-untyped-call]
        self.corruption = self._corruption()
        return self

    def _corruption(self) -> Corruption:
        return self.config.ilm.corruption(self.traits)

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        fills, insertions = _apart(noise)
        return super().visible(rows, fills) + packed_length(self._with_stop(rows), insertions, self.corruption_on_host)

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """A filler's loss, and an ILM's: each text's insertions count as much as so many tokens of fills."""
        fills, insertions = _apart(noise)
        x = self.corrupted(rows, fills, capacity)
        # A row of an ILM has at most one token more than the same text has as a filler's, so these are about half.
        most = None if capacity is None else whole_blocks((capacity + len(rows.target)) // 2)
        y = corrupt(self._with_stop(rows), insertions, most, self.corruption)
        joined = Joined(x.packing, y.packing, capacity)
        number = torch.arange(y.packing.total, device=x.rows.device)
        wanted = torch.cat([x.rows, (joined.begin + number).clamp(max=(joined.segments.total or 0) - 1)])
        keys = joined(x.dropout, y.dropout) if self.training else None
        assert x.order is not None  # which a layout with `sight: both` has
        attention = PackedAttention(joined.segments, order=joined(x.order, torch.zeros_like(y.text)))
        tokens, positions = joined(x.tokens, y.tokens), joined(x.positions, y.positions)
        hidden = self.backbone(tokens, positions, attention, keys=keys, wanted=wanted)
        first = len(x.rows)
        every = torch.arange(first, device=hidden.device)
        cells = torch.cat([every, first + y.slots.flatten()]), torch.cat([x.words, y.target.flatten()])
        mass, score = slot_scores(hidden, self.unembedding.weight, *cells)
        with torch.autocast(hidden.device.type, enabled=False):
            filled = self.mean_losses(x, mass[:first], score[:first])
            token = token_losses(mass[first:], score[first:].view_as(y.target), y)
            gate = gate_losses(self.stop, hidden[first:], y, most)
        assert filled.over is not None
        # A sum over texts for a sum over tokens, so that the loss of a batch is that of its pieces.
        total = filled.total + self.config.insertion * (token + gate).sum() / filled.over["loss"]
        parts = {"insertion_loss": token.mean().detach(), "gate_loss": gate.mean().detach()}
        return Losses(total, {**filled.parts, **parts}, filled.over)

    def _with_stop(self, rows: Rows) -> Rows:
        """As an ILM has it: <stop> before <bos>."""
        last = rows.given_length[:, None]
        given = F.pad(rows.given, (0, 1)).scatter(1, last - 1, self.specials.stop).scatter(1, last, self.specials.bos)
        return replace(rows, given=given, given_length=rows.given_length + 1)

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        if settings.order == "auto":
            self.from_left_to_right.check(settings)
            return super().check(prompts, settings)
        if any(prompt.words for prompt in prompts):
            raise InsertlmError("decode.order: hints about words need auto, from left to right")
        check_places(settings)
        return Family.check(self, prompts, settings)

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        if settings.order == "auto":
            return super().writer(prompts, settings, longest)
        return IlmWriter(self, prompts, settings, longest)


def _apart(noise: Noise) -> tuple[Noise, Noise]:
    """For the two ways of a text, or both would have the same blanks."""
    return noise.copy(0, 2), noise.copy(1, 2)
