"""How probable a text is to a model: single decisions about it, and the text as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import Prompt

__all__ = ["Completion", "Likelihood", "Score", "restoring_gaps", "with_each_left_out"]


@dataclass(frozen=True)
class Completion:
    """A prompt and what is written into each of its open gaps, from left to right. Rules of the prompt, such as bounds
    and banned ids, mean nothing here."""

    prompt: Prompt
    fills: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if len(self.fills) != (count := len(self.prompt.gaps)):
            raise InsertlmError(f"expected a text for each of {count} blanks, got {len(self.fills)}")

    @classmethod
    def behind(cls, given: Sequence[int], target: Sequence[int], prefix: Sequence[int] = ()) -> Self:
        """A text that begins with `given` and goes on with `target`."""
        return cls(Prompt(list(prefix), start=list(given), open=frozenset({len(given)}), onward=True), [target])

    @property
    def size(self) -> int:
        """How many tokens are written."""
        return sum(map(len, self.fills))

    @property
    def text(self) -> list[int]:
        """All tokens of the text, given and written."""
        start, text, end = self.prompt.start, list[int](), 0
        for gap, fill in zip(sorted(self.prompt.gaps), self.fills, strict=True):
            text += [*start[end:gap], *fill]
            end = gap
        return [*text, *start[end:]]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where each fill begins and ends in the text."""
        found, longer = list[tuple[int, int]](), 0
        for gap, fill in zip(sorted(self.prompt.gaps), self.fills, strict=True):
            found.append((gap + longer, gap + longer + len(fill)))
            longer += len(fill)
        return found


@dataclass(frozen=True)
class Likelihood:
    """The probability that a model writes a text, or the fills of a text with blanks, and then ends.

    value: its logarithm, in nats   exact: whether it is that, or a lower bound   error: the standard error of a bound
    tokens: how many are written, ends not counted   bytes: of what is written, in UTF-8
    fills: log-probabilities of the fills one by one, each given those to its left; None where the model does not write
    them one after the other
    """

    value: float
    exact: bool
    error: float
    tokens: int
    bytes: int
    fills: list[float] | None

    @property
    def bits_per_byte(self) -> float:
        """NaN for an empty text."""
        return -self.value / math.log(2) / self.bytes if self.bytes else math.nan


@dataclass(frozen=True)
class Score:
    """Probabilities of single decisions about a text of n tokens. For the text as a whole, see Likelihood.

    ids: the text as the model reads it, n
    stop_probability: that nothing is missing from the text
    slots: n + 1 numbers that add up to 1. Number k is the probability that, if something is missing, the next token is
        inserted before token k (number n: at the end), whatever token it is
    tokens: n numbers. Number k is the probability that, with token k left out and one token inserted, the text comes
        back. (Between equal neighbours several places give the same text; their probabilities are added.)
    stops: n numbers. Number k is the stop probability of the text without token k: high if it is not missed

    A model that writes from left to right decides about token k when it sees the tokens before k only. So for such a
    model `tokens` and `stops` are the probabilities that token k comes next there, and that the text ends there; their
    `slots` are 0 and, at the end, 1. The product of `tokens` and `stop_probability` is the probability of the text.
    """

    ids: list[int]
    stop_probability: float
    slots: list[float]
    tokens: list[float]
    stops: list[float]


def with_each_left_out(prefix: Sequence[int], text: Sequence[int]) -> list[Prompt]:
    """The whole text, then the text without its first token, without its second, …"""
    starts = [[*text], *([*text[:k], *text[k + 1 :]] for k in range(len(text)))]
    return [Prompt(list(prefix), start=start) for start in starts]


def restoring_gaps(text: Sequence[int], k: int) -> range:
    """The gaps of the text without token k where inserting this token gives the text back."""
    first = last = k
    while first > 0 and text[first - 1] == text[k]:
        first -= 1
    while last + 1 < len(text) and text[last + 1] == text[k]:
        last += 1
    return range(first, last + 1)
