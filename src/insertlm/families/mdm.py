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

Decoding starts from a block of masks. `decode.order` decides which are taken off next:
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import chance, hash32, randint, stretch, uniform
from insertlm.core.packing import Packing
from insertlm.core.section import Count, Fraction
from insertlm.families.abilities import Abilities
from insertlm.families.base import Family, FamilyConfig, Losses, Noise, Rows
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step, Writer
from insertlm.nn.adaln import AdaptiveBlock, AdaptiveNorm, TimeFeatures
from insertlm.nn.attention import PackedAttention
from insertlm.nn.losses import slot_scores
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import Tokenizer

__all__ = ["MDM", "MdmConfig", "mask_cells", "times", "total_noise"]

_LEAST_TIME = 1e-3  # the loss divides by the time
_EPSILON = math.exp(-10)  # keeps the total noise finite at t = 1

# Streams of noise: what a draw is for. Cells of the block follow from _CELLS on.
_TIME, _DROPOUT, _CELLS = 0, 1, 2
_STRETCHED, _FIRST, _SIZE = -1, -2, -3
_STEP, _TOKEN = 0, 1

_LEAPING = ("auto", "random")  # orders by tau-leaping
_HELD = ("given_length", "tokens", "left", "steps", "count", "time", "barred", "leading", "headless")  # of every text


class MdmConfig(FamilyConfig, frozen=True, kw_only=True, tag="mdm"):
    """The `family` section of a recipe for an MDM."""

    block: Count  # cells of the text, padding included
    stretch: Fraction = 0.0  # share of the examples in which one whole stretch of the text is masked

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
) -> Laid:
    """given: [B, G]   given_length: [B]   block: [B, block]   capacity, counts: see Packing"""
    width = given.shape[1]
    here = torch.arange(width, device=given.device) < given_length[:, None]
    packing = Packing(torch.cat([here, torch.ones_like(block, dtype=torch.bool)], 1), capacity, counts)
    row = torch.arange(len(given), device=given.device)
    return Laid(
        tokens=packing.pack(torch.cat([given, block], 1)),
        owner=packing.pack(row[:, None].expand_as(packing.where)),
        place=packing.where - packing.starts[:, None],
        packing=packing,
        cells=packing.where[:, width:],
    )


