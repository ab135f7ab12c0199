"""Writers: what a family must provide so that its models can write. A writer holds one batch of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insertlm.inference.sampling import NoiseOf, choose, choose_each
from insertlm.inference.settings import DecodeConfig, Prompt

__all__ = ["BatchWriter", "Step", "Writer"]


class Step(NamedTuple):
    """What a model would do next to each text. Nothing is written before the loop has seen which texts end.

    complete: [B] bool, nothing is missing   full: [B] bool, no token may be added
    stop_probability: [B], how sure the model is that nothing is missing; NaN if it cannot tell
    place, token, log_probability: [B, K], up to K tokens at once; what a place means is private to the writer
    limit: [B], for texts that are full: which limit has ended them, counted in LIMITS from 1; None: whichever they have
    reached, see `limit_of`
    """

    complete: Tensor
    full: Tensor
    stop_probability: Tensor
    place: Tensor
    token: Tensor
    log_probability: Tensor
    limit: Tensor | None = None

    def select(self, rows: Tensor) -> Step:
        """Only these texts. rows: [B'] indices"""

        def chosen(part: Tensor) -> Tensor:
            return part.index_select(0, rows)

        limit = None if self.limit is None else chosen(self.limit)
        judged = chosen(self.complete), chosen(self.full), chosen(self.stop_probability)
        return Step(*judged, chosen(self.place), chosen(self.token), chosen(self.log_probability), limit)


class Writer(ABC):
    """Holds the texts of a batch, and whatever was computed once for all of their steps.

    row: [B], the number of the prompt of each running text
    patience: how many steps may pass before the loop looks which texts have ended. Until then they stay in the batch,
    and a step has place -1 for them. Use more than 1 if a few useless rows cost less than waiting for the device.
    """

    row: Tensor
    patience: int = 1

    @abstractmethod
    def step(self, number: int) -> Step: ...

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep only these texts. rows: [B'] indices, ascending"""

    @abstractmethod
    def write(self, step: Step) -> Tensor:
        """Carry out a step. Returns the rank of every token in its text after the step, -1 where none was written,
        [B, K]"""

    # --- Joining. By default no other text joins a writer.

    @property
    def kind(self) -> Hashable:
        """Writers of one family that have the same kind can be joined. None: cannot be joined"""
        return None

    def stay_open(self) -> None:  # noqa: B027  # most writers have nothing to do
        """Texts may join from now on, so nothing that depends on the size of the batch may be captured or shared."""

    def join(self, other: Self, number: int) -> None:
        """Take over the texts of another writer of the same kind that has not taken a step. Their first step is step
        `number` here; their results must not depend on it."""
        raise NotImplementedError


class BatchWriter(Writer):
    """A writer that texts may join: each text has a seed, a first step and settings of its own.

    settings: of the first texts   mixed: of every text, if they differ   begun: [B], the first step of each text
    mixes: whether texts may differ in thresholds and in how tokens are drawn. A family that sets it must use `choose`
    and `threshold`. Limits may always differ, since they belong to single texts anyway.
    """

    mixes: ClassVar[bool] = False

    def __init__(self, prompts: Sequence[Prompt], settings: DecodeConfig, device: torch.device) -> None:
        self.row = torch.arange(len(prompts), device=device)
        self.seed = torch.tensor([prompt.folded_seed for prompt in prompts], device=device)
        self.settings = settings
        self.mixed: list[DecodeConfig] | None = None
        self.begun: NDArray[np.int64] = np.zeros(len(prompts), np.int64)

    def own(self, number: int) -> Tensor | int:
        """What step `number` is for each text, counted from its own first step: [B], or one number for all."""
        if (self.begun == self.begun[0]).all():  # one number needs no copy to the device
            return number - int(self.begun[0])
        return torch.from_numpy(number - self.begun).to(self.seed.device)

    def threshold(self, like: Tensor) -> Tensor | float:
        """The stop probability at which a text is complete: [B], or one number for all. like: gives dtype and device"""
        if self.mixed is None:
            return self.settings.stop_threshold
        return like.new_tensor([settings.stop_threshold for settings in self.mixed])

    def choose(self, logits: Tensor, noise: NoiseOf, texts: Sequence[int] | None = None) -> Tensor:
        """One index per row, as `choose` in sampling.py. logits: [R, N]   texts: [R], the text of each row; None: all
        texts in order, with equally many rows each"""
        if self.mixed is None:
            return choose(logits, noise, *_way(self.settings))
        settings = self.mixed if texts is None else [self.mixed[text] for text in texts]
        return choose_each(logits, noise, [*map(_way, settings)])

    @property
    def kind(self) -> Hashable:
        free = {"max_tokens", "max_steps", "max_length"}
        if self.mixes and not self.settings.joint:  # pairs are chosen by the writer's settings, the same for all
            free |= {"stop_threshold", "temperature", "top_k", "top_p"}
        usual = DecodeConfig()  # what may differ is set to the default, so that the rest decides equality
        return msgspec.structs.replace(self.settings, **{name: getattr(usual, name) for name in free})

    def join(self, other: Self, number: int) -> None:
        if self.mixed is not None or self.settings != other.settings:
            mine = self.mixed or [self.settings] * len(self.begun)
            self.mixed = [*mine, *(other.mixed or [other.settings] * len(other.begun))]
        self.row, self.seed = torch.cat([self.row, other.row]), torch.cat([self.seed, other.seed])
        self.begun = np.concatenate([self.begun, other.begun + number])

    def select(self, rows: Tensor) -> None:
        # A list of settings stays even if the remaining ones are equal: that costs little and happens rarely.
        self.row, self.seed = self.row.index_select(0, rows), self.seed.index_select(0, rows)
        here = rows.cpu().numpy()
        self.begun = self.begun[here]
        if self.mixed is not None:
            self.mixed = [self.mixed[row] for row in here]


def _way(settings: DecodeConfig) -> tuple[float, int, float]:
    return settings.temperature, settings.top_k, settings.top_p
