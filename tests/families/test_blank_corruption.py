"""Blanks as a corruption: where gaps are, how many and how long."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.families.base import Noise
from insertlm.families.corruption.blanks import MOST, Blanks, BlanksConfig, cut, unit_of
from insertlm.text.tokenizers import WordTokenizer
from insertlm.text.units import ENDS_CLAUSE, ENDS_SENTENCE, MARKS, STARTS_WORD, token_traits

# Ids 0 … 5: a word, a second one, the rest of a word, a comma, a full stop, a closing quote.
TRAITS = torch.tensor(
    [STARTS_WORD, STARTS_WORD, 0, ENDS_CLAUSE | MARKS, ENDS_SENTENCE | MARKS, 8 | MARKS], dtype=torch.uint8
)
BLANKS_ALONE = BlanksConfig(suffix=0.0, everything=0.0)


def noise_for(count: int, seed: int = 1) -> Noise:
    return Noise(seed, torch.arange(count), torch.zeros(count, dtype=torch.int64))


def many(tokens: list[int], config: BlanksConfig, count: int = 4000) -> tuple[Blanks, Tensor]:
    text = torch.tensor(tokens).repeat(count, 1)
    return cut(text, torch.full((count,), len(tokens)), TRAITS, config, noise_for(count)), text


def test_units_begin_with_words_behind_marks() -> None:
    tokens = torch.tensor([[0, 2, 3, 1, 4, 5, 0, 1, 4]])  # wo-rd, word." Word word.
    words, clauses, sentences = (unit.tolist()[0] for unit in unit_of(tokens, torch.tensor([9]), TRAITS))
    assert words == [0, 0, 0, 1, 1, 1, 2, 3, 3]
    assert clauses == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sentences == [0, 0, 0, 0, 0, 0, 1, 1, 1]


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    padding=st.integers(0, 5),
    seed=st.integers(0, 10_000),
    suffix=st.sampled_from((0.0, 0.3)),
    everything=st.sampled_from((0.0, 0.3)),
)
def test_gaps_are_apart_in_order_and_start_with_words(
    tokens: list[int], padding: int, seed: int, suffix: float, everything: float
) -> None:
    text = torch.tensor([tokens + [0] * padding])
    config = BlanksConfig(suffix=suffix, everything=everything)
    blanks = cut(text, torch.tensor([len(tokens)]), TRAITS, config, noise_for(1, seed))
    [count], [begin], [end] = blanks.count.tolist(), blanks.begin.tolist(), blanks.end.tolist()
    assert 1 <= count <= MOST
    assert all(first <= last <= len(tokens) for first, last in zip(begin, end, strict=True))
    assert all(last < first for last, first in zip(end[: count - 1], begin[1:count], strict=False))
    assert begin[count:] == end[count:] == [len(tokens)] * (MOST - count)
    words = [number for number, token in enumerate(tokens) if token in (0, 1)]
    assert {*begin[:count]} <= {0, *words, len(tokens)}
    gap = blanks.gap_of(text.shape[1]).tolist()[0]
    assert gap == [
        next((i + 1 for i in range(count) if begin[i] <= place < end[i]), 0) for place in range(text.shape[1])
    ]


def test_kinds_come_as_often_as_the_recipe_says() -> None:
    blanks, text = many([0, 1, 4] * 8, BlanksConfig(suffix=0.3, everything=0.2))
    first, last = blanks.begin[:, 0], blanks.end[:, 0]
    everything = (first == 0) & (last == text.shape[1])
    suffix = (first > 0) & (last == text.shape[1]) & (blanks.count == 1)
    assert everything.float().mean().item() == pytest.approx(0.2, abs=0.025)
    assert 0.3 - 0.025 < suffix.float().mean().item() < 0.36  # a blank at the end may be one too


def test_there_are_fewer_blanks_of_many_and_short_ones_are_likelier_the_more_there_are() -> None:
    blanks, _ = many([0] * 60, BLANKS_ALONE)
    often = [(blanks.count == number).float().mean().item() for number in range(1, MOST + 1)]
    assert often == pytest.approx([0.36, 0.22, 0.16, 0.12, 0.08, 0.06], abs=0.03)
    size = (blanks.end - blanks.begin).float()
    means = [size[blanks.count == number, 0].mean().item() for number in range(4, MOST + 1)]
    assert means == sorted(means, reverse=True)
    empty = (size == 0)[blanks.used].float().mean().item()
    assert empty == pytest.approx(0.05, abs=0.01)


def test_blanks_take_no_more_than_their_share() -> None:
    blanks, text = many([0] * 40, BlanksConfig(suffix=0.0, everything=0.0, share=0.3))
    taken = (blanks.end - blanks.begin).sum(1)
    assert int(taken.max()) <= 0.3 * text.shape[1]
    assert int(taken.max()) > 0.2 * text.shape[1]


def test_gaps_of_words_are_phrases_and_longer_ones_are_sentences() -> None:
    """However long the text is."""
    blanks, text = many([0, 1, 1, 1, 4] * 30, BLANKS_ALONE)
    size = (blanks.end - blanks.begin)[blanks.used]
    long = size > 15  # 12 words and the marks between them
    assert 0.005 < long.float().mean().item() < 0.1
    begins = text.gather(1, blanks.begin.clamp(max=text.shape[1] - 1))[blanks.used]
    assert bool((begins[long] == 0).all())  # where a sentence begins


def test_every_place_can_be_missing() -> None:
    blanks, text = many([0] * 12, BLANKS_ALONE)
    often = (blanks.gap_of(text.shape[1]) > 0).float().mean(0)
    assert often.min() > 0.6 * often.max()


def test_draws_are_an_examples_own() -> None:
    """They depend neither on the batch nor on its width."""
    text = torch.tensor([[0, 2, 3, 1, 4, 0, 1, 0, 2, 4]] * 50)
    whole = cut(text, torch.full((50,), 10), TRAITS, BlanksConfig(), noise_for(50))
    part = Noise(1, torch.arange(20, 30), torch.zeros(10, dtype=torch.int64))
    wider = torch.nn.functional.pad(text[20:30], (0, 7))
    again = cut(wider, torch.full((10,), 10), TRAITS, BlanksConfig(), part)
    for one, other in zip(vars(whole).values(), vars(again).values(), strict=True):
        assert torch.equal(one[20:30], other)


def test_marks_may_stay_behind_a_blank() -> None:
    """“She went to the ___.” as well as “She went to the ___”."""
    blanks, text = many([0, 1, 1, 4] * 5, BLANKS_ALONE)
    last = text.gather(1, (blanks.end - 1).clamp(min=0))
    behind = torch.nn.functional.pad(text, (0, 1), value=0).gather(1, blanks.end)
    filled = blanks.used & (blanks.end > blanks.begin)
    taken, stayed = (filled & (last == 4)).sum().item(), (filled & (last != 4) & (behind == 4)).sum().item()
    assert 0.7 < stayed / taken < 1.5


def test_a_vocabulary_of_words_has_traits_too() -> None:
    tokenizer = WordTokenizer(("a", "dog", ".", ","))
    traits = token_traits(tokenizer)
    assert len(traits) == tokenizer.size
    assert [bool(trait & STARTS_WORD) for trait in traits[:2]] == [True, True]
    assert traits[2] & ENDS_SENTENCE and traits[2] & MARKS and traits[3] & ENDS_CLAUSE


def test_shares_that_are_more_than_all() -> None:
    with pytest.raises(ValueError, match=r"suffix and everything: expected 1 or less together, got 1\.1"):
        BlanksConfig(suffix=0.6, everything=0.5)


def test_a_single_gap_sometimes_leaves_only_the_first_and_the_last_sentence() -> None:
    sentences = 6
    blanks, _ = many([0, 1, 4] * sentences, BLANKS_ALONE)
    single = blanks.count == 1
    bare = single & (blanks.begin[:, 0] == 3) & (blanks.end[:, 0] >= 3 * (sentences - 1) - 1)
    # 0.6 / 4 of the single gaps of clauses or sentences, and of sentences are some more that are as long by chance
    assert 0.06 < bare.sum() / single.sum() < 0.14


def test_several_gaps_of_words_leave_most_of_a_sentence() -> None:
    blanks, _ = many([0] * 25, BLANKS_ALONE)
    several = blanks.count > 1
    missing = (blanks.end - blanks.begin).sum(1)
    assert missing[several].max() <= 10  # two fifths
    assert missing[~several].max() == 12  # a phrase
