"""Sets for infilling: texts with segments removed, made as the paper describes; its own builder is not public.

- `single`: one segment of about 20 % of the words (the paper's LM1B, single segment). Of a text of n words, a run of
  r = n / 5 is removed, rounded and at least 1; every place is equally likely.
- `several`: about 20 % of the words in several segments (LM1B, several segments). r is as above but at least 2. The
  number of segments is uniform on 2 … 5, or up to what r allows. Every way to share r words among them is equally
  likely, and so is every set of places that leaves a word between two segments.
- `middle`: the middle sentence (TinyStories); of an even number of sentences, the later of the two.

Others do the same with other texts:

- `third` and `middle-three`: of a story of five sentences the third, or the second to the fourth (ROCStories).
- `phrase`: 1 to 12 words of one sentence. The number is log-uniform, or up to what the longest sentence has; every
  place in which so many words of one sentence stand is equally likely. At least one word stays.
- `sentence`: a sentence between two others, all equally likely. It stands in one line.

Words are separated by white space, so a set is the same for every tokenizer. White space around a segment stays. A text
that is too short for its kind (single: 5 words, several: 8, phrase: 2, middle and sentence: 3 sentences) is skipped.
Which texts are chosen, and what is removed from each, depends only on the seed and on a text's place in the file.

Long documents are first cut into excerpts of whole sentences, see `excerpts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import read_records
from insertlm.text.sentences import sentences

__all__ = ["KINDS", "Blanked", "Document", "excerpts", "make_set", "read_set"]

Range = tuple[int, int]
_SHARE, _SEGMENTS = 0.2, 5  # of the words that are removed; most segments
_PHRASE = 12  # most words of a phrase
_SHORTEST = 25  # words that an excerpt has room for at least
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Document:
    """A text. known: its sentences in order, where a file lists them; else they are found by their punctuation"""

    text: str
    known: tuple[str, ...] = ()

    @cached_property
    def sentences(self) -> list[Range]:
        """Where they are in the text, without the white space around them."""
        if not self.known:
            return [_trimmed(self.text, found) for found in sentences(self.text)]
        ranges, end = [], 0
        for sentence in self.known:
            first = self.text.find(sentence.strip(), end)
            if first < 0 or not sentence.strip():
                raise InsertlmError(f"expected sentences that stand in their text in this order, got {sentence!r}")
            end = first + len(sentence.strip())
            ranges.append((first, end))
        return ranges


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


def excerpts(document: Document, most: int, rng: np.random.Generator) -> Iterator[Document]:
    """All of a document, cut into runs of whole sentences, each of at most so many words.

    For each run its own most is drawn, log-uniform from 25 words on, so that short texts and long ones come about. A
    sentence that is longer than that is in no excerpt.
    """
    words = [len(document.text[first:last].split()) for first, last in document.sentences]
    place = 0
    while place < len(words):
        room = _log_uniform(min(_SHORTEST, most), most, rng)
        first, total = place, 0
        while place < len(words) and total + words[place] <= room:
            total += words[place]
            place += 1
        if place == first:  # the sentence has more words than there is room for
            place += 1
            continue
        start, end = document.sentences[first][0], document.sentences[place - 1][1]
        yield Document(document.text[start:end])


def make_set(documents: Iterable[Document], kind: str, count: int | None, seed: int) -> list[Blanked]:
    """`count` of the texts (None: all that are long enough), in their order."""
    everything = list(documents)
    order = np.random.default_rng(seed).permutation(len(everything)).tolist()
    found: dict[int, Blanked] = {}
    for number in order:  # at random, so that a set is not just the beginning of the file
        if len(found) == count:
            break
        if blanks := KINDS[kind](everything[number], np.random.default_rng((seed, number))):
            found[number] = Blanked.of(everything[number].text, blanks)
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


def _single(document: Document, rng: np.random.Generator) -> list[Range]:
    words = _words(document.text)
    if len(words) < 5:
        return []
    count = round(_SHARE * len(words))
    first = int(rng.integers(len(words) - count + 1))
    return [(words[first][0], words[first + count - 1][1])]


def _several(document: Document, rng: np.random.Generator) -> list[Range]:
    words = _words(document.text)
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


def _middle(document: Document, _: np.random.Generator) -> list[Range]:
    found = document.sentences
    return [found[len(found) // 2]] if len(found) >= 3 else []


def _third(document: Document, _: np.random.Generator) -> list[Range]:
    return [document.sentences[2]] if len(document.sentences) == 5 else []


def _middle_three(document: Document, _: np.random.Generator) -> list[Range]:
    found = document.sentences
    return [(found[1][0], found[3][1])] if len(found) == 5 else []


def _phrase(document: Document, rng: np.random.Generator) -> list[Range]:
    by_sentence = [
        [(first + start, first + end) for start, end in _words(document.text[first:last])]
        for first, last in document.sentences
    ]
    longest = max(map(len, by_sentence), default=0)
    most = min(longest, sum(map(len, by_sentence)) - 1)  # so that something stays
    if most < 1:
        return []
    count = min(_log_uniform(1, _PHRASE, rng), most)
    runs = [(words[k][0], words[k + count - 1][1]) for words in by_sentence for k in range(len(words) - count + 1)]
    return [runs[rng.integers(len(runs))]]


def _sentence(document: Document, rng: np.random.Generator) -> list[Range]:
    # A line break inside a sentence means a heading, a list or a table, which punctuation alone does not tell apart.
    inner = [found for found in document.sentences[1:-1] if "\n" not in document.text[slice(*found)]]
    return [inner[rng.integers(len(inner))]] if inner else []


def _words(text: str) -> list[Range]:
    return [match.span() for match in _WORD.finditer(text)]


def _trimmed(text: str, found: Range) -> Range:
    """Without the white space around it, which stays in the text."""
    first, last = found
    inner = text[first:last]
    return first + len(inner) - len(inner.lstrip()), last - len(inner) + len(inner.rstrip())


def _log_uniform(least: int, most: int, rng: np.random.Generator) -> int:
    return min(most, math.floor(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))


KINDS: dict[str, Callable[[Document, np.random.Generator], list[Range]]] = {
    "single": _single,
    "several": _several,
    "middle": _middle,
    "third": _third,
    "middle-three": _middle_three,
    "phrase": _phrase,
    "sentence": _sentence,
}
