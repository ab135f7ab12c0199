"""What a text says of its blanks, as rules in ids: a number of words, a regular expression, choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from insertlm.core.checks import shown
from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import Bounds
from insertlm.text.blanks import check_characters
from insertlm.text.fields import Field
from insertlm.text.tokenizers import Tokenizer

if TYPE_CHECKING:  # they import torch, and what is wrong with a request is said before that
    from insertlm.families.base import Family
    from insertlm.inference.rules import Choice, Rule
    from insertlm.infill.words import WordCount

__all__ = ["check_choices", "expected_words", "make_rule", "with_choices"]


def check_choices(choices: Mapping[str, Sequence[str]]) -> None:
    if not isinstance(choices, Mapping):
        raise InsertlmError(f"choices: expected a list of texts for every name, got {shown(choices)}")
    for name, each in choices.items():
        if isinstance(each, str) or not isinstance(each, Sequence) or not each:
            raise InsertlmError(f"choices: expected a list of texts for {shown(name)}, got {shown(each)}")
        for choice in each:
            if not isinstance(choice, str):
                raise InsertlmError(f"choices: expected texts, got {shown(choice)}")
            check_characters(choice, "choices: a text")
        if len({*each}) < len(each):
            raise InsertlmError(f"choices: a text is there twice for {shown(name)}; expected different ones")


def with_choices(fields: Sequence[Field], choices: Mapping[str, Sequence[str]]) -> list[Field]:
    """What is said of each blank, with the choices that are given apart from the text."""
    if strange := choices.keys() - {field.name for field in fields}:
        name = min(map(str, strange))
        raise InsertlmError(f"choices: the text has no blank {{{name}}}")
    found = []
    for field in fields:
        given = choices.get(field.name, ()) if field.name is not None else ()
        if given and field not in (Field(field.name), Field(field.name, listed=True)):
            raise InsertlmError(f"choices: the text says already what {{{field.name}}} may be; expected one of the two")
        if field.listed and not given:
            raise InsertlmError(f"{{{field.name}|choices}}: expected the argument choices to have a list for it")
        found.append(replace(field, choices=tuple(given)) if given else field)
    return found


def expected_words(field: Field) -> int | None:
    """About how many words to tell the model: what is said, else the geometric mean of the least and the most."""
    if field.about is not None or field.words is None:
        return field.about
    least, most = field.words
    return None if most is None else min(most, round((max(1, least) * most) ** 0.5))


def make_rule(
    field: Field, family: Family, tokenizer: Tokenizer, bounds: Bounds, spaced: bool, banned: Sequence[str]
) -> Rule | None:
    """spaced: whether the first token brings a space that is no part of the fill   banned: words"""
    kinds = {"a number of words": field.words, "a regular expression": field.pattern, "choices": field.choices}
    asked = next((kind for kind, value in kinds.items() if value), None)
    if asked is None:
        return None
    if not family.abilities.left_to_right:
        bounded = f"; bound its tokens, {{{field.name}:3-8 tokens}}" if family.abilities.supports_constraints else ""
        raise InsertlmError(
            f"{{{field.name}}}: only models that write blanks from left to right (fill, arm) keep to {asked}{bounded}"
        )
    if field.choices:
        return _choice(field, family, tokenizer, spaced, banned)
    if field.pattern is not None:
        from insertlm.infill.patterns import Pattern

        return Pattern(tokenizer, field.pattern, spaced, bounds.most)
    return _word_count(field, tokenizer, bounds)


def _word_count(field: Field, tokenizer: Tokenizer, bounds: Bounds) -> WordCount:
    from insertlm.infill.words import WordCount

    assert field.words is not None
    least, most = field.words
    rule = WordCount(tokenizer, least, most)
    if bounds.most is not None and bounds.most < rule.needs:
        raise InsertlmError(
            f"{{{field.name}}}: {least} words need {rule.needs} tokens or more; the blank takes {bounds.most}"
        )
    if most is not None and most < bounds.least:  # a token holds a word at most
        raise InsertlmError(f"{{{field.name}}}: {bounds.least} tokens may be more than {most} words; expected fewer")
    return rule


def _choice(field: Field, family: Family, tokenizer: Tokenizer, spaced: bool, banned: Sequence[str]) -> Choice:
    from insertlm.inference.rules import Choice
    from insertlm.infill.requests import can_write, whole_word

    options = []
    for choice in field.choices:
        written = f" {choice}" if spaced and choice else choice
        ids = tuple(tokenizer.encode(written))
        if tokenizer.decode(ids).removeprefix(" " * spaced) != choice or not can_write(family, ids):
            raise InsertlmError(f"{{{field.name}}}: the model cannot write {choice!r}; expected other choices")
        if found := [word for word in banned if word and whole_word(word).search(choice)]:
            raise InsertlmError(f"{{{field.name}}}: {choice!r} is a choice and {found[0]!r} is banned")
        options.append(ids)
    return Choice(options)
