"""Texts of every kind, with blanks wherever they may be, in every family that can fill them in.

A blank may stay empty where it is allowed to, and has a token where nothing is said.
"""

from __future__ import annotations

from typing import Any

import pytest
from lettering import Few, build, text_model

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.model import Model

TEXTS = {
    "at the start": "___ a cat.",
    "at the end": "a cat ___",
    "at the end without a space": "a cat___",
    "nothing else": "___",
    "a space before it and nothing else": " ___",
    "one word": "cat ___",
    "a space between two": "a ___ ___ b",
    "only two with a space between": "___ ___",
    "paragraphs": "a cat.\n\n___\n\n\ta dog ___.\n",
    "other letters": "Zoë ___, “___” 🙂",
}
AT_THE_END = (
    "at the end",
    "at the end without a space",
    "nothing else",
    "a space before it and nothing else",
    "one word",
)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    configs: dict[str, Any] = {"ilm": IlmConfig(), "it": ItConfig(), "fill": FillConfig(), "arm": ArmConfig()}
    return {name: text_model(build(config, Few, max_length=600), name) for name, config in configs.items()}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["ilm", "it", "fill"])
def test_blanks_of_every_kind_are_filled_in(models: dict[str, Model], name: str, text: str) -> None:
    pieces = text.split("___")
    results = models[name].infill(text, samples=6, max_tokens=40)
    for result in results:
        parts = [part for pair in zip(pieces, [*result.fills, ""], strict=True) for part in pair]
        assert result.text == "".join(parts)
        written = [event.token for event in result.trajectory.events]
        assert bool(written) or name == "it"
        if result.complete and name != "it":
            assert tokens(result) == [max(1, count) for count in tokens(result)]
    streamed = models[name].infill(text, samples=6, max_tokens=40, stream=True)
    assert [result.text for result in streamed.results] == [result.text for result in results]


@pytest.mark.parametrize("text", [TEXTS[key] for key in AT_THE_END], ids=AT_THE_END)
def test_a_model_that_appends_goes_on_at_the_end(models: dict[str, Model], text: str) -> None:
    [result] = models["arm"].infill(text)
    assert result.text == text.replace("___", result.fills[0])


@pytest.mark.parametrize("text", [TEXTS[key] for key in TEXTS if key not in AT_THE_END])
def test_a_model_that_appends_says_so_elsewhere(models: dict[str, Model], text: str) -> None:
    with pytest.raises(InsertlmError, match=r"^this model writes at the end of a text alone; expected one ___, at the"):
        models["arm"].infill(text)


def test_a_model_that_appends_inserts_nowhere_else(models: dict[str, Model]) -> None:
    with pytest.raises(InsertlmError, match=r"^this model writes at the end of a text alone; "):
        models["arm"].infill("a cat", anywhere=True)


@pytest.mark.parametrize("text", ["___ a cat.", "a ___.", "a ___", "___", "a ___ b ___"])
@pytest.mark.parametrize("name", ["ilm", "fill"])
def test_a_blank_stays_empty_only_where_it_may(models: dict[str, Model], name: str, text: str) -> None:
    """With a model that would always stop."""
    always: dict[str, Any] = {"stop_threshold": 0.0, "temperature": 0.0, "position_top_k": 1}
    [empty] = models[name].infill(text, min_length=0, **always)
    assert (empty.complete, set(empty.fills)) == (True, {""})
    assert empty.text == text.replace("___", "")
    [one] = models[name].infill(text, **always)
    assert one.complete
    assert set(tokens(one)) == {1}
    if "b" in text:
        [half] = models[name].infill(text, min_length=[0, None], **always)
        assert tokens(half) == [0, 1]


def tokens(result: Any) -> list[int]:
    """How many were written into each blank."""
    order = result.trajectory.order
    gaps = [order[:k].count(-1) for k, event in enumerate(order) if event >= 0]
    return [gaps.count(gap) for gap in result.given.blanks]


def test_a_limit_is_named_in_words_of_python(models: dict[str, Model]) -> None:
    ilm = models["ilm"]
    limits: list[dict[str, Any]] = [{"max_length": 2}, {"max_tokens": 3}, {"max_steps": 1}]
    notes = [ilm.infill("a ___ b", stop_threshold=1.0, **limit)[0].note for limit in limits]
    assert notes == [
        "it was ended by the most of a blank (max_length, or what the text says of it) after 2 tokens; "
        "raise it for longer fills",
        "it reached max_tokens after 3 tokens; raise it for a longer text",
        "it reached max_steps after 1 token; for a longer text raise it, or give max_tokens",
    ]
    assert ilm.infill("a ___ b", stop_threshold=0.0)[0].note is None
