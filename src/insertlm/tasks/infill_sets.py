"""Sets for infilling: texts with segments removed, made as the paper describes; its own builder is not public.

- `single`: one segment of about 20 % of the words (the paper's LM1B, single segment). Of a text of n words, a run of
  r = n / 5 is removed, rounded and at least 1; every place is equally likely.
- `several`: about 20 % of the words in several segments (LM1B, several segments). r is as above but at least 2. The
  number of segments is uniform on 2 … 5, or up to what r allows. Every way to share r words among them is equally
  likely, and so is every set of places that leaves a word between two segments.
- `middle`: the middle sentence (TinyStories); of an even number of sentences, the later of the two.

Words are separated by white space, so a set is the same for every tokenizer. White space around a segment stays. A text
that is too short for its kind (single: 5 words, several: 8, middle: 3 sentences) is skipped. Which texts are chosen,
and what is removed from each, depends only on the seed and on a text's place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import read_records
from insertlm.text.sentences import sentences

__all__ = ["KINDS", "Blanked", "make_set", "read_set"]

Range = tuple[int, int]
_SHARE, _SEGMENTS = 0.2, 5  # of the words that are removed; most segments
_WORD = re.compile(r"\S+")


class Blanked(NamedTuple):
    """A text and what is removed from it: pieces and removed segments alternate, beginning and ending with a piece."""

    pieces: list[str]
    removed: list[str]
    text: str

    @classmethod
    def of(cls, text: str, blanks: Sequence[Range]) -> Blanked:
        ends = [0, *(place for blank in blanks for place in blank), len(text)]
        parts = [text[first:last] for first, last in pairwise(ends)]
        return cls(parts[::2], parts[1::2], text)

    @property
    def blanks(self) -> list[Range]:
        """Where the removed segments are in the text."""
        lengths = [len(part) for pair in zip(self.pieces, self.removed, strict=False) for part in pair]
        ends = list(accumulate(lengths))
        return list(zip(ends[::2], ends[1::2], strict=True))


def make_set(texts: Iterable[str], kind: str, count: int | None, seed: int) -> list[Blanked]:
    """`count` of the texts (None: all that are long enough), in their order."""
    everything = list(texts)
    order = np.random.default_rng(seed).permutation(len(everything)).tolist()
    found: dict[int, Blanked] = {}
    for number in order:  # at random, so that a set is not just the beginning of the file
        if len(found) == count:
            break
        if blanks := KINDS[kind](everything[number], np.random.default_rng((seed, number))):
            found[number] = Blanked.of(everything[number], blanks)
    if len(found) < (count or 1):
        raise InsertlmError(f"{len(found):,} of {len(everything):,} texts are long enough; expected {count or 1:,}")
    return [found[number] for number in sorted(found)]  # in the order of the file


def read_set(path: Path, count: int | None = None) -> list[Blanked]:
    """A set as `insertlm data infilling` writes it."""
    examples = []
    for number, record in enumerate(read_records(path, count), start=1):
        example = _example(record)  # pieces that do not make up the text would give wrong places of the blanks
        if example is None:
            raise InsertlmError(f"{path}, line {number}: expected pieces and removed segments that make up the text")
        examples.append(example)
    return examples


def _example(record: dict[str, Any]) -> Blanked | None:
    parts = [record.get(name) for name in Blanked._fields]
    match parts:
        case [list(pieces), list(removed), str(text)] if len(pieces) == len(removed) + 1 > 1:
            whole = [part for pair in zip(pieces, [*removed, ""], strict=True) for part in pair]
            if all(isinstance(part, str) for part in whole) and "".join(whole) == text:
                return Blanked(pieces, removed, text)
    return None


def _single(text: str, rng: np.random.Generator) -> list[Range]:
    words = _words(text)
    if len(words) < 5:
        return []
    count = round(_SHARE * len(words))
    first = int(rng.integers(len(words) - count + 1))
    return [(words[first][0], words[first + count - 1][1])]


def _several(text: str, rng: np.random.Generator) -> list[Range]:
    words = _words(text)
    if len(words) < 8:
        return []
    count = max(2, round(_SHARE * len(words)))
    segments = int(rng.integers(2, min(count, _SEGMENTS) + 1))
    # Cuts between the removed words make the segments. Each segment stands before a different one of the words that are
    # left, or at the end, so two segments never touch.
    cuts = [0, *sorted(1 + rng.choice(count - 1, segments - 1, replace=False)), count]
    before = sorted(rng.choice(len(words) - count + 1, segments, replace=False))
    ranges = [(left + first, left + last - 1) for left, (first, last) in zip(before, pairwise(cuts), strict=True)]
    return [(words[first][0], words[last][1]) for first, last in ranges]


def _middle(text: str, _: np.random.Generator) -> list[Range]:
    found = sentences(text)
    if len(found) < 3:
        return []
    first, last = found[len(found) // 2]
    inner = text[first:last]  # white space around the sentence stays in the text
    return [(first + len(inner) - len(inner.lstrip()), last - len(inner) + len(inner.rstrip()))]


def _words(text: str) -> list[Range]:
    return [match.span() for match in _WORD.finditer(text)]


KINDS: dict[str, Callable[[str, np.random.Generator], list[Range]]] = {
    "single": _single,
    "several": _several,
    "middle": _middle,
}
