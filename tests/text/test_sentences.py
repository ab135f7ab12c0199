"""Sentences, and the passages that long documents are split into."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from insertlm.text.sentences import lines_and_sentences, passages

TEXT = "A heading\nOne two three. Four five! Six?\n\nSeven eight nine ten. Eleven."


def test_a_line_without_a_full_stop_is_a_sentence() -> None:
    found = [TEXT[first:last].strip() for first, last in lines_and_sentences(TEXT)]
    assert found == ["A heading", "One two three.", "Four five!", "Six?", "Seven eight nine ten.", "Eleven."]


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    longest=st.integers(6, 60),
    number=st.integers(0, 1000),
)
def test_passages_are_the_whole_text_in_order_but_for_sentences_that_are_too_long(
    counts: list[int], longest: int, number: int
) -> None:
    text = " ".join(f"S{number}x{k}" + " word" * (count - 1) + "." for k, count in enumerate(counts))
    parts = passages(text, counts, longest)
    assert all(len(part.split()) <= longest for part in parts)
    short = " ".join(
        f"S{number}x{k}" + " word" * (count - 1) + "." for k, count in enumerate(counts) if count <= longest
    )
    assert " ".join(parts) == short


def test_sizes_are_log_uniform() -> None:
    """As many of 10 to 20 words as of 20 to 40: from 6 to 256 these are a fifth of all draws each."""
    sizes = list[int]()
    for number in range(40):
        text = " ".join(f"Word{number}." for _ in range(4000))
        sizes += [len(part.split()) for part in passages(text, [1] * 4000, 256)]
    for first in (8, 16, 32, 64):
        share = sum(first <= size < 2 * first for size in sizes) / len(sizes)
        assert abs(share - math.log(2) / math.log(256 / 6)) < 0.03
