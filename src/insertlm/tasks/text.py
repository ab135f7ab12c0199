"""Text: documents of a corpus, written from nothing.

    prefix   (empty)
    target   the document's ids, at most `block` of them

Documents are tokenised once, see data/store.py. A split has files of its own, or else gets a share of the training
files. A hash of each text assigns it to its split, so no text is in two splits drawn from the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.section import Count, Fraction, Share
from insertlm.data.order import Order
from insertlm.data.sources import Separator
from insertlm.data.store import Longer, Options, Store, open_store
from insertlm.tasks.base import SPLITS, Example, Examples, Kind, Split, Task
from insertlm.text.detokenise import Detokeniser
from insertlm.text.subwords import SubwordTokenizer, load_tokenizer

__all__ = ["Stored", "Text"]

Sources = str | tuple[str, ...]

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Stored:
    """A split of a corpus, read as it is needed. width: of the matrices, whichever documents are asked for"""

    store: Store
    width: int

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def __len__(self) -> int:
        return len(self.store)

    def take(self, documents: NDArray[np.int64]) -> Examples:
        target, length = self.store.padded(documents, self.width)
        nothing = np.zeros((len(documents), 0), np.int32)
        return Examples(nothing, np.zeros(len(documents), np.int32), target, length)


class Text(Task, frozen=True, kw_only=True, tag="text"):
    """Write documents like those of a corpus."""

    kind: ClassVar[Kind] = "text"
    things: ClassVar[str] = "documents"
    has_answers: ClassVar[bool] = False

    train: Sources  # files (.txt, .jsonl, also with .gz, .xz, .zst) or hub:NAME:SPLIT, one or several
    validation: Sources = ()  # the same; none: a share of the training files
    test: Sources = ()  # the same
    share: Share = 0.01  # of the training files' documents, for each split that has no files
    vocabulary: str = msgspec.field(name="tokenizer")  # tokenizer.json, vocab.txt, .gguf, folder, bundled or hub name
    block: Count  # most tokens of a document
    longer: Longer = "truncate"  # what to do with documents that have more: truncate, skip, or split into passages
    excerpts: Fraction = 0.0  # share of the documents of which some consecutive sentences become a document too
    documents: Separator = "line"  # of .txt: a document is a line, or what stands between blank lines
    detokenise: Detokeniser = "none"  # lm1b: join its tokens to plain text
    sample: Count = 1000  # documents of a split that are used in a validation or an evaluation

    def __post_init__(self) -> None:
        if len(self._drawn) * self.share >= 1:
            raise ValueError(
                f"share is {self.share} for each of {' and '.join(self._drawn)}; expected less than 1 in all, because "
                "training gets the rest"
            )

    @property
    def _drawn(self) -> list[str]:
        """The splits that get a share of the training files."""
        return [split for split in ("validation", "test") if not getattr(self, split)]

    @property
    def tokenizer(self) -> SubwordTokenizer:
        return load_tokenizer(self.vocabulary)

    @property
    def longest_prefix(self) -> int:
        return 0

    @property
    def longest_target(self) -> int:
        return self.block

    def files(self) -> dict[str, bytes]:
        return {_TOKENIZER: self.tokenizer.json.encode()}

    def fits_files(self, folder: Path) -> bool:
        # Both as this version of the library writes them: the file may be of another one, with the same meaning.
        copy = folder / _TOKENIZER
        return copy.is_file() and load_tokenizer(str(copy)).fingerprint == self.tokenizer.fingerprint

    def with_files(self, folder: Path) -> Text:
        copy = folder / _TOKENIZER
        return msgspec.structs.replace(self, vocabulary=str(copy)) if copy.is_file() else self

    def portable(self) -> Text:
        splits = {split: _names(getattr(self, split)) for split in SPLITS}
        return msgspec.structs.replace(self, vocabulary=_TOKENIZER, **splits)

    @property
    def sources(self) -> tuple[str, ...]:
        return self._sources("train")

    def _sources(self, split: Split) -> tuple[str, ...]:
        own: Sources = getattr(self, split)
        return (own,) if isinstance(own, str) else own

    def training_set(self) -> Stored:
        return self.stored("train")

    def stored(self, split: Split) -> Stored:
        """All documents of a split."""
        own = self._sources(split)
        if split != "train" and own:
            shares: tuple[tuple[str, float], ...] = ((split, 1.0),)
        else:
            # All splits of one store, so that the shares of a split do not overlap with those of another.
            own, drawn = self._sources("train"), self._drawn
            shares = (("train", 1 - len(drawn) * self.share), *((other, self.share) for other in drawn))
        options = Options(self.block, self.documents, self.detokenise, self.longer, self.excerpts, shares)
        store = _open(own, self.vocabulary, options)[split]
        if not len(store):
            size = "smaller" if split == "train" else "larger"
            raise InsertlmError(f"no document for the {split} split; expected more documents or a {size} task.share")
        return Stored(store, self.block)

    def split_size(self, split: Split) -> int:
        return len(self.stored(split))

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        """The first documents of the split, or with a seed some of them in random order; no more than there are."""
        stored = self.stored(split)
        count = min(self.sample if count is None else count, len(stored))
        chosen = np.arange(count) if seed is None else Order(len(stored), count, seed).batches(0, 1)[0][0]
        return stored.take(chosen)

    def render(self, example: Example) -> str:
        return self.tokenizer.decode(example.target)

    def parse_prompt(self, text: str) -> list[int]:
        """A model of text has learned to write from nothing, so the only prompt is the empty one."""
        if text:
            raise InsertlmError('a text model writes from nothing; expected the empty prompt ""')
        return []


def _names(sources: Sources) -> Sources:
    """Of files without their folders."""
    if not isinstance(sources, str):
        return tuple(str(_names(source)) for source in sources)
    return sources if sources.startswith("hub:") else Path(sources).name


# A run asks for the same stores again and again, at every validation for one.
@lru_cache(maxsize=8)
def _open(sources: Sequence[str], vocabulary: str, options: Options) -> dict[str, Store]:
    if not sources:
        raise InsertlmError("task.train: expected one or more files, or hub:NAME:SPLIT")
    return open_store(sources, load_tokenizer(vocabulary), options, partial(print, file=sys.stderr))
