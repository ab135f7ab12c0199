"""A least and a most number of words in a blank. Words are what blank space sets apart in the fill, as `split` has it.

- A token that would begin a word too many is not written: the blank is full then, and is cut back to where its end is
  likeliest, as a blank with a most of tokens is.
- When there are only as many tokens left as the missing words need, only tokens that begin a word are written.
- The state of a blank is read from its decoded text, and what each token adds from a table over the vocabulary. Where
  the two may disagree, at characters that several tokens share, the few tokens that matter are decoded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from insertlm.inference.rules import Verdict
from insertlm.text.tokenizers import Tokenizer

__all__ = ["WordCount", "added_texts"]

_TOO_FEW = 3.0  # penalty
_HELD = 8  # words: blanks that may get at most so many more are held, to be cut back
_SHARES = (0.75, 0.5)  # of the most words: the hints of the second and third attempt
_BROKEN = "\ufffd"


class WordCount:
    """least, most: words, most None: no maximum"""

    free = True

    def __init__(self, tokenizer: Tokenizer, least: int, most: int | None) -> None:
        self.tokenizer, self.least, self.most = tokenizer, least, most
        self.table = _Table.of(tokenizer)
        self.needs = least * self.table.cost
        self.hints = [max(1, least, int(most * share)) for share in _SHARES] if most else []

    def takes(self, fill: Sequence[int], room: int) -> int:
        # A token begins one word at most, as a rule, and none is needed for a word that is missing.
        count = len(self.tokenizer.decode(fill).split())
        spare = room - max(0, self.least - count) * self.table.cost
        return max(0, spare if self.most is None else min(spare, self.most - count))

    def judge(self, fill: Sequence[int], room: int) -> Verdict:
        table, text = self.table, self.tokenizer.decode(fill)
        count = len(text.split())
        inside = bool(text) and not text[-1].isspace()
        after, apart = count + (table.inside if inside else table.outside), table.apart
        if text.endswith(_BROKEN):
            after, apart = after.clone(), apart.clone()
            for token in table.broken:
                whole = self.tokenizer.decode([*fill, token])
                after[token], apart[token] = len(whole.split()), whole[-1:].isspace()
        missing = (self.least - after).clamp(min=0)
        # Behind a space, a vocabulary without words that bring theirs needs one token less.
        needed = missing * table.cost - (missing > 0) * apart * (table.cost - 1)
        mask = needed < room
        beyond = None if self.most is None else after > self.most
        if count < self.least:
            mask, beyond = mask if beyond is None else mask & ~beyond, None
        held = self.most is not None and self.most - count <= _HELD
        return Verdict(_TOO_FEW * (count < self.least), mask=None if mask.all() else mask, beyond=beyond, held=held)


@dataclass(frozen=True)
class _Table:
    """Of each id, [V]: inside, outside, how many words it begins inside of a word and elsewhere   apart: bool, whether
    it ends with blank space

    broken: the ids that end or begin inside of a character   cost: how many tokens are enough for a further word
    """

    inside: Tensor
    outside: Tensor
    apart: Tensor
    broken: list[int]
    cost: int

    @staticmethod
    @lru_cache(maxsize=8)
    def of(tokenizer: Tokenizer) -> _Table:
        inside, outside, apart = (torch.zeros(tokenizer.size, dtype=torch.int64) for _ in range(3))
        broken, words = list[int](), 0
        for token, text in added_texts(tokenizer).items():
            pieces = len(text.split())
            outside[token], apart[token] = pieces, text[-1:].isspace()
            inside[token] = pieces if text[:1].isspace() else max(0, pieces - 1)
            if _BROKEN in text:
                broken.append(token)
            else:
                words += int(inside[token]) == 1 and not apart[token]
        return _Table(inside, outside, apart, broken, 1 if words else 2)


@lru_cache(maxsize=8)
def added_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """What each id that may be written adds behind a word. Some vocabularies have the space in the token, others add
    it when they decode."""
    first = next(([token] for token in tokenizer.writable if tokenizer.decode([token]).isalnum()), [])
    before = len(tokenizer.decode(first))
    return {token: tokenizer.decode([*first, token])[before:] for token in tokenizer.writable}
