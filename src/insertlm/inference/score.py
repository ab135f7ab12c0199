"""Scores of a complete text: probabilities of single decisions of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insertlm.inference.settings import Prompt

__all__ = ["Score", "restoring_gaps", "with_each_left_out"]


@dataclass(frozen=True)
class Score:
    """Probabilities that an insertion model gives to a text of n tokens. Each is of a single decision. The probability
    of the whole text cannot be computed exactly, because the text can be written in n! orders.

    ids: the text as the model reads it, n
    stop_probability: that nothing is missing from the text
    slots: n + 1 numbers that add up to 1. Number k is the probability that, if something is missing, the next token is
        inserted before token k (number n: at the end), whatever token it is
    tokens: n numbers. Number k is the probability that, with token k left out and one token inserted, the text comes
        back. (Between equal neighbours several places give the same text; their probabilities are added.)
    stops: n numbers. Number k is the stop probability of the text without token k: high if it is not missed
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
