"""The `decode` section of a recipe, and a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from insertlm.core.section import Count, Fraction, Index, NonNegative, Section

if TYPE_CHECKING:  # it imports torch, and settings are read before that
    from insertlm.inference.rules import Rule

__all__ = ["Bounds", "DecodeConfig", "Prompt"]

_LOW = 0xFFFFFFFF
_FOLD = 0x9E3779B9  # odd, so that different upper halves of a seed give different sums


class DecodeConfig(Section, frozen=True, kw_only=True):
    """How to choose places and tokens, and when to stop. The defaults are greedy and deterministic."""

    stop_threshold: Fraction = 0.5  # a text or slot is complete once the model finds that this likely
    order: Literal["auto", "mass", "certainty", "margin", "random"] = (
        "auto"  # which place next; auto = the family's own
    )
    parallel: Index = 1  # tokens written in one step, 0 = one at every open place; not all families can
    confidence: Fraction = 0.0  # with more than one a step: how likely a token must be, beside that of the best place
    joint: bool = False  # sample (place, token) pairs; else a place by `order`, then a token for it
    position_top_k: Index = 1  # without joint: sample among so many places, 1 = always the most likely, 0 = all
    temperature: NonNegative = 0.0  # of tokens (of pairs, if joint); 0 = always the most likely
    top_k: Index = 0  # sample among so many tokens (pairs), 0 = all
    top_p: Fraction = 1.0  # nucleus: sample among the fewest tokens (pairs) whose probability reaches this
    best_of: Count = 1  # drafts of a text with blanks, of which the likeliest as a whole is kept
    max_tokens: Count | None = None  # tokens written, in however many steps; None = no limit
    max_steps: Count = 256  # an ILM and an ARM write a token in each; for an MDM it is the length of the schedule
    max_length: Count | None = None  # tokens of a row, given and special ones included; None = the model's maximum

    def __post_init__(self) -> None:
        if self.top_p == 0.0:  # a Fraction may be 0, but an empty nucleus has nothing to sample
            raise ValueError("top_p is 0; expected 0 < top_p <= 1")


class Bounds(NamedTuple):
    """How many tokens must be written into a gap. most None: no maximum"""

    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Prompt:
    """What one text starts from.

    prefix: given ids before the text   seed: the only source of randomness for this text
    start: given ids of the text   open: the gaps of `start` where tokens may be inserted (None: all)

    Constraints, see constraints.py:
    bounds: by gap   banned, required: runs of ids that must not be written, or must be written once, side by side
    headed: gaps whose first token must be one of `heads` or begin a required run

    words: by gap, about how many words belong there: a hint that a model may have learnt to take, no constraint
    rules: by gap, what may be written there, see rules.py; for families that write blanks from left to right
    onward: the last gap is no blank that wants a phrase: the text is to be written on from there
    """

    prefix: list[int]
    seed: int = 0
    start: list[int] = field(default_factory=list)
    open: frozenset[int] | None = None
    bounds: Mapping[int, Bounds] = field(default_factory=dict)
    banned: tuple[tuple[int, ...], ...] = ()
    required: tuple[tuple[int, ...], ...] = ()
    headed: frozenset[int] = frozenset()
    heads: frozenset[int] = frozenset()
    words: Mapping[int, int] = field(default_factory=dict)
    onward: bool = False
    rules: Mapping[int, Rule] = field(default_factory=dict)

    @property
    def folded_seed(self) -> int:
        """In 32 bits, which is what the noise functions take."""
        return (self.seed + (self.seed >> 32) * _FOLD) & _LOW

    @property
    def constrained(self) -> bool:
        return bool(self.bounds or self.banned or self.required or self.headed)

    def owed(self, gap: int) -> int:
        """How many tokens are kept for a gap."""
        rule, least = self.rules.get(gap), self.bounds.get(gap, Bounds()).least
        return least if rule is None else max(least, rule.needs)

    def writes_on(self, gap: int) -> bool:
        """Whether this gap is where the text is written on. From nothing there is nothing to go on from."""
        return self.onward and bool(self.start) and gap == max(self.gaps)

    @property
    def gaps(self) -> frozenset[int]:
        """All open gaps."""
        return frozenset(range(len(self.start) + 1)) if self.open is None else self.open
