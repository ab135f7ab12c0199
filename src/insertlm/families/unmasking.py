"""An MDM at work: masks come off a block. What is learnt, and the orders of decoding: mdm.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.core.noise import randint, uniform
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step

if TYPE_CHECKING:
    from insertlm.families.mdm import MDM

__all__ = ["LEAPING", "UnmaskingWriter", "infills", "masks_of"]

LEAPING = ("auto", "random")  # orders by tau-leaping
_STEP, _TOKEN = 0, 1  # streams of noise
_HELD = ("given_length", "tokens", "size", "left", "steps", "count", "time", "barred", "leading", "headless")


def infills(prompt: Prompt) -> bool:
    """Whether the length of the text is known. If not, the whole block is masked and the model decides the length."""
    return bool(prompt.start or prompt.open is not None or prompt.bounds)


def masks_of(prompt: Prompt) -> int:
    return sum(least for least, _ in prompt.bounds.values())


class UnmaskingWriter(BatchWriter):
    """An MDM at work.

    given: [B, G], prefix and <bos>   tokens: [B, block], <mask> where nothing is written
    size: [B], cells of each text: the block, or without padding as many as there are tokens
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
        blocks = [self._block(prompt) for prompt in prompts]
        sizes = [block if family.config.padded else block - cells.count(family.specials.pad) for cells in blocks]
        self.lengths = np.array([len(row) + size for row, size in zip(rows, sizes, strict=True)])
        self.given = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        self.given_length = torch.tensor([len(row) for row in rows], device=device)
        self.tokens, self.size = torch.tensor(blocks, device=device), torch.tensor(sizes, device=device).clamp(min=1)
        self.left = torch.full_like(self.seed, settings.max_tokens or block)
        self.time = (self.tokens == family.specials.mask).sum(1) / self.size
        self.barred = torch.stack([self._out_of_play(prompt) for prompt in prompts])
        self.leading = torch.tensor([self._leading(prompt) for prompt in prompts], device=device)
        self.headless = torch.stack([~self._among_words(prompt.heads) for prompt in prompts])
        cell = torch.arange(block, device=device)
        self.count = torch.full_like(self.seed, settings.max_steps)
        self.steps = randint(self.count[:, None], _STEP, self.seed[:, None], cell)

    def _block(self, prompt: Prompt) -> list[int]:
        """The block at the start."""
        block, (*_, pad, mask) = self.family.config.block, self.family.specials
        if not infills(prompt):
            return [mask] * block
        cells = []
        for gap, token in enumerate([*prompt.start, pad]):
            cells += [mask] * prompt.bounds.get(gap, Bounds()).least + [token]
        return (cells + [pad] * block)[:block]

    def _out_of_play(self, prompt: Prompt) -> Tensor:
        """What no cell may hold, [words] bool: banned words, and <pad> where the length is known."""
        specials = [self.family.specials.pad] * infills(prompt)
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
        cell, expected = self._leap(masked) if self.settings.order in LEAPING else self._plan(masked)
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
        with self.family.backbone.autocast():
            hidden = self.family.states(self.given, self.given_length, self.tokens, time, cell, self.lengths)
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
        expected = self.predict(masked.sum(1) / self.size, everywhere)
        best, second = expected.topk(2).values.exp().unbind(2)
        sure = best if self.settings.order == "certainty" else best - second
        cell = _first(sure.masked_fill(~masked, -torch.inf), self.settings.parallel or count)
        return cell, expected.gather(1, cell.clamp(min=0)[:, :, None].expand(-1, -1, expected.shape[2]))

    def _choose(self, cell: Tensor, expected: Tensor) -> Tensor:
        """A token for every cell, as an index of `family.words`. Its noise depends on the cell and not on the step,
        since a cell is written only once."""

        def noise(row: Tensor, column: Tensor) -> Tensor:
            return uniform(_TOKEN, self.seed[row // cell.shape[1]], cell.flatten()[row], column)

        return self.choose(expected.flatten(0, 1), noise).view_as(cell)


def _first(score: Tensor, count: int) -> Tensor:
    """The cells with the largest scores, [B, K], of equal ones the leftmost first; -1 where a score is −inf.
    score: [B, block]"""
    ordered, cell = score.sort(dim=1, descending=True, stable=True)
    return torch.where(ordered > -torch.inf, cell, -1)[:, :count]
