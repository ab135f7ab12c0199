"""Words to ids and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.text.tokenizers import Specials, Tokenizer, WordTokenizer, matching_ids

DIGITS = WordTokenizer(tuple("0123456789"), reserved=2)


def test_ids_are_words_then_specials_then_reserved() -> None:
    assert DIGITS.encode("0 9") == [0, 9]
    assert DIGITS.specials == Specials(stop=10, bos=11, eos=12, unk=13, pad=14, mask=15)
    assert DIGITS.size == 18


def test_only_words_may_be_written() -> None:
    tokenizer: Tokenizer = DIGITS
    assert tokenizer.writable == list(range(10))


def test_reserved_ids_are_none_unless_asked_for() -> None:
    assert WordTokenizer(("a",)).size == 1 + len(Specials._fields)


def test_decode_names_what_has_no_word() -> None:
    assert DIGITS.decode([3, *DIGITS.specials, 16, 17]) == "3 <stop> <bos> <eos> <unk> <pad> <mask> <16> <17>"


def test_words_and_specials_are_found_in_another_vocabulary() -> None:
    other = WordTokenizer(("9", "one", "3"), reserved=1)
    assert matching_ids(other, DIGITS) == [9, None, 3, *DIGITS.specials, 16]
    assert matching_ids(DIGITS, other) == [None, None, None, 2, *[None] * 5, 0, *other.specials, 9, None]
    assert matching_ids(DIGITS, DIGITS) == list(range(DIGITS.size))


def test_empty_text() -> None:
    assert DIGITS.encode("") == DIGITS.encode(" \n") == []
    assert DIGITS.decode([]) == ""


@given(st.lists(st.sampled_from(DIGITS.writable)), st.sampled_from([" ", "  ", "\n", "\t "]))
def test_round_trip(ids: list[int], gap: str) -> None:
    assert DIGITS.encode(DIGITS.decode(ids)) == ids
    assert DIGITS.encode(gap.join(map(str, ids))) == ids


words = st.text("abcß字0.,<>", min_size=1, max_size=4)


@given(st.lists(words, min_size=1, unique=True))
def test_any_word_list_round_trips(vocabulary: list[str]) -> None:
    tokenizer = WordTokenizer(tuple(vocabulary))
    assert tokenizer.encode(" ".join(vocabulary)) == tokenizer.writable
    assert tokenizer.decode(tokenizer.writable) == " ".join(vocabulary)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1 2 12 3", "unknown word '12' at word 3 of the input; expected 0 … 9"),
        ("x", "unknown word 'x' at word 1 of the input; expected 0 … 9"),
        ("1 <pad>", "unknown word '<pad>' at word 2 of the input; expected 0 … 9"),
    ],
)
def test_unknown_words_are_named_with_their_place(text: str, line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        DIGITS.encode(text)
    assert str(caught.value) == line
