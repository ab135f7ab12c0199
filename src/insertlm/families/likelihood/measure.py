"""How probable a text is to a model, for every family.

The question is the same for all: a text is given with open gaps, of which a text that is written from nothing has one.
What is the probability that the model writes just these tokens into each gap, and ends? The end counts, because an
insertion model gives probabilities to whole texts only.

What is meant is always what the model writes at temperature 1, with all words and no others in play, and no rules. So
special tokens, which decoding bars, take no share of the probability, and a text that has one is impossible.

- **ARM and filler: exact**, see families/sequential.py. The filler's blanks are filled from left to right.
- **ILM: exact** for up to `Effort.exact` tokens, by a sum over all states on the way; else **a bound**. See
  insertions.py.
- **MDM: a bound**, see masks.py.

A text has one tokenization here, its tokenizer's. If a model can write the same characters as other tokens, that
probability is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch

import torch

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.families.ilm import ILM
from insertlm.families.likelihood.insertions import probability_of_text
from insertlm.families.likelihood.masks import mask_bound
from insertlm.families.likelihood.states import Effort, Estimate
from insertlm.families.mdm import MDM
from insertlm.families.sequential import Sequential
from insertlm.inference.engine import exclusively
from insertlm.inference.score import Completion

__all__ = ["Effort", "Estimate", "log_likelihoods"]

Found = Callable[[int, Estimate], None]


@torch.inference_mode()
def log_likelihoods(
    family: Family,
    completions: Sequence[Completion],
    effort: Effort,
    found: Found = lambda number, estimate: None,
) -> list[Estimate]:
    """log P of each completion's fills and their ends. Each depends on its completion, the effort and the model alone.

    found: called with the number of a completion and its estimate as soon as that is known, in any order
    """
    effort.check()
    estimates: dict[int, Estimate] = {}

    def keep(number: int, estimate: Estimate) -> None:
        estimates[number] = estimate
        found(number, estimate)

    for completion in completions:
        family.check_completion(completion)
    _measure(family, completions, effort, keep)
    return [estimates[number] for number in range(len(completions))]


@singledispatch
def _measure(family: Family, completions: Sequence[Completion], effort: Effort, found: Found) -> None:
    """By the type of the family: a new one registers what follows from its own way of writing."""
    raise InsertlmError("likelihoods: expected a model of the family ilm, arm, fill or mdm; of others none is known")


@_measure.register
def _of_sequential(family: Sequential, completions: Sequence[Completion], effort: Effort, found: Found) -> None:
    # The longest first: texts of like length need little padding, and if memory is short, that shows at once.
    order = sorted(range(len(completions)), key=lambda number: -len(completions[number].text))
    for first in range(0, len(order), effort.batch_size):
        batch = order[first : first + effort.batch_size]
        for number, fills in zip(batch, family.decisions([completions[n] for n in batch]), strict=True):
            values = tuple(fill.value for fill in fills)
            found(number, Estimate(sum(values), 0.0, True, values))


@_measure.register
def _of_ilm(family: ILM, completions: Sequence[Completion], effort: Effort, found: Found) -> None:
    if family.gated:
        raise InsertlmError("likelihoods: expected an ilm with one stop for the text (family.stop: text)")
    for number, completion in enumerate(completions):
        with exclusively(family.device):
            found(number, probability_of_text(family, completion, effort))


@_measure.register
def _of_mdm(family: MDM, completions: Sequence[Completion], effort: Effort, found: Found) -> None:
    for number, completion in enumerate(completions):
        with exclusively(family.device):
            found(number, mask_bound(family, completion, effort))
