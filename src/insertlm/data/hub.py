"""Data sets on the Hugging Face hub, or in a folder, streamed by its library.

A data set's shards are the parts of the source. Shards in their order are the data set in its order, and the library
gives each one alone (`IterableDataset.shard`), so processes share them without overlap or loss. A piece ends with the
row that makes it large enough.

To begin at a row, the library reads its shard again up to there and throws that away: after a restart, shards that were
under way are read twice, but tokenised once. (`IterableDataset.state_dict` does no better, and `skip` needs nothing but
the number of the row.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.data.sources import Document, Kind, Reader

__all__ = ["Hub"]

_BATCH = 256  # rows that the library gives at a time: one by one takes four times as long


class Hub:
    """Nobody says whether a data set on the hub has changed without asking it, so its fingerprint is its name with the
    revision, if one is given. Its version is the library's, which knows commits, or the times of files."""

    size = None
    kind: Kind = "txt"  # the library has read the JSON

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        whole, _, self._split = what.rpartition(":")
        self._data, _, revision = whole.partition("@")
        self._revision = revision or None
        if not self._data or not self._split:
            raise InsertlmError(f"{name}: expected hub:NAME:SPLIT, for example hub:roneneldan/TinyStories:train")

    @property
    def fingerprint(self) -> str:
        return self.name

    @property
    def version(self) -> str:
        return f"{self._builder.config_id} {self._builder.hash}"

    @property
    def parts(self) -> int:
        return int(self._rows.n_shards)

    @contextmanager
    def opened(self, part: int, size: float) -> Iterator[Reader]:
        reader = _Reader(self, self._rows.shard(self.parts, part), size)
        try:
            yield reader
        finally:
            reader.close()

    @cached_property
    def _builder(self) -> Any:
        try:
            from datasets import load_dataset_builder
        except ImportError as error:
            raise InsertlmError(f"{self.name} needs datasets; install it with: pip install 'insertlm[text]'") from error
        with self.asking():
            return load_dataset_builder(self._data, revision=self._revision)

    @cached_property
    def _rows(self) -> Any:
        with self.asking():
            return self._builder.as_streaming_dataset(split=self._split)

    @contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except InsertlmError:
            raise
        except Exception as error:  # the library raises whatever its parts do
            what = " ".join(str(error).split())
            raise InsertlmError(f"{self.name}: cannot be read from the hub: {what:.200}") from error


class _Reader:
    """rows: of one shard"""

    def __init__(self, hub: Hub, rows: Any, size: float) -> None:
        self._hub, self._rows, self._size = hub, rows, size
        self._piece, self.place, self.lines, self.over = 0, 0, 0, False
        self._texts = self._from(0)

    @property
    def read(self) -> int:
        return self.place

    def go(self, piece: int, place: int | None = None) -> bool:
        if place and not self.place:  # else going on is faster than beginning anew
            self.close()
            self._piece, self.place, self._texts = piece, place, self._from(place)
        while self._piece < piece and not self.over:
            for _ in self.documents():
                pass
        return not self.over

    def documents(self) -> Iterator[Document]:
        self.lines, size, self.over = 0, 0, True
        for text in self._texts:
            self.lines += 1
            self.place += 1
            size += max(1, len(text))
            yield Document(self.lines, text)
            if size >= self._size:
                self.over = False
                break
        self._piece += 1

    def close(self) -> None:
        self._texts.close()

    def _from(self, row: int) -> Generator[bytes, None, None]:
        rows = self._rows.skip(row) if row else self._rows
        with self._hub.asking():
            for batch in rows.iter(batch_size=_BATCH):
                count = len(next(iter(batch.values())))
                for text in batch.get("text") or [None] * count:
                    yield text.encode("utf-8", "replace") if isinstance(text, str) else b""
