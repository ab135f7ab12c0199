"""What a family of models is to the rest of the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.core.errors import InsertlmError
from insertlm.core.section import NamedSection
from insertlm.families.abilities import Abilities
from insertlm.inference.constraints import check_rules
from insertlm.inference.engine import check, decode, exclusively
from insertlm.inference.score import Completion, Score
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.inference.writer import Writer
from insertlm.nn.graphs import CachedBackbone
from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import Block, Transformer
from insertlm.tasks.base import Examples, Task
from insertlm.text.tokenizers import Tokenizer

__all__ = ["Family", "FamilyConfig", "Losses", "Noise", "Rows"]


@dataclass(frozen=True)
class Rows:
    """Examples laid out by a family, with its special tokens, as padded id matrices.

    given: [B, G] what the model reads   target: [B, L] what it must write   given_length, target_length: [B]
    solving_order: [B, L], see Examples; only for families that ask for it. All are int64
    """

    given: Tensor
    given_length: Tensor
    target: Tensor
    target_length: Tensor
    solving_order: Tensor | None = None

    @classmethod
    def of(cls, examples: Examples, *specials: int, solving_order: bool = False) -> Rows:
        """Given are the prefix, then these special tokens. solving_order: whether to keep that of the examples"""
        length = torch.from_numpy(examples.prefix_length).long()
        given = F.pad(torch.from_numpy(examples.prefix).long(), (0, len(specials)))
        for offset, token in enumerate(specials):
            given.scatter_(1, length[:, None] + offset, token)
        target, target_length = torch.from_numpy(examples.target), torch.from_numpy(examples.target_length)
        if not solving_order or examples.solving_order is None:
            return cls(given, length + len(specials), target.long(), target_length.long())
        order = torch.from_numpy(examples.solving_order).long()
        return cls(given, length + len(specials), target.long(), target_length.long(), order)

    @property
    def real(self) -> Tensor:
        """Which cells of the target hold a token and no padding, [B, L] bool."""
        return torch.arange(self.target.shape[1], device=self.target.device) < self.target_length[:, None]

    def repeated(self, times: int) -> Rows:
        """Each example `times` times, its copies side by side."""
        # Without a copy where there is nothing to repeat, as in the paper's method.
        return self if times == 1 else self._each(lambda part: part.repeat_interleave(times, 0))

    def select(self, index: Tensor) -> Rows:
        return self._each(lambda part: part.index_select(0, index))

    def to(self, device: torch.device) -> Rows:
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        order = None if self.solving_order is None else change(self.solving_order)
        return Rows(
            change(self.given), change(self.given_length), change(self.target), change(self.target_length), order
        )


class Noise(NamedTuple):
    """The only source of randomness in training: every draw is a hash of these numbers and of what it is for.

    example, epoch: [B] int64
    """

    seed: int
    example: Tensor
    epoch: Tensor

    def repeated(self, times: int) -> Noise:
        """For rows that are repeated: each copy gets noise of its own, as in an epoch of its own."""
        copies = [self.copy(turn, times).epoch for turn in range(times)]
        return Noise(self.seed, self.example.repeat_interleave(times), torch.stack(copies, 1).flatten())

    def copy(self, turn: int, times: int) -> Noise:
        """That of one copy of so many."""
        return self._replace(epoch=self.epoch * times + turn)


class Losses(NamedTuple):
    """Means over the batch. `total` is minimised; `parts` are for the log.

    over: by name in the log, how many things a loss is a mean of (`loss` is the total). A loss that is not named here
    is a mean over examples. These numbers are the weights with which the losses of pieces of a batch are averaged.
    """

    total: Tensor
    parts: dict[str, Tensor]
    over: dict[str, Tensor] | None = None

    def size(self, name: str, examples: int) -> Tensor:
        """How many things the loss of this name is a mean of, in a batch of so many examples."""
        plain = torch.full_like(self.total.detach(), examples)
        return (self.over or {}).get(name, plain).to(plain)


class FamilyConfig(NamedSection, frozen=True, kw_only=True):
    """The `family` section of a recipe: its fields are the section's keys, and it builds the model."""

    def build(self, model: ModelConfig, tokenizer: Tokenizer) -> Family:
        """A new model. Its weights are drawn from torch's global generator."""
        raise NotImplementedError

    def longest_row(self, prefix: int, target: int) -> int:
        """How many tokens a row has with a prefix and a target of these lengths. Raises ValueError if none can."""
        raise NotImplementedError

    def check_task(self, task: Task) -> None:
        """Raise ValueError if the family cannot learn this task."""


