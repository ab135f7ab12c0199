"""What is asked for: what fits is done, and what a request means for the tokens of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from lettering import FREE, Letters, build, filled, infill

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.families.ilm import IlmConfig
from insertlm.infill.drafts import begin
from insertlm.infill.requests import Request, whole_word


def test_a_text_that_just_fits_is_filled_in(letters: Family) -> None:
    [result] = filled(letters, Request("a" * 197 + "___"))
    assert len(result.trajectory.ids) == 198


def test_a_limit_of_the_settings_is_told_like_the_models(letters: Family) -> None:
    line = r"^the text has 10 tokens and its 1 blanks need 1 or more; the model takes 10$"
    with pytest.raises(InsertlmError, match=line):
        filled(letters, Request("a" * 10 + "___"), max_length=12)


def test_a_required_word_goes_where_it_fits(letters: Family) -> None:
    """Five tokens, in the one of two blanks that takes so many and no more."""
    [result] = filled(letters, Request("a ___ b___", max_length=[1, 5], required=["wolf"]), stop_threshold=0.0)
    assert result.complete
    assert result.fills[1] == " wolf"


def test_a_required_word_may_go_anywhere_if_anything_may(letters: Family) -> None:
    request = Request("ab ___", anywhere=True, max_length=1, required=["wolf"])
    [result] = filled(letters, request, stop_threshold=0.0)
    assert result.complete
    assert "wolf" in result.text


def test_blanks_with_nothing_to_see_between_them_are_named() -> None:
    class Deaf(Letters):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace(" ", ""))

    with pytest.raises(
        InsertlmError, match=r"^blanks 1 and 2: the model sees nothing between them; expected one blank"
    ):
        infill(build(IlmConfig(), Deaf), Deaf(), [Request("a___ ___b")], FREE)


def test_a_blank_may_have_to_stay_empty(letters: Family) -> None:
    [result] = filled(letters, Request("a ___ b", max_length=0))
    assert (result.text, result.fills) == ("a  b", [""])


def test_a_banned_word_is_barred_with_and_without_its_space(few: Family) -> None:
    [draft] = begin(few, Letters(), [Request("x ___", banned=["dog"])], FREE, 0)
    assert {Letters().decode(run) for run in draft.prompt.banned} == {"dog", " dog"}


def test_words_are_whole_where_they_begin_and_end_with_letters() -> None:
    assert whole_word("dog").search("a dog.")
    assert not whole_word("dog").search("a hotdog, dogs")
    assert all(whole_word(word).search("in c++ ... now") for word in ("c++", "...", "c"))


@pytest.mark.parametrize("lengths", [{"min_length": 0}, {"max_length": 3}, {}])
def test_a_required_word_may_begin_a_blank_with_a_space_of_its_own(few: Family, lengths: dict[str, Any]) -> None:
    """Nothing that is written freely does so: a lone space is no head."""
    for result in filled(few, Request("a ___ b", required=["to"], **lengths), range(10), stop_threshold=0.0):
        assert result.complete
        assert "to" in result.fills[0]


def test_what_makes_a_banned_word_may_still_be_required(few: Family) -> None:
    """“o” completes “d___g”, and is the required word itself: with another seed it goes elsewhere."""
    request = Request("x d___g ___", banned=["dog"], required=["o"], max_length=4)
    for result in filled(few, request, range(30)):
        assert not whole_word("dog").search(result.text)
        assert "o" in "".join(result.fills)


def test_a_banned_word_may_be_a_part_of_a_required_one(few: Family) -> None:
    request = Request("x ___ y", banned=["cat"], required=["catcat"])
    for result in filled(few, request, range(10), stop_threshold=0.0):
        assert result.complete
        assert "catcat" in result.text
        assert not whole_word("cat").search(result.text)


def test_some_word_must_be_left_behind_a_space(few: Family) -> None:
    line = r"^banned: nothing is left to begin a blank behind a space; expected fewer words$"
    with pytest.raises(InsertlmError, match=line):
        filled(few, Request("x ___", banned=["the", "cat", "dog"]))
