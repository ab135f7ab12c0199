"""The lower bound of an MDM.

The N positions of the block after the given text, pads included, are unmasked one by one in a uniform random order,
with the masked share of the block as the network's time. Given the order, P is a product, so log P ≥ E_σ Σ_t log p.
There is no N!, because the order is drawn before the tokens and every order can produce the text. This is the training
bound in discrete time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.likelihood.states import IMPOSSIBLE, Effort, Estimate, sum_over_states
from insertlm.families.mdm import MDM, lay_out
from insertlm.inference.score import Completion
from insertlm.nn.losses import slot_logsumexp

__all__ = ["Masks", "mask_bound"]


def mask_bound(family: MDM, completion: Completion, effort: Effort) -> Estimate:
    start, prompt = completion.prompt.start, completion.prompt
    if not family.config.padded:
        raise InsertlmError("likelihoods: this mdm has learnt no lengths; expected one with family.padded: true")
    if prompt.gaps != {len(start)}:
        raise InsertlmError("likelihoods: an mdm gives one to texts and to their ends; expected no other blank")
    size = family.config.block - len(start)
    if completion.size > size:
        raise InsertlmError(
            f"likelihoods: a text of {len(completion.text)} tokens; the block has {family.config.block}"
        )
    terms_of = Masks(family, completion)
    if not terms_of.writable:
        return IMPOSSIBLE
    value, error = sum_over_states(terms_of, size, family.device, effort)
    return Estimate(value, error, False)


class Masks:
    """The terms of an MDM for states of one text: blocks with some positions after the given ones masked."""

    def __init__(self, family: MDM, completion: Completion) -> None:
        text, pad, device = completion.text, family.specials.pad, family.device
        self.family, self.given = family, len(completion.prompt.start)
        self.front = torch.tensor([*completion.prompt.prefix, family.specials.bos], device=device)
        self.block = torch.tensor([*text, *[pad] * (family.config.block - len(text))], device=device)
        self.writable = bool(torch.isin(self.block[self.given :], family.words).all())

    def __call__(self, missing: Tensor) -> Tensor:
        """The mean over masked positions of the log-probability of the right token. [K, N] to [K]"""
        family, count = self.family, len(missing)
        masked = torch.cat([missing.new_zeros(count, self.given), missing], 1)
        front = self.front.expand(count, -1)
        block = torch.where(masked, family.specials.mask, self.block)
        x = lay_out(front, torch.full_like(front[:, 0], front.shape[1]), block)
        with family.backbone.autocast():
            hidden = family.hidden(x, masked.float().mean(1), x.cells[:, self.given :].flatten())
        mass = slot_logsumexp(hidden, family.unembedding.weight[family.words])
        word = family.unembedding.weight[self.block[self.given :]]
        score = (hidden.view(count, *word.shape) * word).sum(-1)
        surprise = (mass.view_as(score) - score).masked_fill(~missing, 0.0)
        return -surprise.sum(1) / missing.sum(1)
