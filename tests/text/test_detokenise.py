"""Sentences of the benchmark as people write them."""

from __future__ import annotations

import pytest

from insertlm.text.detokenise import detokeniser


@pytest.mark.parametrize(
    ("split", "joined"),
    [
        ("The state 's tests , he said .", "The state's tests, he said."),
        ("I didn 't know , we do n't .", "I didn't know, we don't."),
        ('It is " Mad Men " , he said .', 'It is "Mad Men", he said.'),
        ('A leak of " My Own Strength . "', 'A leak of "My Own Strength."'),
        ('" No , " he said , " never . "', '"No," he said, "never."'),
        ('He said " wait', 'He said "wait'),
        ("CHILE ( AP ) - About 700 people", "CHILE (AP) - About 700 people"),
        ("It may take ' millions of years ' more .", "It may take 'millions of years' more."),
        ("$ 6.6 billion , or 5 % ; £ 3 ?", "$6.6 billion, or 5%; £3?"),
        ("See http : / / a.com now and / or later", "See http://a.com now and/or later"),
        ("The U.S. ban 22 -- said", "The U.S. ban 22 -- said"),
        ("", ""),
    ],
)
def test_lm1b(split: str, joined: str) -> None:
    assert detokeniser("lm1b")(split) == joined


def test_none_changes_nothing() -> None:
    assert detokeniser("none")('" a , b "') == '" a , b "'
