"""About how many words belong into a blank: what a model that has learnt it is told, and what others say."""

from __future__ import annotations

from typing import Any

import pytest
from lettering import FREE, Few, Letters, build, filled, text_model

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.infill.drafts import begin
from insertlm.infill.requests import Request

TEXT = "a ___ b ___ c"


@pytest.fixture(scope="module")
def filler() -> Family:
    return build(FillConfig(), Few, max_length=600)


def hinted(filler: Family, **request: Any) -> tuple[dict[int, int], dict[int, int]]:
    """The hint and the least number of tokens of each blank that has one, by its number."""
    [draft] = begin(filler, Letters(), [Request(TEXT, **request)], FREE, 0)
    number = {gap: k for k, gap in enumerate(draft.given.blanks)}
    least = {number[gap]: bound.least for gap, bound in draft.prompt.bounds.items() if bound.least}
    return {number[gap]: words for gap, words in draft.prompt.words.items()}, least


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, {}),
        (3, {0: 3, 1: 3}),
        ([3, None], {0: 3}),
        ((None, 7), {1: 7}),
        ([None, None], {}),
        ([0, 200], {1: 200, 0: 0}),
    ],
)
def test_a_number_is_for_every_blank_and_a_list_for_each(filler: Family, words: Any, expected: dict[int, int]) -> None:
    assert hinted(filler, words=words)[0] == expected


def test_a_blank_that_gets_about_no_words_may_stay_empty(filler: Family) -> None:
    assert hinted(filler, words=[0, None])[1] == {1: 1}
    assert hinted(filler, words=[0, 2], min_length=[2, 0])[1] == {0: 2}  # what is said counts


def test_a_hint_is_for_blanks_also_where_anything_may_be_inserted(filler: Family) -> None:
    [draft] = begin(filler, Letters(), [Request("ab ___ c", anywhere=True, words=2)], FREE, 0)
    assert draft.prompt.words == {draft.given.blanks[0]: 2}
    assert len(draft.prompt.gaps) > 1


@pytest.mark.parametrize("config", [IlmConfig(), ItConfig(), MdmConfig(block=20), ArmConfig()])
def test_a_model_that_has_not_learnt_hints_says_so(config: Any) -> None:
    family = build(config)
    line = "words: this model has not learnt what length hints mean; leave them out"
    if family.abilities.supports_constraints:
        line += ", or bound tokens by min_length and max_length"
    for words in (3, [3]):
        with pytest.raises(InsertlmError) as caught:
            filled(family, Request("a ___", words=words))
        assert str(caught.value) == line
    assert begin(family, Letters(), [Request("a ___", words=[None])], FREE, 0)[0].prompt.words == {}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([1], "words: expected a number, or one for each of the 2 blanks, got 1"),
        ([1, -1], "words: expected a whole number of at least 0, got -1"),
        (1.5, "words: expected a whole number of at least 0, got 1.5"),
        ("3", "words: expected a whole number of at least 0, got '3'"),
        ([1, "x"], "words: expected a whole number of at least 0, got 'x'"),
        (True, "words: expected a whole number of at least 0, got True"),
    ],
)
def test_hints_that_are_none(filler: Family, words: Any, line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        text_model(filler).infill(TEXT, words=words)
    assert str(caught.value) == line
