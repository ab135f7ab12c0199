"""The masked diffusion model, the paper's rival: the method, whole, in one file.

Design choices, the published ones unless said:
- A row reads `prefix <bos> block`. The block has a fixed number of cells: the text, then <pad> to its end. Pads are
  tokens like others, masked, predicted and in the loss: this is how the model decides how long a text is. We pad to the
  longest target, the published code to the longest row. The prefix is never masked and never predicted.
- Noise: a time t uniform on (0.001, 1) for every example; every cell of the block is masked with chance (1 − ε)t,
  ε = e^-10, independently (the log-linear schedule). Times are not stratified over the batch, because noise depends
  only on seed, example and epoch. (`stretch`, which is not published: in that share of the examples one whole stretch
  of the text is masked and nothing else. It may run over the end to the beginning, and its share of the block is the
  time. The visible cells then stand together, as they do when writing from left to right; for the reasons see
  docs/log.md.)
- Loss: the cross-entropy of masked cells, times 1/t, over the number of all cells of the block. This is the bound on
  the likelihood, as in MDLM; the published code divides by the number of masked cells.
- A cell holds a word or <pad>. Other special tokens, <mask> too, have no probability, and a cell that is not masked
  stays as it is (MDLM's SUBS). The published code learns over the whole vocabulary.
- Every block of the network knows the total noise −log(1 − (1 − ε)t), see nn/adaln.py, which also mends a defect of the
  published network. Prefix rows depend on it too, so there is no `prefix_lm`. The unembedding starts at zero, unless
  it is the embedding too.
- Decoding sees pads just as training does; the published decoder hides as many as the true text has.

Keys for infilling with a pretrained causal model, none of them the paper's:
- `time: false`: no conditioning on time, so that the network is a plain transformer.
- `shift: true`: the row to the left of a cell predicts it, as in a causal model.
- `blanks`: in that share of the examples only what is in gaps is masked, as users leave them (corruption/blanks.py).
  The time is then the share of the block that is masked in the mean.
- `padded: false`: a block is as long as its text. Then three times as many short texts fit into a step, but the model
  must be told all lengths.

Decoding (unmasking.py) starts from a block of masks. `decode.order` decides which are taken off next:
- `random` (and `auto`): tau-leaping, K = `decode.max_steps` steps of equal length from t = 1 to t = 0. A cell masked at
  t is still masked at s with chance (1 − ε)s / (1 − ε)t = s/t, so in step k = 0 … K − 1, from 1 − k/K to 1 − (k + 1)/K,
  its mask comes off with chance 1/(K − k). So its step is uniform on the K, whatever the model predicts, and the last
  step takes off all masks that are left. We draw the step at the start, and every text leaps to the next step at which
  something comes off, at that step's t = 1 − k/K: the network runs at most once per cell, however large K is. (The
  published decoder gives its last step the noise of its first.)
- `certainty`: the cells whose likeliest token is likeliest; `margin`: those where it leads the second by most (arXiv
  2502.06768). `decode.parallel` cells a step, 0 = all. The time is the masked share of the block.
`decode.max_tokens` changes nothing of this: it ends a text before the first word too many.
Infilling: the block holds what is given, masks in every open gap, and pads behind the text. The number of masks must be
known (at least = at most), since a mask becomes one word and never <pad>. Decoding starts at the time that this share
of masks has in training; with tau-leaping, step k is at (1 − k/K) times that. (The published decoder starts from t = 1,
in a row without pads.) Banned words have no probability, and where a gap must begin with a head, nothing else has. A
word cannot be required.
No time is below the least of training. Temperature, top-k and top-p act on the choice of a token in its cell, not on
that of cells. Temperature 1 samples the model, as published; at 0, the default, each cell gets its likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import chance, hash32, randint, stretch, uniform
from insertlm.core.packing import Packing
from insertlm.core.section import Count, Fraction
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.families.corruption.blanks import BlanksConfig, cut
from insertlm.families.unmasking import LEAPING, UnmaskingWriter, infills, masks_of
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.writer import Writer
from insertlm.nn.adaln import AdaptiveBlock, AdaptiveNorm, TimeFeatures
from insertlm.nn.attention import PackedAttention
from insertlm.nn.fused import whole_blocks
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import Block
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer
from insertlm.text.units import token_traits

__all__ = ["MDM", "MdmConfig", "mask_cells", "times", "total_noise"]

_LEAST_TIME = 1e-3  # the loss divides by the time
_EPSILON = math.exp(-10)  # keeps the total noise finite at t = 1

# Streams of noise: what a draw is for. Cells of the block follow from _CELLS on.
_TIME, _DROPOUT, _CELLS = 0, 1, 2
_STRETCHED, _FIRST, _SIZE, _IN_BLANKS = -1, -2, -3, -4
_BLANKS = BlanksConfig(suffix=0.0, everything=0.0)  # ends and whole texts are among those with masks anywhere


class MdmConfig(FamilyConfig, frozen=True, kw_only=True, tag="mdm"):
    """The `family` section of a recipe for an MDM."""

    block: Count  # cells of the text, padding included
    stretch: Fraction = 0.0  # share of the examples in which one whole stretch of the text is masked
    blanks: Fraction = 0.0  # share of the examples in which only what is in their blanks is masked
    time: bool = True  # whether every block of the network knows the noise
    shift: bool = False  # whether a cell is predicted by the row to its left, as in a causal model
    padded: bool = True  # whether a block ends with <pad>, so that the model decides how long a text is

    def __post_init__(self) -> None:
        if self.stretch + self.blanks > 1:
            raise ValueError(f"stretch and blanks: expected 1 or less together, got {self.stretch + self.blanks}")

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> MDM:
        return MDM(self, model, tokenizer)

    def longest_row(self, prefix: int, target: int) -> int:
        if target > self.block:
            raise ValueError(f"family.block is {self.block}; the task has targets of {target} tokens")
        return prefix + self.block + MDM.framing


# --- Noise ------------------------------------------------------------------------------------------------------------


def times(noise: Noise) -> Tensor:
    """[B], uniform on (0.001, 1)"""
    return _LEAST_TIME + (1 - _LEAST_TIME) * uniform(*noise, _TIME)


def mask_cells(time: Tensor, block: int, noise: Noise) -> Tensor:
    """Which cells are masked, [B, block] bool. time: [B]"""
    cell = torch.arange(block, device=time.device)
    draw = uniform(noise.seed, noise.example[:, None], noise.epoch[:, None], _CELLS + cell)
    return draw < (1 - _EPSILON) * time[:, None]


def total_noise(time: Tensor) -> Tensor:
    """What the network knows of the time: −log of the chance that a cell is not masked."""
    return -torch.log(1 - time + _EPSILON * time)


# --- Model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Laid:
    """Rows `prefix <bos> block`, packed.

    tokens: [T]   owner: [T] the example of each   place: [B, G + block] the position of each cell in its row
    packing: of that matrix   cells: [B, block] the packed row of each cell of the block
    """

    tokens: Tensor
    owner: Tensor
    place: Tensor
    packing: Packing
    cells: Tensor


def lay_out(
    given: Tensor,
    given_length: Tensor,
    block: Tensor,
    capacity: int | None = None,
    counts: NDArray[np.int64] | None = None,
    real: Tensor | None = None,
) -> Laid:
    """given: [B, G]   given_length: [B]   block: [B, block]   capacity, counts: see Packing
    real: [B, block] bool, the cells that there are (None: all)"""
    width = given.shape[1]
    here = torch.arange(width, device=given.device) < given_length[:, None]
    cells = torch.ones_like(block, dtype=torch.bool) if real is None else real
    packing = Packing(torch.cat([here, cells], 1), capacity, counts)
    row = torch.arange(len(given), device=given.device)
    return Laid(
        tokens=packing.pack(torch.cat([given, block], 1)),
        owner=packing.pack(row[:, None].expand_as(packing.where)),
        place=packing.where - packing.starts[:, None],
        packing=packing,
        cells=packing.where[:, width:],
    )


class MDM(Family):
    layer: type[Block] = AdaptiveBlock
    framing = 1
    abilities = Abilities(
        orders=("random", "certainty", "margin"),
        parallel=True,
        supports_constraints=True,
        schedules_steps=True,
        decides_length=False,
    )
    words: Tensor
    place_of: Tensor
    traits: Tensor

    def __init__(self, config: MdmConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        if model.prefix_lm:
            raise InsertlmError("model.prefix_lm: expected false for an mdm: its prefix rows depend on the time")
        self.layer = AdaptiveBlock if config.time else Block  # before the backbone is built of it
        super().__init__(model, tokenizer)
        self.config = config
        self.time = TimeFeatures(model) if config.time else None
        self.norm = AdaptiveNorm(model) if config.time else None
        self.unembedding = self.backbone.unembedding()
        if not model.tied:
            nn.init.zeros_(self.unembedding.weight)
        # The softmax is over what a cell can hold, in an order of its own; targets are looked up in `place_of`.
        words = torch.tensor([*tokenizer.writable, self.specials.pad])
        place_of = torch.zeros(tokenizer.size, dtype=torch.int64).scatter(0, words, torch.arange(len(words)))
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("place_of", place_of, persistent=False)  # where a token is among them
        traits = torch.from_numpy(token_traits(tokenizer)) if config.blanks else torch.zeros(0, dtype=torch.uint8)
        self.register_buffer("traits", traits, persistent=False)

    def hidden(self, x: Laid, time: Tensor, wanted: Tensor, keys: Tensor | None = None) -> Tensor:
        """What the unembedding reads for some packed cells, [W, width]. time: [B]   wanted: [W]   keys: [T]"""
        attention = PackedAttention(x.packing.segments)
        positions = x.packing.pack(x.place)
        if self.config.shift:  # before every cell there is one, or <bos>
            wanted = (wanted - 1).clamp(min=0)
        if self.time is None or self.norm is None:
            plain: Tensor = self.backbone(x.tokens, positions, attention, keys=keys, wanted=wanted)
            return plain
        condition = self.time(total_noise(time)), x.owner
        hidden = self.backbone(x.tokens, positions, attention, keys=keys, wanted=wanted, condition=condition)
        with torch.autocast(hidden.device.type, enabled=False):  # heads run in float32
            normed: Tensor = self.norm(hidden, (condition[0], x.owner.index_select(0, wanted)))
        return normed

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        """Given are the prefix and <bos>; the target is the whole block, which has no padding but its <pad> tokens, or
        the text alone."""
        rows = Rows.of(examples, self.specials.bos)
        if not self.config.padded:
            return rows
        block = torch.full((len(rows.target), self.config.block), self.specials.pad)
        block[:, : rows.target.shape[1]] = torch.where(rows.real, rows.target, self.specials.pad)
        return replace(rows, target=block, target_length=torch.full_like(rows.target_length, self.config.block))

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        return rows.given_length + rows.target_length  # masks take up rows as words do

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """The bound on the negative log-likelihood per cell. token_loss: the mean cross-entropy of masked cells"""
        time, masked = self.noised(rows, noise)
        block = torch.where(masked, self.specials.mask, rows.target)
        x = lay_out(rows.given, rows.given_length, block, capacity, real=None if self.config.padded else rows.real)
        key = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _DROPOUT, x.place)
        keys = x.packing.pack(key).int() if self.training else None
        # Cells that are not masked are computed too, and their loss is dropped: shapes stay fixed that way.
        cells = Packing(rows.real, None if capacity is None else min(capacity, whole_blocks(block.numel())))
        hidden = self.hidden(x, time, cells.pack(x.cells), keys)
        lost = self._cross_entropy(hidden, cells.pack(rows.target)) * cells.pack(masked)
        count, size = masked.sum(), rows.target_length.sum()
        loss = (lost / cells.pack(time[:, None].expand_as(masked)).clamp(min=_LEAST_TIME)).sum() / size
        token_loss = lost.sum() / count.clamp(min=1)
        return Losses(loss, {"token_loss": token_loss.detach()}, over={"loss": size, "token_loss": count})

    def noised(self, rows: Rows, noise: Noise) -> tuple[Tensor, Tensor]:
        """The times, [B], and which cells are masked, [B, block] bool."""
        time, cells = times(noise), rows.target.shape[1]
        masked = mask_cells(time, cells, noise) & rows.real
        # Blanks and stretches lie in the text, not in the padding behind it.
        length = (rows.real & (rows.target != self.specials.pad)).sum(1)
        if self.config.stretch:
            one = stretch(length, randint(length, *noise, _SIZE) + 1, cells, *noise, _FIRST)
            share = (one.sum(1) / rows.target_length.clamp(min=1)).clamp(min=_LEAST_TIME)
            stretched = chance(self.config.stretch, *noise, _STRETCHED)
            time, masked = torch.where(stretched, share, time), torch.where(stretched[:, None], one, masked)
        if self.config.blanks:
            inside = cut(rows.target, length, self.traits, _BLANKS, noise).gap_of(cells) > 0
            share = (time * inside.sum(1) / rows.target_length.clamp(min=1)).clamp(min=_LEAST_TIME)
            # The same draw that chooses stretches, so that the shares add up.
            chosen = uniform(*noise, _STRETCHED) >= 1.0 - self.config.blanks
            time, masked = torch.where(chosen, share, time), torch.where(chosen[:, None], masked & inside, masked)
        return time, masked

    def _cross_entropy(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Among words and <pad>. hidden: [N, width]   target: [N]. Returns [N]"""
        every = torch.arange(len(hidden), device=hidden.device)
        words = self.unembedding.weight.index_select(0, self.words)
        mass, score = slot_scores(hidden, words, every, self.place_of[target])
        return mass - score

    # --- Writing

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        longest = super().check(prompts, settings)
        for prompt in prompts:
            self._check(prompt)
        row = max((len(prompt.prefix) for prompt in prompts), default=0) + self.framing + self.config.block
        if row > longest:
            raise InsertlmError(f"a prompt makes a row of {row} tokens, its block included; {longest} are allowed")
        if settings.parallel != 1 and settings.order in LEAPING:
            raise InsertlmError(
                "decode.parallel: expected 1 for a random order, where decode.max_steps says how many tokens come at "
                f"once, got {settings.parallel}"
            )
        return longest

    def _check(self, prompt: Prompt) -> None:
        """Refuse a prompt that masks cannot serve."""
        if not {self.specials.mask, self.specials.pad}.isdisjoint(prompt.start):
            raise InsertlmError("a prompt of an mdm has a mask or padding in its text; expected words, and gaps")
        if prompt.required or any(len(run) > 1 for run in prompt.banned):
            raise InsertlmError("an mdm can only be kept from writing single tokens; a word is required, or of several")
        if infills(prompt):
            if unknown := [gap for gap in prompt.gaps if len({*prompt.bounds.get(gap, Bounds())}) > 1]:
                raise InsertlmError(
                    f"an mdm infills a known number of tokens; expected least = most (--min, --max), gap {min(unknown)}"
                )
            if (cells := len(prompt.start) + masks_of(prompt)) > self.config.block:
                raise InsertlmError(f"a prompt makes a text of {cells} tokens; the block has {self.config.block}")
        elif not self.config.padded:
            raise InsertlmError(
                "this mdm has learnt no lengths (family.padded: false); expected the number of tokens of every gap"
            )

    def states(
        self,
        given: Tensor,
        given_length: Tensor,
        block: Tensor,
        time: Tensor,
        cell: Tensor,
        lengths: NDArray[np.int64],
    ) -> Tensor:
        """Hidden rows for some cells of blocks with masks, [B · K, width]. time: [B]   cell: [B, K]   lengths: of all
        rows, on the host"""
        real = None if self.config.padded else block != self.specials.pad
        x = lay_out(given, given_length, block, counts=lengths, real=real)
        return self.hidden(x, time.clamp(min=_LEAST_TIME), x.cells.gather(1, cell).flatten())

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return UnmaskingWriter(self, prompts, settings)

    @property
    def longest_text(self) -> int:
        return self.config.block
