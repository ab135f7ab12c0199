"""A regular expression that a fill matches, by llguidance: which tokens may come next, and whether the fill may end.

- **The fill always matches**, as a whole. A token is only allowed if the blank can be finished after it with the tokens
  that are left, a character with each. So a pattern whose shortest match has no more characters than its blank may have
  tokens is always matched; of others it is found out before anything is written.
- Only characters that are tokens by themselves are written (in any token): otherwise some text could be begun that
  cannot be finished. In common vocabularies these are ASCII and the letters of many languages, and no emoji.
- Expressions are those of Rust's regex library, without look-around, word boundaries and references back; `\\d` is 0 to
  9. They are explored while a text is written, with limits, so that none takes long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.inference.rules import Verdict
from insertlm.infill.words import added_texts
from insertlm.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Pattern"]

_NO_MATCH = 3.0  # penalty
_MANY = 64  # matchers that are kept
_LONGEST = 512  # characters of a shortest match


class Pattern:
    """pattern: as the user wrote it   spaced: whether the first token brings a space that is no part of the fill
    most: the most tokens of the blank"""

    free, hints = False, ()

    def __init__(self, tokenizer: Tokenizer, pattern: str, spaced: bool, most: int | None) -> None:
        try:
            from llguidance import regex_to_lark
        except ImportError as error:
            raise InsertlmError("regular expressions need llguidance; pip install 'insertlm[patterns]'") from error
        self.words, shown = _Vocabulary.of(tokenizer), f"/{pattern}/"
        self._source = f"{' ' * spaced}(?:{regex_to_lark(pattern)})"
        self._matchers: dict[str, LLMatcher] = {}
        if mistake := self._matcher("*").get_error():
            raise InsertlmError(f"{shown}: {_reason(mistake)}; expected a regular expression")
        shortest = next((size for size in range(_LONGEST) if self._lives(f"{{0,{size}}}")), None)
        if shortest is None:
            raise InsertlmError(f"{shown}: the model can write nothing that matches; expected another expression")
        self.longest = next((size for size in (16, 64, 256) if not self._lives(f"{{{size + 1},}}")), None)
        self.needs = shortest if most is None else min(shortest, most)
        first = self.judge([], self.needs)
        if first.penalty and (first.mask is None or not first.mask.any()):
            raise InsertlmError(f"{shown}: no match is sure to fit into {most} tokens; expected more")

    def takes(self, fill: Sequence[int], room: int) -> int:
        return 0

    def judge(self, fill: Sequence[int], room: int) -> Verdict:
        mask, accepts = self._allowed(fill, "*")
        reach = int(self.words.sizes[[*fill]].sum()) + room
        if room and (self.longest is None or self.longest > reach):
            # Tokens of one character leave this many for the rest, longer ones more: they cost no more room.
            every, (mask, _) = mask, self._allowed(fill, f"{{0,{reach}}}")
            for size in sorted(set(self.words.sizes[every & ~mask].tolist())):
                others, _ = self._allowed(fill, f"{{0,{reach + size - 1}}}")
                mask = mask | (others & every & (self.words.sizes == size))
        return Verdict(_NO_MATCH * (not accepts), mask=mask, alone=True)

    def _allowed(self, fill: Sequence[int], length: str) -> tuple[Tensor, bool]:
        """The tokens that may come next in a match of this length, [V] bool, and whether it may end here."""
        matcher = self._matcher(length)
        matcher.reset()
        if not matcher.consume_tokens([*fill]):  # a matcher never recovers from an error
            del self._matchers[length]
            return torch.zeros_like(self.words.usable), False
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        found = torch.from_numpy(bits[: len(self.words.usable)]).bool() & self.words.usable
        return found & (not matcher.is_error()), matcher.is_accepting()

    def _lives(self, length: str) -> bool:
        """Whether there is a match of this length."""
        mask, accepts = self._allowed([], length)
        return accepts or bool(mask.any())

    def _matcher(self, length: str) -> LLMatcher:
        """length: in characters, as an expression says how often"""
        if length not in self._matchers:
            from llguidance import LLMatcher

            if len(self._matchers) == _MANY:
                self._matchers.clear()
            # Both must match. The library knows when no text can, and so which tokens would lead nowhere.
            grammar = f"start: X\nX: /{self._source}/ & /(?s:{self.words.characters}{length})/\n"
            source = LLMatcher.grammar_from_lark(grammar)
            self._matchers[length] = LLMatcher(self.words.known, source, log_level=0)
        return self._matchers[length]


@dataclass(frozen=True)
class _Vocabulary:
    """What the library must know of a vocabulary. usable: [V] bool, the ids that patterns write   sizes: [V], in
    characters   characters: those that are a token by themselves, as an expression"""

    known: LLTokenizer
    usable: Tensor
    sizes: Tensor
    characters: str

    @staticmethod
    @lru_cache(maxsize=8)
    def of(tokenizer: Tokenizer) -> _Vocabulary:
        from llguidance import LLTokenizer, TokenizerWrapper

        texts = {token: text for token, text in added_texts(tokenizer).items() if text and "\ufffd" not in text}
        if any(tokenizer.decode([token]) != text for token, text in texts.items()):
            raise InsertlmError(
                "regular expressions need a tokenizer whose tokens read the same everywhere; this model's do not"
            )
        usable = torch.zeros(tokenizer.size, dtype=torch.bool)
        usable[[*texts]] = True
        sizes = torch.zeros(tokenizer.size, dtype=torch.int64)
        sizes[[*texts]] = torch.tensor([len(text) for text in texts.values()])
        single = sorted(ord(text) for text in texts.values() if len(text) == 1)
        characters = "".join(f"\\x{{{code:X}}}" for code in single)
        known = LLTokenizer(TokenizerWrapper(_Words(tokenizer, texts)))
        return _Vocabulary(known, usable, sizes, f"[{characters}]")


class _Words:
    """A vocabulary as the library asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, texts: dict[int, str]) -> None:
        self.eos_token_id = tokenizer.specials.eos
        self.tokens = [texts.get(token, "").encode() for token in range(tokenizer.size)]
        self.special_token_ids = [token for token in range(tokenizer.size) if token not in texts]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # it tries bytes first
            raise TypeError
        return self._encode(text)


def _reason(mistake: str) -> str:
    """The one line of a report that says what is wrong."""
    lines = re.findall(r"^error: (.*)|\(in regex\): (?!regex parse)([^;\n]*)", mistake, re.MULTILINE)
    return next((part for line in lines for part in line if part), "not understood")
