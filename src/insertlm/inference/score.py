"""What a model thinks of a text that is given whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insertlm.inference.settings import Prompt

__all__ = ["Score", "restoring_gaps", "with_each_left_out"]


@dataclass(frozen=True)
class Score:
    """Probabilities that an insertion model gives to a text of n tokens. All are of single decisions, none of the text
    as a whole, which has none that could be computed: it can be written in n! orders.

    ids: the text as the model reads it, n
    stop_probability: that nothing is missing from the whole text
    slots: n + 1 numbers that add up to 1. Number k is the probability that, if something were missing, the next token
        would be inserted before token k (number n: behind the last one), whatever it is
    tokens: n numbers. Number k is the probability that, with token k left out and something inserted, the text comes
        back: that the next insertion is this token in this place. (Between equal neighbours there are several places
        that give the same text; their probabilities are added.)
    stops: n numbers. Number k is the stop probability of the text with token k left out: how little it is missed
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
    """The gaps of the text without token k into which this token can go to give the text back."""
    first = last = k
    while first > 0 and text[first - 1] == text[k]:
        first -= 1
    while last + 1 < len(text) and text[last + 1] == text[k]:
        last += 1
    return range(first, last + 1)
