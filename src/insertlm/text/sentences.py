"""Sentences of a text.

A sentence ends with . ! or ? and any closing quotes or brackets, if white space follows and then a capital, a digit, a
quote or a bracket. Mr. and the like end none.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise

__all__ = ["excerpt", "sentences"]

_END = re.compile(r"""(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)[.!?]+["'”’)\]]*(?=\s+["'“‘(\[]*[A-Z0-9])""")


def sentences(text: str) -> list[tuple[int, int]]:
    """The range of each, with the white space around it."""
    ends = [match.end() for match in _END.finditer(text)]
    return [(first, last) for first, last in pairwise([0, *ends, len(text)]) if text[first:last].strip()]


def excerpt(text: str, share: float) -> str:
    """Some consecutive sentences, but not all, of that share of texts; of the others nothing.

    A hash of the text decides whether, how many and which, so that a corpus has the same excerpts whoever reads it. All
    numbers and places are equally likely.
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
