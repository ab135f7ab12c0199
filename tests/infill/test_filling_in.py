"""Filling in blanks: what was given comes back byte for byte, and what was asked for is kept, whatever a model writes.

The models are not trained: they write anything, broken characters too.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lettering import FREE, Few, Letters, build, filled, infill

from insertlm.core.errors import InsertlmError
from insertlm.families.abilities import Abilities
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.infill import drafts
from insertlm.infill.requests import Given, Request
from insertlm.infill.results import Infilling

HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes


texts = st.text("ab_\\ .é🙂\n", max_size=8)


# --- What was given


@given(st.lists(texts, min_size=2, max_size=4), st.integers(0, 99), st.booleans(), st.integers(0, 2))
@settings(HEAVY, max_examples=60)
def test_without_the_fills_the_given_text_is_left(
    letters: Family, pieces: list[str], seed: int, anywhere: bool, least: int
) -> None:
    whole, ends = "".join(pieces), [sum(map(len, pieces[: k + 1])) for k in range(len(pieces) - 1)]
    if not whole or any(not piece for piece in pieces[1:-1]):
        return
    request = Request(whole, [(end, end) for end in ends], anywhere, min_length=least, max_length=5)
    for result in filled(letters, request, [seed, seed + 1]):
        assert "".join(span.text for span in result.spans if not span.new) == whole
        assert len(result.fills) == len(pieces) - 1
        if not anywhere:
            parts = [part for pair in zip(pieces, [*result.fills, ""], strict=True) for part in pair]
            assert result.text == "".join(parts)


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        (["the ", " was"], "the was"),
        (["the  ", "was"], "the was"),
        (["the\n", "was"], "the\nwas"),
        ([" ", "was"], "was"),
        (["a ", " ", " b"], "a  b"),
    ],
)
def test_the_model_writes_the_space_before_a_blank_itself(letters: Family, pieces: list[str], seen: str) -> None:
    [result] = filled(letters, Request("___".join(pieces)))
    assert Letters().decode(result.trajectory.start) == seen
    parts = [part for pair in zip(pieces, [*result.fills, ""], strict=True) for part in pair]
    assert result.text == "".join(parts)


def test_a_fill_behind_a_space_begins_with_it(few: Family) -> None:
    results = filled(few, Request("a ___ b", max_length=2), range(30))
    for result in results:
        ids = [token for token, event in zip(result.trajectory.ids, result.trajectory.order, strict=True) if event >= 0]
        assert re.match(" [^ ]", Letters().decode(ids))
        assert result.fills == [Letters().decode(ids).removeprefix(" ")]
        assert result.text == f"a {result.fills[0]} b"


@pytest.mark.parametrize(
    ("before", "opened"),
    [
        ('"', True),
        ('a "', True),
        ("a (", True),
        ("a-", True),
        ('a("', True),
        ('a"', False),
        ("a", False),
        ("a,", False),
    ],
)
def test_a_filler_drops_the_space_of_a_word_that_something_opens(before: str, opened: bool) -> None:
    filler = build(FillConfig(jump=8), Few)
    for result in filled(filler, Request(f"{before}___ b", max_length=3), range(20)):
        ids = [token for token, event in zip(result.trajectory.ids, result.trajectory.order, strict=True) if event >= 0]
        written = Letters().decode(ids)
        assert result.text == f"{before}{result.fills[0]} b"
        assert not opened or re.match(" [^ ]", written)
        assert result.fills == [written.removeprefix(" ") if opened else written]
        assert "".join(piece.text for piece in result.pieces) == result.text


def test_other_families_write_behind_a_quotation_mark_what_they_like(few: Family) -> None:
    fills = {result.fills[0][:1] for result in filled(few, Request('"___', max_length=3), range(40))}
    assert fills - {" "}


def test_a_vocabulary_without_words_begins_with_the_space_alone() -> None:
    class Bytes(Letters):
        alphabet = Letters().encode("ab ")

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    for result in infill(build(IlmConfig(), Bytes), Bytes(), [Request("a ___ b", max_length=3)] * 10, FREE):
        assert result.trajectory.ids[1] == ord(" ")


def test_samples_depend_on_their_seed_alone(letters: Family) -> None:
    request = Request("the ___ was ___.", max_length=4)
    together = infill(letters, Letters(), [request] * 4, FREE, 5)
    assert len({result.text for result in together}) > 1
    for seed, result in zip(range(5, 9), together, strict=True):
        assert filled(letters, request, [seed])[0].text == result.text


def test_frames_end_with_the_text(few: Family) -> None:
    for result in filled(few, Request("a ___ b ___", max_length=4), range(5)):
        frames = list(result.frames)
        assert len(frames) == len(result.trajectory.events)
        assert "".join(span.text for span in frames[-1]) == result.text
        assert all(sum(span.latest for span in frame) <= 1 for frame in frames)


# --- What was asked for


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 999), st.sampled_from([0.0, 0.5, 1.0]))
@settings(HEAVY, max_examples=25)
def test_lengths_of_single_blanks(few: Family, low: int, more: int, seed: int, threshold: float) -> None:
    request = Request("a ___ b ___ c", min_length=[low, 1], max_length=[low + more, None])
    [result] = filled(few, request, [seed], stop_threshold=threshold)
    gaps = [result.trajectory.order[:k].count(-1) for k, event in enumerate(result.trajectory.order) if event >= 0]
    first, second = (gaps.count(gap) for gap in result.given.blanks)
    assert low <= first <= low + more
    assert second >= 1


@given(st.sets(st.sampled_from(["dog", "cat", "a", "to", "good"]), max_size=2), st.integers(0, 999))
@settings(HEAVY, max_examples=40)
def test_required_words_are_written(few: Family, words: set[str], seed: int) -> None:
    [result] = filled(few, Request("a ___ b ___ c", required=sorted(words)), [seed], stop_threshold=0.0)
    assert result.complete
    assert all(any(word in fill for fill in result.fills) for word in words)


@given(st.sets(st.sampled_from(["dog", "cat", "a", "o", "co", "got"]), min_size=1), st.integers(0, 999))
@settings(HEAVY, max_examples=40)
def test_banned_words_are_not_written_however_they_are_spelt(few: Family, words: set[str], seed: int) -> None:
    """Nor made from the text beside a blank."""
    [result] = filled(few, Request("x ___ c___ x ___o", banned=sorted(words)), [seed], max_steps=20)
    for word in words:
        for match in re.finditer(rf"\b{word}\b", result.text):
            at = 0
            for span in result.spans:
                assert not span.new or match.end() <= at or match.start() >= at + len(span.text)
                at += len(span.text)


def test_banned_words_do_come_about_by_other_spellings(few: Family) -> None:
    """Else the test above would test less than it says."""
    free = filled(few, Request("x ___", min_length=6), range(200), max_steps=20)
    assert any(result.spelling(["o"]) for result in free)
    spelt = {result.spelling(["co", "do", "to"]) for result in free} - {()}
    assert any(len(run) > 1 for run in spelt)


def test_a_spelling_is_what_wrote_the_word_and_no_more() -> None:
    """In any blank, with what is given beside it."""
    given = Given.of(["x ", " y ", "."], Letters(), Abilities())
    cat, dog, space, t, o = 257, 258, *map(ord, " to")
    written = (1, cat), (4, space), (5, t), (6, o), (7, dog)
    events = [Insertion(step, rank, token, -0.5, 0.5) for step, (rank, token) in enumerate(written)]
    result = Infilling(Trajectory([], given.ids, events, 0.5), given, Letters())
    assert result.text == "x cat y to dog."
    expected = {"cat": (cat,), "x cat": (cat,), "to": (t, o), "y to": (space, t, o), "dog.": (dog,)}
    expected |= {"y": (), ".": (), "at": ()}  # given, or no whole word
    assert {word: result.spelling([word]) for word in expected} == expected


def test_attempts_to_keep_a_word_out_come_to_an_end(few: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_ATTEMPTS", 1)
    with pytest.raises(InsertlmError, match=r"^cannot keep 'dog' out of the text; expected other banned words$"):
        filled(few, Request("x do___", max_length=2, banned=["dog"]), range(40))


# --- Families


def test_an_mdm_fills_in_as_many_tokens_as_it_is_told() -> None:
    mdm = build(MdmConfig(block=20))
    request = Request("a ___ b ___", min_length=[3, 2], max_length=[3, 2], banned=["dog"])
    for result in filled(mdm, request, range(3)):
        words = [Letters().decode([token]) for token in result.trajectory.ids]
        assert words[1].startswith(" ") and words[6].startswith(" ")
        assert len(result.trajectory.events) == 5
        assert result.complete
    with pytest.raises(InsertlmError, match=r"^an mdm infills a known number of tokens; expected least = most"):
        filled(mdm, Request("a ___ b"))


def test_an_it_fills_in_and_an_arm_goes_on() -> None:
    [result] = filled(build(ItConfig()), Request("a ___ b"))
    assert result.text.startswith("a ")
    [result] = filled(build(ArmConfig()), Request("a b ___"))
    assert result.text.startswith("a b ")
    with pytest.raises(
        InsertlmError, match=r"^this model writes at the end of a text alone; expected one ___, at the end$"
    ):
        filled(build(ArmConfig()), Request("a ___ b"))
    with pytest.raises(InsertlmError, match=r"^this family cannot keep to bounds of gaps"):
        filled(build(ArmConfig()), Request("a ___", max_length=3))


@pytest.mark.parametrize("parallel", [1, 0])
@pytest.mark.parametrize("config", [IlmConfig(), IlmConfig(stop="slots"), ItConfig()])
def test_a_request_is_met_with_several_tokens_a_step_too(config: IlmConfig | ItConfig, parallel: int) -> None:
    request = Request("x ___ x ___x", min_length=3, max_length=[5, 9], banned=["a", "ca"], required=["dog", "got"])
    family = build(config, Few)
    ways: dict[str, Any] = {"parallel": parallel, "position_top_k": 1, "max_steps": 40}
    for threshold, complete in ((0.0, True), (1.0, False)):
        for result in filled(family, request, range(5), stop_threshold=threshold, **ways):
            order = result.trajectory.order
            gaps = [order[:k].count(-1) for k, event in enumerate(order) if event >= 0]
            first, second = (gaps.count(gap) for gap in result.given.blanks)
            assert 3 <= first <= 5
            assert 3 <= second <= 9
            assert not re.search(r"\bc?a\b", result.text)
            assert all(any(word in fill for fill in result.fills) for word in ("dog", "got"))
            if config != IlmConfig(stop="slots"):  # whose ends are drawn
                assert result.complete == complete
        several = any(len(step) > 1 for step in result.trajectory.steps)
        assert several == (parallel == 0)


# --- What cannot be done


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request("ab"), "the text has no blank; expected ___ where something is missing (or anywhere)"),
        (
            Request("a ___ " * 10_000),
            "the text has 20,000 tokens and its 10,000 blanks need 10,000 or more; the model takes 198",
        ),
        (Request("é" * 100 + "___"), "the text has 200 tokens and its 1 blanks need 1 or more; the model takes 198"),
        (Request("___", min_length=3, max_length=2), "expected 0 <= min_length <= max_length, got 3 and 2"),
        (Request("___", min_length=-1), "min_length: expected a whole number of at least 0, got -1"),
        (Request("___", max_length=[1, 2]), "max_length: expected a number, or one for each of the 1 blanks, got 2"),
        (Request("___", banned=[" "]), "banned: expected words, got an empty one"),
        (Request("___", required=[""]), "the model cannot write ''; expected other required words"),
        (
            Request("___", banned=["dog"], required=["hot dog"]),
            "'hot dog' is required and 'dog' is banned; expected one of the two",
        ),
        (
            Request("___", max_length=2, required=["wolf"]),
            "the required 'wolf' has 5 tokens; the largest blank takes 2",
        ),
    ],
)
def test_impossible_requests(letters: Family, request_: Request, line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        filled(letters, request_)
    assert str(caught.value) == line


def test_only_blanks_is_free_writing(letters: Family) -> None:
    [result] = filled(letters, Request("___"))
    assert result.text == result.fills[0] != ""


def test_words_that_cannot_be_kept_out() -> None:
    """All that is written makes a banned word with the text beside it."""

    class One(Letters):
        alphabet = Letters().encode("o")

    with pytest.raises(InsertlmError) as caught:
        filled(build(IlmConfig(), One), Request("c___w", banned=["cow"], max_length=1))
    assert str(caught.value) == "all that can be written is banned"
