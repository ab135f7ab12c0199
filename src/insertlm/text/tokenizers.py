"""Text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from insertlm.core.errors import InsertlmError

__all__ = ["Specials", "Tokenizer", "WordTokenizer"]


class Specials(NamedTuple):
    """Ids of the tokens that no one writes. `stop` is the paper's <stp> (its code says <cls>): the stop classifier
    reads it."""

    stop: int
    bos: int
    eos: int
    unk: int
    pad: int
    mask: int


class Tokenizer(Protocol):
    """What the rest of the library asks of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids, special and reserved ones included."""
        ...

    @property
    def specials(self) -> Specials: ...

    @property
    def writable(self) -> list[int]:
        """The ids a model may write: all that is neither special nor reserved."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class WordTokenizer:
    """Whitespace-separated words from a closed list. Ids: the words in order, then the special tokens, then reserved
    ids (which exist only so that vocabularies have the published size)."""

    words: tuple[str, ...]
    reserved: int = 0

    @property
    def specials(self) -> Specials:
        return Specials(*range(len(self.words), len(self.words) + len(Specials._fields)))

    @property
    def size(self) -> int:
        return len(self.words) + len(Specials._fields) + self.reserved

    @property
    def writable(self) -> list[int]:
        return list(range(len(self.words)))

    def ids_in(self, other: WordTokenizer) -> list[int | None]:
        """For every id, that of the same word or special token in another vocabulary; None where there is none."""
        theirs = {name: number for number, name in enumerate(other._names)}
        return [theirs.get(name) for name in self._names]

    @property
    def _names(self) -> list[tuple[str, str | int]]:
        """What every id stands for."""
        words, specials = (("word", word) for word in self.words), (("special", field) for field in Specials._fields)
        return [*words, *specials, *(("reserved", number) for number in range(self.reserved))]

    def encode(self, text: str) -> list[int]:
        ids = {word: i for i, word in enumerate(self.words)}
        out = []
        for place, word in enumerate(text.split(), start=1):
            if word not in ids:
                raise InsertlmError(
                    f"unknown word {word!r} at word {place} of the input; expected {self.words[0]} … {self.words[-1]}"
                )
            out.append(ids[word])
        return out

    def decode(self, ids: Sequence[int]) -> str:
        names = {i: f"<{name}>" for name, i in self.specials._asdict().items()}
        return " ".join(self.words[i] if i < len(self.words) else names.get(i, f"<{i}>") for i in ids)
