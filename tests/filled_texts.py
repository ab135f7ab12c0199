"""What a filler wrote, and what it should be."""

from __future__ import annotations

import msgspec
import pytest
import torch
from dense_filler import WORDS, blanks_at, noise_for, reference
from torch import Tensor

from insertlm.families.base import Rows
from insertlm.families.corruption.blanks import MOST, Blanks
from insertlm.families.corruption.laid_out import Laid, lay_out
from insertlm.families.fill import Filler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory

__all__ = [
    "BOUNDED",
    "IN_STEP",
    "PROMPTS",
    "SAMPLED",
    "assert_exact",
    "fills_of",
    "laid_of",
    "summary",
    "surprise_of",
    "with_ends",
]

SAMPLED = DecodeConfig(temperature=1.0, max_steps=300)
IN_STEP = msgspec.structs.replace(SAMPLED, parallel=0)
PROMPTS = [
    Prompt([], 5, [0, 1, 2, 3], frozenset({2})),
    Prompt([], 6, [4, 5], frozenset({0, 1, 2})),
    Prompt([], 7),
    Prompt([6, 6], 11, [4, 5, 8, 9], frozenset({0, 1, 2, 4}), words={0: 3, 4: 12}),
    Prompt([7], 8, [3, 3, 1], frozenset({1, 3}), {3: Bounds(2)}),
    Prompt([], 12, [1], frozenset()),
]
BOUNDED = [
    Prompt([], 8, [3, 3, 1], frozenset({3}), {3: Bounds(2, 4)}),
    Prompt([], 9, [3, 1, 1], frozenset({0, 3}), {0: Bounds(1, 2), 3: Bounds(0, 0)}),
    Prompt([1], 10, [3, 1, 1, 2], frozenset({0, 2, 4}), {0: Bounds(0, 7), 2: Bounds(5, 5)}),
]


def with_ends(model: Filler, more: float) -> Filler:
    """The same model, for which ends are likelier: their chances differ more from row to row."""
    with torch.no_grad():
        model.unembedding.weight[WORDS.specials.eos] *= more
    return model.eval()


def edges_of(prompt: Prompt, written: Trajectory) -> list[tuple[int, int]]:
    """Where the gaps of a prompt are in the text that was written."""
    order = written.order
    places = [place for place, event in enumerate(order) if event < 0]
    begins = [places[gap - 1] + 1 if gap else 0 for gap in sorted(prompt.gaps)]
    ends = [places[gap] if gap < len(places) else len(order) for gap in sorted(prompt.gaps)]
    return list(zip(begins, ends, strict=True))


def fills_of(prompt: Prompt, written: Trajectory) -> list[tuple[int, ...]]:
    return [tuple(written.ids[begin:end]) for begin, end in edges_of(prompt, written)]


def laid_of(model: Filler, prompt: Prompt, written: Trajectory, *, in_step: bool = False) -> Laid:
    """The finished row."""
    ids = torch.tensor([written.ids], dtype=torch.int64).view(1, -1)
    prefix = torch.tensor([[*prompt.prefix, model.specials.bos]])
    rows = Rows(prefix, torch.tensor([prefix.shape[1]]), ids, torch.tensor([ids.shape[1]]))
    edges = edges_of(prompt, written)
    blanks = blanks_at(ids.shape[1], *edges) if edges else no_blanks(ids.shape[1])
    words = [prompt.words.get(gap) for gap in sorted(prompt.gaps)]
    padded = enumerate((*words, *[None] * (MOST - len(words))))
    openings = [model.layout.opening(each, number=number) for number, each in padded]
    together = torch.tensor([in_step])
    return lay_out(rows, blanks, noise_for(1), model.layout, openings=torch.tensor([openings]), in_step=together)


def no_blanks(width: int) -> Blanks:
    spare = torch.full((1, MOST), width)
    return Blanks(torch.zeros(1, dtype=torch.int64), spare, spare, torch.tensor([False]))


def surprise_of(model: Filler, prompt: Prompt, written: Trajectory, *, in_step: bool = False) -> tuple[Tensor, Tensor]:
    """−log P of each token that was written, in reading order, and of the end of each blank."""
    x = laid_of(model, prompt, written, in_step=in_step)
    surprise, ends = reference(model, x, writing=True).detach(), x.words == model.specials.eos
    return surprise[~ends], surprise[ends]


def assert_exact(model: Filler, prompt: Prompt, written: Trajectory, *, in_step: bool = False) -> None:
    tokens, ends = surprise_of(model, prompt, written, in_step=in_step)
    found = [written.events[event].log_probability for event in written.order if event >= 0]
    torch.testing.assert_close(torch.tensor(found), -tokens, rtol=1e-5, atol=1e-5)
    if written.complete:
        assert written.stop_probability == pytest.approx((-ends.sum()).exp().item(), rel=1e-4)


def summary(texts: list[Trajectory]) -> list[tuple[object, ...]]:
    return [([event[:3] for event in text.events], text.start, text.limit) for text in texts]
