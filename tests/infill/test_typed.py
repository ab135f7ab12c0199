"""Blanks that say what belongs into them: it is kept, whatever a model writes, and given text comes back byte for byte.

The models are not trained: they write anything, broken characters too.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lettering import FREE, Few, Letters, build, filled, free, infill, text_model

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.infill.drafts import begin
from insertlm.infill.requests import Request
from insertlm.infill.results import Infilling
from insertlm.infill.stream import Stream

HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], deadline=None)  # shrinking would take minutes
LONG = {"max_steps": 300}


class Spaced(Letters):
    """Without words that bring their space: a further word takes two tokens, and characters of two bytes are blank."""

    alphabet = (*b"ab \n", *"\u00a0é".encode())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


VOCABULARIES = {"few": Few, "letters": Letters, "spaced": Spaced}


@pytest.fixture(scope="module", params=VOCABULARIES)
def filler(request: Any) -> tuple[Family, Any]:
    vocabulary = VOCABULARIES[request.param]
    return build(FillConfig(), vocabulary, max_length=700), vocabulary()


@pytest.fixture(scope="module")
def few_filler() -> Family:
    return build(FillConfig(), Few, max_length=700)


@pytest.fixture(scope="module")
def few_arm() -> Family:
    return build(ArmConfig(), Few, max_length=300)


def as_given(result: Infilling, pieces: list[str]) -> bool:
    return result.text == "".join(part for pair in zip(pieces, [*result.fills, ""], strict=True) for part in pair)


def places(result: Infilling) -> list[int]:
    """Where the tokens that were written are in the text."""
    return [place for place, event in enumerate(result.trajectory.order) if event >= 0]


# --- Words


@given(
    least=st.integers(0, 12),
    more=st.integers(0, 6),
    seed=st.integers(0, 999),
    greedy=st.booleans(),
    threshold=st.sampled_from([0.0, 0.3, 1.0]),
    limit=st.sampled_from([60, 80]),
)
@settings(HEAVY, max_examples=8)
def test_words_are_counted(
    filler: tuple[Family, Any], least: int, more: int, seed: int, greedy: bool, threshold: float, limit: int
) -> None:
    family, tokenizer = filler
    request = Request(f"ab {{x:{least}-{least + more} words}} a\n{{y:2+ words}} b ___")
    changes = {"stop_threshold": threshold, "max_tokens": limit} | ({"temperature": 0.0} if greedy else {})
    for result in infill(family, tokenizer, [request] * 6, free(family, **LONG, **changes), seed):
        assert as_given(result, ["ab ", " a\n", " b ", ""])
        assert least <= len(result.named["x"].split()) <= least + more
        assert len(result.named["y"].split()) >= 2


def test_blank_space_of_several_bytes_parts_words(filler: tuple[Family, Any]) -> None:
    """Else the test above would test less than it says."""
    family, tokenizer = filler
    if isinstance(tokenizer, Spaced):
        results = infill(family, tokenizer, [Request("a {x:6 words} b")] * 40, free(family, **LONG), 0, 40)
        assert any("\u00a0" in result.fills[0].strip() for result in results)


@pytest.mark.parametrize("text", ["ab {x:3 words}", "ab {x:2-5 words}", "ab{x:up to 1 word}", "ab {x:0 words}"])
def test_an_arm_counts_words(few_arm: Family, text: str) -> None:
    bounds = {"3": (3, 3), "2": (2, 5), "u": (1, 1), "0": (0, 0)}[text.partition(":")[2][0]]
    results = infill(few_arm, Few(), [Request(text)] * 20, free(few_arm, **LONG), 3)
    assert all(bounds[0] <= len(result.named["x"].split()) <= bounds[1] for result in results)
    assert all(result.text.startswith(text.partition("{")[0]) for result in results)


def test_a_blank_that_was_full_of_words_is_cut_back_to_where_its_end_is_likely(few_filler: Family) -> None:
    results = infill(few_filler, Few(), [Request("a {x:1-6 words} b")] * 60, free(few_filler, **LONG), 0)
    limited = [result for result in results if not result.complete]
    assert {result.trajectory.limit for result in limited} == {"blanks"}
    assert len({len(result.fills[0].split()) for result in limited}) > 2  # not merely wherever it was full


def test_a_model_that_takes_hints_is_told_about_how_many_words_fit(few_filler: Family) -> None:
    def hints(text: str, **more: Any) -> list[int]:
        [draft] = begin(few_filler, Few(), [Request(text, **more)], free(few_filler, **LONG), 0)
        return [draft.prompt.words.get(gap, -1) for gap in draft.given.blanks]

    assert hints("{a:2-8 words} b {c:5 words} d {e:about 9 words, 2-8 words} f {g:3+ words}") == [4, 5, 9, -1]
    assert hints("{a:about 3 words} b ___ c {d:2-8 words}", words=7) == [3, 7, 7]


# --- Regular expressions

PATTERNS = ["(dog|cat) [acd]{2,4}", "[a-d]+", "a?", r"\w+( \w+)*", "g{9}", ".*", "(?i:DOG)", "(dog cat|dog dog)t?o"]


@given(st.sampled_from(PATTERNS), st.integers(0, 999), st.booleans(), st.sampled_from([None, 16]), st.booleans())
@settings(HEAVY, max_examples=40)
def test_fills_match(
    few_filler: Family, few_arm: Family, pattern: str, seed: int, greedy: bool, limit: int | None, last: bool
) -> None:
    changes = LONG | {"max_tokens": limit} | ({"temperature": 0.0} if greedy else {})
    field = f"{{x:/{pattern}/}}"
    if last:
        [result] = infill(few_arm, Few(), [Request(f"to {field}")], free(few_arm, **changes), seed)
        assert as_given(result, ["to ", ""])
    else:
        [result] = infill(few_filler, Few(), [Request(f"ab___ to {field} do")], free(few_filler, **changes), seed)
        assert as_given(result, ["ab", " to ", " do"])
    assert re.fullmatch(pattern.replace("(?i:DOG)", "dog"), result.named["x"])


@pytest.mark.parametrize(("most", "longest"), [(3, "dog"), (6, "a cat"), (8, "a cat a")])
def test_patterns_match_within_few_tokens(few_filler: Family, most: int, longest: str) -> None:
    """Long tokens are written where the rest fits, and nothing is begun that does not."""
    pattern = "dog|a cat( a)?|[cdgo]{2,9}a"
    request = Request(f"x {{x:up to {most} tokens, /{pattern}/}} y")
    results = infill(few_filler, Few(), [request] * 150, free(few_filler, **LONG), 0, 150)
    for result in results:
        assert re.fullmatch(pattern, result.fills[0])
        assert len(result.trajectory.events) <= most
    assert any(result.fills[0] == longest for result in results)


def test_what_can_only_end_is_complete(few_filler: Family) -> None:
    for result in filled(few_filler, Request("x{y:/dog{3}/} z"), range(5), stop_threshold=1.0, **LONG):
        assert (result.fills, result.complete, result.note) == (["doggg"], True, None)


# --- Choices


def choices_of(result: Infilling) -> dict[str, float]:
    return result.probabilities["d"]


TEXT, CHOICES = "ab {d|dog|a cat|go|} to", ["dog", "a cat", "go", ""]


def test_probabilities_are_exact_likelihoods(few_filler: Family, few_arm: Family) -> None:
    for family, text in ((few_filler, TEXT), (few_arm, TEXT.removesuffix(" to"))):
        model, seen = text_model(family), text.replace("{d|dog|a cat|go|}", "___")
        [result] = model.infill(text, temperature=0.0)
        likely = [model.likelihood(seen, fills=[choice]).value for choice in CHOICES]
        top = max(likely)
        weights = [2.718281828459045 ** (value - top) for value in likely]
        expected = {choice: weight / sum(weights) for choice, weight in zip(CHOICES, weights, strict=True)}
        assert choices_of(result) == pytest.approx(expected, rel=1e-5)
        assert [*choices_of(result).values()] == sorted(choices_of(result).values(), reverse=True)
        assert result.fills == [max(expected, key=expected.__getitem__)]
        assert result.complete


def test_a_choice_is_weighed_behind_what_was_written_before(few_filler: Family) -> None:
    text = "ab {w:1-3 words} to {d|dog|a cat} go"
    results = infill(few_filler, Few(), [Request(text)] * 8, free(few_filler, **LONG))
    assert len({round(choices_of(result)["dog"], 6) for result in results}) > 3


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_choices_are_drawn_by_their_probabilities(few_filler: Family, few_arm: Family, temperature: float) -> None:
    for family, text in ((few_filler, TEXT), (few_arm, TEXT.removesuffix(" to"))):
        results = infill(family, Few(), [Request(text)] * 250, free(family, temperature=temperature, **LONG), 0, 250)
        assert {result.fills[0] for result in results} <= {*CHOICES}
        shares = {choice: share ** (1 / temperature) for choice, share in choices_of(results[0]).items()}
        found = Counter(result.fills[0] for result in results)
        for choice, share in shares.items():
            expected = share / sum(shares.values())
            assert found[choice] / 250 == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 250) ** 0.5)


def test_choices_can_be_given_apart_from_the_text(few_filler: Family) -> None:
    model = text_model(few_filler)
    [written] = model.infill("ab {d|dog|a cat} to")
    for text in ("ab {d} to", "ab {d|choices} to"):
        [result] = model.infill(text, choices={"d": ["dog", "a cat"]})
        assert (result.text, result.probabilities) == (written.text, written.probabilities)


# --- Together

MIXED = "ab {w:2-3 words} c___d {p:/[acd]{2,5}/} to {d|dog|a cat|go}"
PIECES = ["ab ", " c", "d ", " to ", ""]


def check_mixed(result: Infilling) -> None:
    assert as_given(result, PIECES)
    assert [*result.named] == ["w", "p", "d"]
    assert 2 <= len(result.named["w"].split()) <= 3
    assert re.fullmatch("[acd]{2,5}", result.named["p"])
    assert result.named["d"] in ("dog", "a cat", "go")


@given(st.integers(0, 999), st.sampled_from([0, 1]), st.sampled_from([None, 14, 20]), st.sampled_from([0.0, 1.0]))
@settings(HEAVY, max_examples=15)
def test_several_typed_blanks_in_one_text(
    few_filler: Family, seed: int, parallel: int, limit: int | None, threshold: float
) -> None:
    changes = LONG | {"parallel": parallel, "max_tokens": limit, "stop_threshold": threshold}
    [result] = filled(few_filler, Request(MIXED), [seed], **changes)
    check_mixed(result)
    assert limit is None or len(result.trajectory.events) <= limit


def test_banned_words_do_not_come_about_by_patterns_or_choices(few_filler: Family) -> None:
    request = Request("x {p:/(dog|cat|go|to)/} c", banned=["dog", "go"])
    for result in infill(few_filler, Few(), [request] * 20, free(few_filler, **LONG)):
        assert result.fills[0] in ("cat", "to")
    with pytest.raises(InsertlmError, match="cannot keep 'dog' and 'cat' out of the text"):
        filled(few_filler, Request("x {p:/(dog|cat)/} c", banned=["dog", "cat"]), [0], **LONG)


def test_with_banned_and_required_words(few_filler: Family) -> None:
    request = Request("x {w:2-4 words} c {p:/[cd]{2}a/} to ___", required=["dog", "cat"], banned=["go", "a", "the"])
    for result in infill(few_filler, Few(), [request] * 12, free(few_filler, max_steps=80, stop_threshold=0.9)):
        assert 2 <= len(result.named["w"].split()) <= 4
        assert re.fullmatch("[cd]{2}a", result.named["p"])
        assert not re.search(r"\b(go|a|the)\b", result.text)
        assert all(any(word in fill for fill in (result.fills[0], result.fills[2])) for word in ("dog", "cat"))


def test_required_words_have_a_place_in_blanks_of_words(few_filler: Family) -> None:
    request = Request("x {w:2-3 words} to", required=["dog", "cat"])
    for result in filled(few_filler, request, range(10), **LONG):
        assert all(word in result.fills[0] for word in ("dog", "cat"))
        assert 2 <= len(result.fills[0].split()) <= 3


def test_company_changes_nothing(few_filler: Family, few_arm: Family) -> None:
    """Texts with rules and without, that begin and end at different times, in one batch."""
    for family, typed, plain in ((few_filler, MIXED, "ab ___ to"), (few_arm, "to {w:2-3 words}", "to ___")):
        wanted = free(family, max_steps=60)
        requests = [Request(typed), Request(plain), Request(typed), Request(plain), Request(typed)]
        alone = [infill(family, Few(), [request], wanted, seed)[0] for seed, request in enumerate(requests)]
        for size in (2, 5):
            stream = Stream(family, begin(family, Few(), requests, wanted, 0), wanted, size)
            shown = list(stream)
            assert [result.text for result in stream.results] == [result.text for result in alone]
            assert len(shown) == sum(len(result.trajectory.events) for result in alone)
            together = infill(family, Few(), requests, wanted, 0, size)
            assert [result.text for result in together] == [result.text for result in alone]
            assert [result.probabilities for result in together] == [result.probabilities for result in alone]


def test_names_are_for_all_families() -> None:
    for config in (IlmConfig(), ItConfig(), MdmConfig(block=20), FillConfig()):
        request = Request("a {one:3 tokens} b ___ c {two}", min_length=2, max_length=2)
        [result] = filled(build(config, max_length=500), request)
        sizes = Counter(result.trajectory.order[:k].count(-1) for k in places(result))
        assert [sizes[gap] for gap in result.given.blanks] == [3, 2, 2]
        assert result.named == {"one": result.fills[0], "two": result.fills[2]}
        assert as_given(result, ["a ", " b ", " c ", ""])
        assert result.probabilities == {}


# --- What is refused

ANYWHERE = [IlmConfig(), ItConfig(), MdmConfig(block=20)]


@pytest.mark.parametrize("config", ANYWHERE)
@pytest.mark.parametrize(
    ("spec", "what"), [(":3 words", "a number of words"), (":/a/", "a regular expression"), ("|a|b", "choices")]
)
def test_families_that_insert_anywhere_say_who_can(config: Any, spec: str, what: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        filled(build(config), Request(f"a {{x{spec}}}", min_length=1, max_length=1))
    line = f"{{x}}: only models that write blanks from left to right (fill, arm) keep to {what}"
    assert str(caught.value) == f"{line}; bound its tokens, {{x:3-8 tokens}}"


@pytest.mark.parametrize(
    ("text", "request_", "line"),
    [
        ("a {x:5 words, up to 4 tokens}", {}, "{x}: 5 words need 5 tokens or more; the blank takes 4"),
        ("a {x:2 words}", {"min_length": 3}, "{x}: 3 tokens may be more than 2 words; expected fewer"),
        ("a {x:99 words}", {}, "the blanks need 99 tokens; max_steps leaves 19"),
        ("a {x:/a{30}/}", {}, "the blanks need 31 tokens; max_steps leaves 19"),
        ("a {x:/a(/}", {}, "/a(/: unclosed group; expected a regular expression"),
        (r"a {x:/a\b/}", {}, r"/a\b/: lookarounds not supported yet; expected a regular expression"),
        ("a {x:/(?=a)a/}", {}, "/(?=a)a/: look-around, including look-ahead and look-behind, is not supported; "),
        ("a {x:/z+/}", {}, "/z+/: the model can write nothing that matches; expected another expression"),
        ("a {x:up to 3 tokens, /a{9}/}", {}, "/a{9}/: no match is sure to fit into 3 tokens; expected more"),
        ("a {x|dog|zebra}", {}, "{x}: the model cannot write 'zebra'; expected other choices"),
        ("a {x|dog|a cat}", {"banned": ["cat"]}, "{x}: 'a cat' is a choice and 'cat' is banned"),
        ("a {x|dog|cat}", {"required": ["go"]}, "the required 'go' has 3 tokens; the largest blank takes 0"),
        ("a {x|choices}", {}, "{x|choices}: expected the argument choices to have a list for it"),
        ("a {x}", {"choices": {"y": ["a"]}}, "choices: the text has no blank {y}"),
        ("a {x:3 words}", {"choices": {"x": ["a"]}}, "choices: the text says already what {x} may be; "),
        ("a {x}", {"choices": {"x": "dog"}}, "choices: expected a list of texts for 'x', got 'dog'"),
        ("a {x}", {"choices": {"x": []}}, "choices: expected a list of texts for 'x', got []"),
        ("a {x}", {"choices": {"x": [1]}}, "choices: expected texts, got 1"),
        ("a {x}", {"choices": {"x": ["a", "a"]}}, "choices: a text is there twice for 'x'; expected different ones"),
        ("a {x}", {"choices": {"x": ["\x00"]}}, "choices: a text has the control character U+0000 at character 0; "),
        ("a {x}", {"choices": ["a"]}, "choices: expected a list of texts for every name, got ['a']"),
    ],
)
def test_what_cannot_be_kept(few_filler: Family, text: str, request_: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        infill(few_filler, Few(), [Request(text, **request_)], free(few_filler, max_steps=20))
    assert str(caught.value).startswith(line)


def test_without_llguidance(few_filler: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InsertlmError, match=r"regular expressions need llguidance; pip install 'insertlm\[patterns\]'"):
        filled(few_filler, Request("a {x:/a/}"))


def test_patterns_need_tokens_that_read_the_same_everywhere(few_filler: Family) -> None:
    class Joining(Few):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).removeprefix(" ")

    with pytest.raises(InsertlmError, match="a tokenizer whose tokens read the same everywhere"):
        infill(few_filler, Joining(), [Request("a {x:/a/}")], FREE)
