"""Turns sentences of the One Billion Word Benchmark into plain text.

The benchmark has a blank before every punctuation mark, and its quotation marks all look alike:
`" I don 't know , " he said .` These rules join what belongs together, and let quotation marks open and close in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

__all__ = ["Detokeniser", "detokeniser"]

Detokeniser = Literal["none", "lm1b"]

_RULES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\b(https?) : / / ", r"\1://"),
        (r" (['’](?:s|S|m|M|d|D|re|RE|ve|VE|ll|LL|t|T)\b)", r"\1"),  # he 's, didn 't
        (r" n(['’]t\b)", r"n\1"),  # do n't
        (r"(?<!\S)' ([^']+?) '(?=[\s.,!?]|$)", r"'\1'"),
        (r" ([.,!?;:%)\]}]+)(?=[\s\"'”’]|$)", r"\1"),
        (r"([(\[{$£€]) (?=\S)", r"\1"),
        (r" / ", "/"),
    )
]
_QUOTED = re.compile(r'" ([^"]*?) ?"|" ([^"]*)$')


def detokeniser(name: Detokeniser) -> Callable[[str], str]:
    return _lm1b if name == "lm1b" else str


def _lm1b(text: str) -> str:
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    return _QUOTED.sub(lambda found: f'"{found[1]}"' if found[1] is not None else f'"{found[2]}', text)
