"""Sentences of a text.

A sentence ends with . ! or ? and any closing quotes or brackets, if white space follows and then a capital, a digit, a
quote or a bracket. Mr. and the like end none.

`excerpt` and `passages` take parts of a text. A hash of the text decides which, so that a corpus has the same parts
whoever reads it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["excerpt", "passages", "sentences"]

_END = re.compile(r"""(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)[.!?]+["'”’)\]]*(?=\s+["'“‘(\[]*[A-Z0-9])""")

_SHORTEST = 6  # tokens that a passage should have at least


def sentences(text: str) -> list[tuple[int, int]]:
    """The range of each, with the white space around it."""
    ends = [match.end() for match in _END.finditer(text)]
    return [(first, last) for first, last in pairwise([0, *ends, len(text)]) if text[first:last].strip()]


def excerpt(text: str, share: float) -> str:
    """Some consecutive sentences, but not all, of that share of texts; of the others nothing.

    All numbers and places are equally likely.
    """
    draws = hashlib.blake2b(text.encode(), digest_size=24, person=b"excerpt").digest()
    # Three independent numbers, uniform on [0, 1).
    chosen, size, place = (int.from_bytes(draws[k : k + 8], "little") / 2.0**64 for k in (0, 8, 16))
    found = sentences(text) if chosen < share else []
    if len(found) < 2:
        return ""
    count = 1 + int(size * (len(found) - 1))
    first = int(place * (len(found) - count + 1))
    return text[found[first][0] : found[first + count - 1][1]].strip()


def passages(text: str, sizes: Sequence[int], longest: int) -> list[str]:
    """A text cut into passages of consecutive sentences, of very different sizes up to `longest`.

    A passage ends with the sentence with which it reaches a size that is drawn for it. These sizes are log-uniform, so
    there are as many of 10 to 20 tokens as of 100 to 200. A sentence that is larger than `longest` is left out.
    sizes: of each of its `lines_and_sentences`, in tokens
    """
    found, parts = lines_and_sentences(text), list[str]()
    first = size = 0

    def end(behind: int) -> None:
        """Before the sentence of this number."""
        nonlocal first, size
        if first < behind:
            parts.append(text[found[first][0] : found[behind - 1][1]].strip())
        first, size = behind, 0

    for number, own in enumerate(sizes):
        if size + own > longest:
            end(number)
        if own > longest:
            first = number + 1
            continue
        size += own
        if size >= _log_uniform(text, len(parts), longest):
            end(number + 1)
    end(len(found))
    return parts


def lines_and_sentences(text: str) -> list[tuple[int, int]]:
    """Sentences, of which none goes beyond the end of a line: headings and talk often have no full stop."""
    found, start = list[tuple[int, int]](), 0
    for line in text.splitlines(keepends=True):
        found += [(start + first, start + last) for first, last in sentences(line)]
        start += len(line)
    return found


def _log_uniform(text: str, number: int, longest: int) -> float:
    """For the passage of this number: from _SHORTEST to longest."""
    draw = hashlib.blake2b(text.encode(), digest_size=8, person=b"passage", salt=number.to_bytes(8, "little")).digest()
    uniform = int.from_bytes(draw, "little") / 2.0**64
    return float(_SHORTEST * (max(longest, _SHORTEST) / _SHORTEST) ** uniform)