class Family(nn.Module, ABC):
    """A model with its way of corrupting texts, learning and writing."""

    layer: type[Block] = Block  # the backbone is a stack of these
    framing: ClassVar[int] = 2  # special tokens of a row
    abilities: Abilities  # what it can do when it writes
    writable: Tensor  # [W] ids it may write

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, extra: int = 0) -> None:
        """extra: rows of the embedding behind those of the vocabulary, for tokens that only this family has"""
        super().__init__()
        # Only sizes and special tokens are kept of the tokenizer: models know ids, not text.
        self.model, self.vocabulary, self.specials = model, tokenizer.size, tokenizer.specials
        self.backbone = Transformer(model, tokenizer.size + extra, self.layer)
        self._cached: CachedBackbone | None = None
        self.register_buffer("writable", torch.tensor(tokenizer.writable), persistent=False)
        if model.tied:
            self.register_state_dict_post_hook(_drop_tied)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(_share_tied)  # type: ignore[no-untyped-call]

    @abstractmethod
    def rows(self, examples: Examples) -> Rows:
        """Examples with this family's special tokens, on the CPU."""

    @abstractmethod
    def visible(self, rows: Rows, noise: Noise) -> Tensor:
        """How many packed rows `losses` will make of each example, [B].

        By this the trainer chooses a static capacity without waiting for the device. rows, noise: on the CPU. It is
        asked in a thread and must not touch the device, which may be capturing a graph.
        """

    @abstractmethod
    def losses(self, rows: Rows, noise: Noise, capacity: int | None = None) -> Losses:
        """Corrupt a batch and compute its losses. capacity: rows of the packed buffer; None: as many as needed"""

    @abstractmethod
    def writer(self, prompts: Sequence[Prompt], settings: DecodeConfig, longest: int) -> Writer:
        """Begin to write a batch of texts. longest: most tokens of a row, special ones included"""

    def decode(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> list[Trajectory]:
        """Write one text for every prompt, all at once."""
        longest = self.check(prompts, settings)
        with exclusively(self.device):
            return decode(lambda: self.writer(prompts, settings, longest), prompts, settings, longest - self.framing)

    def check(self, prompts: Sequence[Prompt], settings: DecodeConfig) -> int:
        """Refuse prompts and settings that this family cannot serve. Returns the most tokens of a row, for `writer`."""
        longest = min(settings.max_length or self.model.max_length, self.model.max_length)
        check(prompts, longest, self.vocabulary, self.framing)
        self.abilities.check(settings)
        if any(prompt.rules for prompt in prompts) and not self.abilities.left_to_right:
            raise InsertlmError("this family does not write blanks from left to right; expected no rules of their own")
        self._check_rules([prompt for prompt in prompts if prompt.constrained or prompt.rules], longest)
        self._check_hints([prompt for prompt in prompts if prompt.words])
        return longest

    def _check_rules(self, prompts: Sequence[Prompt], longest: int) -> None:
        if any(prompt.constrained for prompt in prompts) and not self.abilities.supports_constraints:
            raise InsertlmError("this family cannot keep to bounds of gaps, banned or required ids; expected none")
        writable = frozenset(self.writable.tolist()) if prompts else frozenset()  # a large set, so only if needed
        for prompt in prompts:
            check_rules(prompt, writable, longest - len(prompt.prefix) - len(prompt.start) - self.framing)

    def check_completion(self, completion: Completion) -> None:
        """Refuse a text that this family cannot have written."""
        prefix, text = completion.prompt.prefix, completion.text
        length, longest = len(prefix) + len(text), self.model.max_length - self.framing
        if length > longest:
            raise InsertlmError(f"the text has {length:,} tokens, its prompt included; the model takes {longest:,}")
        check([Prompt(prefix, start=text)], self.model.max_length, self.vocabulary, self.framing)

    def _check_hints(self, prompts: Sequence[Prompt]) -> None:
        if prompts and not self.abilities.takes_hints:
            raise InsertlmError("this model has not learnt hints of how many words a gap holds; expected none")
        for prompt in prompts:
            for gap, words in prompt.words.items():
                if gap not in prompt.gaps:
                    raise InsertlmError(f"a prompt has a hint for gap {gap}, which is not open")
                if words < 0:
                    raise InsertlmError(f"a prompt has a hint of {words} words for gap {gap}; expected 0 or more")

    def score(self, prefix: Sequence[int], text: Sequence[int], batch_size: int = 64) -> Score:
        """How likely each decision is that leads to this text. batch_size: of its n + 1 variants, how many are computed
        together"""
        raise InsertlmError("score: this family gives no probabilities to single tokens; expected an ilm, arm or fill")

    def cached_backbone(self, texts: int, cells: int) -> CachedBackbone:
        """The backbone in CUDA graphs. They are kept from batch to batch, since capturing takes seconds, and captured
        anew only for a larger batch."""
        held = self._cached
        if held is None or held.texts < texts or held.cells < cells:
            held = self._cached = CachedBackbone(self.backbone, texts, cells)
        return held

    def forget_graphs(self) -> None:
        """Call this before weights move in memory: captured graphs would go on reading the old place."""
        self._cached = None

    @property
    def longest_text(self) -> int:
        """The most tokens of a text that is written without a prefix."""
        return self.model.max_length - self.framing

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


# A tied model has one tensor under two names: files hold it once, under the first.
_EMBEDDING, _UNEMBEDDING = "backbone.embedding.weight", "unembedding.weight"


def _drop_tied(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
    del state[prefix + _UNEMBEDDING]


def _share_tied(_: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Complete a state dict that holds it once; one that holds it twice must hold the same."""
    embedding = state.get(prefix + _EMBEDDING)
    if embedding is None:
        return  # load_state_dict names it
    if not torch.equal(state.setdefault(prefix + _UNEMBEDDING, embedding), embedding):
        rest[-1].append("model.tied: the weights have an unembedding that is not their embedding")
