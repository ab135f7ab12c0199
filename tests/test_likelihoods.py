"""`Model.likelihood` and `Model.score`, for models of every family."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from harness_tasks import save_run

import insertlm
from insertlm.core.errors import InsertlmError
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.score import Completion, Likelihood
from insertlm.inference.settings import Prompt
from insertlm.model import Model

TEXT = "The cat sat on the mat."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Not trained, by family."""
    return cache(lambda family: insertlm.load(save_run(tmp_path_factory.mktemp(family), family), "cpu"))


@pytest.mark.parametrize("family", ["ilm", "arm", "fill", "mdm"])
def test_a_text_from_nothing(model: Callable[[str], Model], family: str) -> None:
    it = model(family)
    ids = it.text_tokenizer.encode(TEXT)
    found = it.likelihood(TEXT)
    [expected] = log_likelihoods(it.family, [Completion.behind([], ids)], Effort())
    assert (found.value, found.error, found.exact) == expected[:3]
    assert found.exact == (family != "mdm")
    assert (found.tokens, found.bytes) == (len(ids), 23)
    assert found.bits_per_byte == pytest.approx(-found.value / math.log(2) / 23)
    assert found.fills == (None if family == "mdm" else [found.value])
    nothing = it.likelihood("")
    assert nothing.tokens == nothing.bytes == 0 and math.isnan(nothing.bits_per_byte) and -300 < nothing.value < 0


def test_blanks(model: Callable[[str], Model]) -> None:
    """A hidden space belongs to the first token behind it; an empty fill has no token."""
    for family in ("ilm", "fill"):
        it = model(family)
        encode = it.text_tokenizer.encode
        found = it.likelihood("The ___ sat on ___", fills=["cat", "the mat"])
        start, fills = [*encode("The"), *encode(" sat on")], [encode(" cat"), encode(" the mat")]
        prompt = Prompt([], start=start, open=frozenset({len(encode("The")), len(start)}))
        [expected] = log_likelihoods(it.family, [Completion(prompt, fills)], Effort())
        assert (found.value, found.exact) == (expected.value, True)
        assert (found.tokens, found.bytes) == (len(fills[0]) + len(fills[1]), len("catthe mat"))
        assert it.likelihood("The ___ sat", fills=[""]).tokens == 0
    assert found.fills is not None and len(found.fills) == 2
    assert sum(found.fills) == pytest.approx(found.value)
    # The first blank is written before the second, with both sides in view.
    other = it.likelihood("The ___ sat on ___", fills=["cat", "the dog"])
    assert other.fills is not None and other.fills[0] == pytest.approx(found.fills[0], abs=1e-5)
    assert other.fills[1] != pytest.approx(found.fills[1], abs=1e-3)


def test_an_arm_continues(model: Callable[[str], Model]) -> None:
    arm = model("arm")
    found = arm.likelihood("The cat ___", fills=["sat"])
    assert found.exact and found.tokens == 1
    with pytest.raises(InsertlmError, match="this family writes at the end of the text alone"):
        arm.likelihood("The ___ sat", fills=["cat"])


def test_effort_is_passed_on(model: Callable[[str], Model]) -> None:
    ilm = model("ilm")
    bound = ilm.likelihood(TEXT, exact=0, orders=3, states=1, seed=4)
    ids = ilm.text_tokenizer.encode(TEXT)
    [expected] = log_likelihoods(ilm.family, [Completion.behind([], ids)], Effort(0, 3, 1, 4))
    assert (bound.value, bound.error, bound.exact, bound.fills) == (*expected[:2], False, None)
    assert bound.error > 0


def test_a_prompt_comes_first() -> None:
    star = insertlm.load("star-hard-mini", "cpu")
    graph = "4>7 7>1 1>6 : 4 1"
    found = star.likelihood("4 7 7 1", graph)
    assert isinstance(found, Likelihood) and found.exact and found.tokens == 4
    other = star.likelihood("4 7 7 1", "4>7 7>1 1>6 : 7 6")
    assert other.value != found.value
    with pytest.raises(InsertlmError, match="expected a model of text"):
        star.likelihood("4 7 ___", fills=["7 1"])


@pytest.mark.parametrize("family", ["arm", "fill"])
def test_scores_of_models_that_write_from_the_left(model: Callable[[str], Model], family: str) -> None:
    it = model(family)
    score, whole = it.score(TEXT), it.likelihood(TEXT)
    assert score.ids == it.text_tokenizer.encode(TEXT)
    assert math.fsum(map(math.log, [*score.tokens, score.stop_probability])) == pytest.approx(whole.value, abs=1e-5)


@pytest.mark.parametrize("family", ["mdm", "it"])
def test_others_have_no_score(model: Callable[[str], Model], family: str) -> None:
    with pytest.raises(InsertlmError, match="score: this family gives no probabilities to single tokens; expected an"):
        model(family).score(TEXT)


@pytest.mark.parametrize(
    ("family", "text", "more", "message"),
    [
        ("it", TEXT, {}, "likelihoods: expected a model of the family ilm, arm, fill or mdm"),
        ("fill", "The ___", {"fills": "cat"}, "likelihood: expected a list of fills, and no prompt besides"),
        ("fill", "The ___", {"fills": ["cat"], "prompt": "x"}, "expected a list of fills, and no prompt besides"),
        ("fill", TEXT, {"fills": []}, "likelihood: the text has no blank; expected ___ for each fill"),
        ("fill", "The ___", {"fills": ["cat", "sat"]}, "fills: expected a text for each of 1 blanks, got 2"),
        ("fill", TEXT * 30, {}, "the text has .* tokens, its prompt included; the model takes 71"),
        ("mdm", "The ___ sat", {"fills": ["cat"]}, "an mdm gives one to texts and to their ends; expected no other"),
        ("ilm", TEXT, {"exact": 20}, "likelihoods: expected exact from 0 to 16 tokens, got 20"),
        ("ilm", TEXT, {"prompt": "a"}, "a text model writes from nothing"),
    ],
)
def test_what_cannot_be_asked(
    model: Callable[[str], Model], family: str, text: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InsertlmError, match=message):
        model(family).likelihood(text, **more)