class MDM(Family):
    layer = AdaptiveBlock
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

    def __init__(self, config: MdmConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        if model.prefix_lm:
            raise InsertlmError("model.prefix_lm: expected false for an mdm: its prefix rows depend on the time")
        super().__init__(model, tokenizer)
        self.config = config
        self.time = TimeFeatures(model)
        self.norm = AdaptiveNorm(model)
        self.unembedding = self.backbone.unembedding()
        if not model.tied:
            nn.init.zeros_(self.unembedding.weight)
        # The softmax is over what a cell can hold, in an order of its own; targets are looked up in `place_of`.
        words = torch.tensor([*tokenizer.writable, self.specials.pad])
        place_of = torch.zeros(tokenizer.size, dtype=torch.int64).scatter(0, words, torch.arange(len(words)))
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("place_of", place_of, persistent=False)  # where a token is among them

    def hidden(self, x: Laid, time: Tensor, wanted: Tensor, keys: Tensor | None = None) -> Tensor:
        """What the unembedding reads of some packed rows, [W, width]. time: [B]   wanted: [W]   keys: [T] of dropout"""
        condition = self.time(total_noise(time)), x.owner
        attention = PackedAttention(x.packing.segments)
        positions = x.packing.pack(x.place)
        hidden = self.backbone(x.tokens, positions, attention, keys=keys, wanted=wanted, condition=condition)
        with torch.autocast(hidden.device.type, enabled=False):  # heads run in float32
            normed: Tensor = self.norm(hidden, (condition[0], x.owner.index_select(0, wanted)))
        return normed

    # --- Learning

    def rows(self, examples: Examples) -> Rows:
        """Given are the prefix and <bos>; the target is the whole block, which has no padding but its <pad> tokens."""
        rows = Rows.of(examples, self.specials.bos)
        block = torch.full((len(rows.target), self.config.block), self.specials.pad)
        block[:, : rows.target.shape[1]] = torch.where(rows.real, rows.target, self.specials.pad)
        return replace(rows, target=block, target_length=torch.full_like(rows.target_length, self.config.block))

    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        return rows.given_length + rows.target_length  # masks take up rows as words do

    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """The bound on the negative log-likelihood per cell. token_loss: the mean cross-entropy of masked cells"""
        time, masked = self.noised(rows, noise)
        block = torch.where(masked, self.specials.mask, rows.target)
        x = lay_out(rows.given, rows.given_length, block, capacity)
        key = hash32(noise.seed, noise.example[:, None], noise.epoch[:, None], _DROPOUT, x.place)
        keys = x.packing.pack(key).int() if self.training else None
        hidden = self.hidden(x, time, x.cells.flatten(), keys)
        # Cells that are not masked are computed too, and their loss is dropped: shapes stay fixed that way.
        lost = self._cross_entropy(hidden, rows.target.flatten()).view_as(masked) * masked
        cells = masked.sum()
        token_loss = lost.sum() / cells.clamp(min=1)
        return Losses((lost / time[:, None]).mean(), {"token_loss": token_loss.detach()}, over={"token_loss": cells})

    def noised(self, rows: Rows, noise: Noise) -> tuple[Tensor, Tensor]:
        """The times, [B], and which cells are masked, [B, block] bool."""
        time, cells = times(noise), self.config.block
        masked = mask_cells(time, cells, noise)
        if not self.config.stretch:
            return time, masked
        length = (rows.target != self.specials.pad).sum(1)  # stretches lie in the text, not in the padding behind it
        one = stretch(length, randint(length, *noise, _SIZE) + 1, cells, *noise, _FIRST)
        share = (one.sum(1) / cells).clamp(min=_LEAST_TIME)
        stretched = chance(self.config.stretch, *noise, _STRETCHED)
        return torch.where(stretched, share, time), torch.where(stretched[:, None], one, masked)

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
        if settings.parallel != 1 and settings.order in _LEAPING:
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
        if _infills(prompt):
            if unknown := [gap for gap in prompt.gaps if len({*prompt.bounds.get(gap, Bounds())}) > 1]:
                raise InsertlmError(
                    f"an mdm infills a known number of tokens; expected least = most (--min, --max), gap {min(unknown)}"
                )
            if (cells := len(prompt.start) + _masks(prompt)) > self.config.block:
                raise InsertlmError(f"a prompt makes a text of {cells} tokens; the block has {self.config.block}")

    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        return _Writing(self, prompts, settings)

    @property
    def longest_text(self) -> int:
        return self.config.block


def _infills(prompt: Prompt) -> bool:
    """Whether the length of the text is known. If not, the whole block is masked and the model decides the length."""
    return bool(prompt.start or prompt.open is not None or prompt.bounds)


def _masks(prompt: Prompt) -> int:
    return sum(least for least, _ in prompt.bounds.values())


class _Writing(BatchWriter):
    """An MDM at work.

    given: [B, G], prefix and <bos>   tokens: [B, block], <mask> where nothing is written
    left: [B], how many words may be written yet
    steps: [B, block], the step in which tau-leaping writes each cell   count: [B], how many steps it has
    time: [B], at the start   barred: [B, words] bool, what no cell may hold
    leading: [B, block] bool, cells that begin headed gaps   headless: [B, words] bool, what those may not hold
    """

    mixes = True

    def __init__(self, family: MDM, prompts: Sequence[Prompt], settings: DecodeConfig) -> None:
        super().__init__(prompts, settings, family.device)
        self.family = family
        device, block = family.device, family.config.block
        rows = [torch.tensor([*prompt.prefix, family.specials.bos]) for prompt in prompts]
        self.lengths = np.array([len(row) + block for row in rows])
        self.given = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        self.given_length = torch.tensor([len(row) for row in rows], device=device)
        self.tokens = torch.tensor([self._block(prompt) for prompt in prompts], device=device)
        self.left = torch.full_like(self.seed, settings.max_tokens or block)
        self.time = (self.tokens == family.specials.mask).float().mean(1)
        self.barred = torch.stack([self._out_of_play(prompt) for prompt in prompts])
        self.leading = torch.tensor([self._leading(prompt) for prompt in prompts], device=device)
        self.headless = torch.stack([~self._among_words(prompt.heads) for prompt in prompts])
        cell = torch.arange(block, device=device)
        self.count = torch.full_like(self.seed, settings.max_steps)
        self.steps = randint(self.count[:, None], _STEP, self.seed[:, None], cell)

    def _block(self, prompt: Prompt) -> list[int]:
        """The block at the start."""
        block, (*_, pad, mask) = self.family.config.block, self.family.specials
        if not _infills(prompt):
            return [mask] * block
        cells = []
        for gap, token in enumerate([*prompt.start, pad]):
            cells += [mask] * prompt.bounds.get(gap, Bounds()).least + [token]
        return (cells + [pad] * block)[:block]

    def _out_of_play(self, prompt: Prompt) -> Tensor:
        """What no cell may hold, [words] bool: banned words, and <pad> where the length is known."""
        specials = [self.family.specials.pad] * _infills(prompt)
        return self._among_words([*specials, *(run[0] for run in prompt.banned)])

    def _among_words(self, ids: Collection[int]) -> Tensor:
        """Which of the words these are, [words] bool."""
        wanted = torch.tensor([*ids], dtype=torch.int64, device=self.family.device)
        return torch.isin(self.family.words, wanted)

    def _leading(self, prompt: Prompt) -> list[bool]:
        """Which cells begin a gap that must begin with a head, [block]."""
        cells = [False] * (self.family.config.block + 1)  # behind the last token there may be no room for a gap
        masks = 0
        for gap in range(len(prompt.start) + 1):
            cells[gap + masks] = gap in prompt.headed
            masks += prompt.bounds.get(gap, Bounds()).least
        return cells[:-1]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.lengths = self.lengths[rows.cpu().numpy()]
        self.given = self.given.index_select(0, rows)
        for name in _HELD:
            setattr(self, name, getattr(self, name).index_select(0, rows))

    def join(self, other: Self, number: int) -> None:
        super().join(other, number)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.given = nn.utils.rnn.pad_sequence([*self.given, *other.given], batch_first=True)
        for name in _HELD:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def step(self, number: int) -> Step:
        """The next cells of every text, and a token for each."""
        masked = self.tokens == self.family.specials.mask
        complete = ~masked.any(1)
        unknown = torch.full_like(complete, torch.nan, dtype=torch.float32)
        if bool(complete.all()):  # the network need not run
            nothing = self.tokens[:, :0]
            return Step(complete, ~complete, unknown, nothing, nothing, nothing.float())
        cell, expected = self._leap(masked) if self.settings.order in _LEAPING else self._plan(masked)
        choice = self._choose(cell, expected)
        log_probability = expected.gather(2, choice[:, :, None]).squeeze(2)
        token = self.family.words[choice]
        # Padding is no token of the text. Of several words, those on the left and the surest have their turn first.
        word = (cell >= 0) & (token != self.family.specials.pad)
        allowed = ~word | (word.cumsum(1) <= self.left[:, None])
        full = (self.left == 0) & ~allowed.all(1)
        return Step(complete, full, unknown, torch.where(allowed, cell, -1), token, log_probability)

    def write(self, step: Step) -> Tensor:
        specials, spare = self.family.specials, self.tokens.shape[1]
        self.left -= ((step.place >= 0) & (step.token != specials.pad)).sum(1)
        cell = torch.where(step.place >= 0, step.place, spare)  # an extra last cell takes what is written nowhere
        self.tokens = F.pad(self.tokens, (0, 1)).scatter(1, cell, step.token)[:, :spare]
        in_text = (self.tokens != specials.mask) & (self.tokens != specials.pad)
        rank = torch.where(in_text, in_text.cumsum(1) - 1, -1)
        return F.pad(rank, (0, 1), value=-1).gather(1, cell)

    def predict(self, time: Tensor, cell: Tensor) -> Tensor:
        """Log-probabilities of `family.words` in some cells, [B, K, words]. time: [B]   cell: [B, K]"""
        x = lay_out(self.given, self.given_length, self.tokens, counts=self.lengths)
        wanted = x.cells.gather(1, cell).flatten()
        with self.family.backbone.autocast():
            hidden = self.family.hidden(x, time.clamp(min=_LEAST_TIME), wanted)
        logits = (hidden @ self.family.unembedding.weight[self.family.words].T).view(*cell.shape, -1)
        barred = self.barred[:, None] | (self.leading.gather(1, cell)[:, :, None] & self.headless[:, None])
        return logits.masked_fill(barred, -torch.inf).log_softmax(-1)

    def _leap(self, masked: Tensor) -> tuple[Tensor, Tensor]:
        """The cells of each text's next step, [B, K], -1 where a text has fewer, and what the model expects there."""
        step = torch.where(masked, self.steps, self.count[:, None]).amin(1)
        due = masked & (self.steps == step[:, None])
        cell = _first(torch.where(due, 0.0, -torch.inf), int(due.sum(1).max()))
        return cell, self.predict(self.time * (self.count - step) / self.count, cell.clamp(min=0))

    def _plan(self, masked: Tensor) -> tuple[Tensor, Tensor]:
        """The cells that the model is surest of, likewise."""
        count = masked.shape[1]
        everywhere = torch.arange(count, device=masked.device).expand_as(masked)
        expected = self.predict(masked.float().mean(1), everywhere)
        best, second = expected.topk(2).values.exp().unbind(2)
        sure = best if self.settings.order == "certainty" else best - second
        cell = _first(sure.masked_fill(~masked, -torch.inf), self.settings.parallel or count)
        return cell, expected.gather(1, cell.clamp(min=0)[:, :, None].expand(-1, -1, expected.shape[2]))

    def _choose(self, cell: Tensor, expected: Tensor) -> Tensor:
        """A token for every cell, as an index of `family.words`. Its noise depends on the cell and not on the step,
        since a cell is written only once."""

        def noise(width: int) -> Tensor:
            draw = uniform(_TOKEN, self.seed[:, None, None], cell[:, :, None], torch.arange(width, device=cell.device))
            return draw.flatten(0, 1)

        return self.choose(expected.flatten(0, 1), noise).view_as(cell)


def _first(score: Tensor, count: int) -> Tensor:
    """The cells with the largest scores, [B, K], of equal ones the leftmost first; -1 where a score is −inf.
    score: [B, block]"""
    ordered, cell = score.sort(dim=1, descending=True, stable=True)
    return torch.where(ordered > -torch.inf, cell, -1)[:, :count]
