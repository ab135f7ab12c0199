"""The tokenizer protocol, and a tokenizer of whole words for puzzles."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from insertlm.core.checks import shown
from insertlm.core.errors import InsertlmError

__all__ = ["Specials", "Tokenizer", "WordTokenizer", "matching_ids"]


class Specials(NamedTuple):
    """Ids of tokens that models read but never write. `stop` is the paper's <stp> (its code says <cls>): the stop
    classifier reads its row."""

    stop: int
    bos: int
    eos: int
    unk: int
    pad: int
    mask: int


class Tokenizer(Protocol):
    """What the rest of the library needs of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids, special and reserved ones included."""
        ...

    @property
    def specials(self) -> Specials: ...

    @property
    def writable(self) -> list[int]:
        """The ids a model may write: all but the special and the reserved ones."""
        ...

    @property
    def names(self) -> list[Hashable]:
        """What every id stands for: the same word or special token has the same name in other vocabularies."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class WordTokenizer:
    """Words from a closed list, separated by white space. Ids: the words in order, the special tokens, then reserved
    ids, which only bring a vocabulary to its published size."""

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

    @property
    def names(self) -> list[Hashable]:
        words, specials = (("word", word) for word in self.words), (("special", field) for field in Specials._fields)
        return [*words, *specials, *(("reserved", number) for number in range(self.reserved))]

    def encode(self, text: str) -> list[int]:
        ids = {word: i for i, word in enumerate(self.words)}
        out = []
        for place, word in enumerate(text.split(), start=1):
            if word not in ids:
                known = f"{self.words[0]} … {self.words[-1]}"
                raise InsertlmError(f"unknown word {shown(word)} at word {place} of the input; expected {known}")
            out.append(ids[word])
        return out

    def decode(self, ids: Sequence[int]) -> str:
        names = {i: f"<{name}>" for name, i in self.specials._asdict().items()}
        return " ".join(self.words[i] if i < len(self.words) else names.get(i, f"<{i}>") for i in ids)


def matching_ids(ours: Tokenizer, theirs: Tokenizer) -> list[int | None]:
    """For each of our ids, their id of the same word or special token; None where they have none."""
    known = {name: number for number, name in enumerate(theirs.names)}
    return [known.get(name) for name in ours.names]
