"""All pieces of a store, made by all processes that want it.

Design choices:
- Nobody shares out the work. A process takes the first part that nobody has, makes the pieces of it that are not there,
  and goes on to the next part. When there is none left it helps: it takes single pieces of parts that others are at.
  So no process has to know how many there are, and what a killed one has left is taken by another, or after a restart.
- In a process, one reads and hands chunks of documents to others, which make ids of them. Only a few chunks are under
  way at a time, and a piece is kept only until it is whole, so memory does not grow with the corpus.
- What a piece holds depends on the sources alone, not on who makes it, or when.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from insertlm.core.errors import InsertlmError
from insertlm.data.encoding import Chunk, Encode, Encoder, Options, encoders, process_count
from insertlm.data.pieces import NAMED, Ids, Piece, Pieces
from insertlm.data.sources import Document, Reader, Source
from insertlm.text.subwords import SubwordTokenizer

__all__ = ["plan", "tokenise"]

_PIECE = 1 << 24  # bytes of documents in a piece, about: no more than that is lost with a killed process
_CHUNK = 1 << 20  # bytes of documents that are encoded at a time
_ALONE = 4  # chunks of a corpus for which starting processes is not worth it
_PAUSE = 0.2  # seconds between looks at what others are doing, when there is nothing else to do
_LOOK = 2.0  # and when there is, to show the progress


def plan(sources: Sequence[Source]) -> str:
    """Pieces that were made by different plans do not fit together."""
    what = [_PIECE, _CHUNK, [(source.version, source.parts) for source in sources]]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:8]


@dataclass
class _Part:
    """One of all parts of all sources. number: in its source   done: pieces from the first on that are there
    end: their count, or more as long as the last one is not there   read: of the part, by what is done"""

    source: Source
    number: int
    done: int = 0
    end: int | None = None
    read: int = 0


def tokenise(sources: Sequence[Source], tokenizer: SubwordTokenizer, options: Options, folder: Path) -> Pieces:
    """Make, with others that do the same, all pieces that are not in `folder`."""
    sizes = [source.size for source in sources]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    with _progress(total) as show, ExitStack() as stack:
        work = _Work(sources, Pieces(folder, Encoder(tokenizer, options).dtype), len(options.shares), show)
        stack.callback(work.release)
        alone = total is not None and total < _ALONE * _CHUNK
        work.go(encoders(stack, tokenizer, options, alone))
    return work.pieces


def _progress(total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """That of all processes, shown by the first."""
    from insertlm.core.progress import progress_bar

    return progress_bar("tokenising", total) if os.environ.get("RANK", "0") == "0" else nullcontext(lambda done: None)


@dataclass
class _Open:
    """A piece that is being made: who has it, the ids and bad lines so far, and what the reader said at its end."""

    part: int
    number: int
    claim: BinaryIO
    chunks: list[Chunk] = field(default_factory=list)
    bad: int = 0
    named: list[tuple[int, str]] = field(default_factory=list)
    last: bool = False
    place: int = 0
    read: int = 0
    lines: int = 0

    def add(self, chunk: Chunk) -> None:
        self.bad += len(chunk.bad)
        self.named += chunk.bad[: NAMED - len(self.named)]
        self.chunks.append(chunk._replace(bad=[]))  # there may be millions

    def done(self, splits: int) -> tuple[Piece, list[Ids]]:
        found = [_of_split(self.chunks, split) for split in range(splits)]
        piece = Piece(
            last=self.last,
            place=self.place,
            read=self.read,
            lines=self.lines,
            documents=[len(ids.lengths) for ids in found],
            tokens=[len(ids.ids) for ids in found],
            longer=sum(chunk.longer for chunk in self.chunks),
            bad=self.bad,
            named=self.named,
        )
        return piece, found


def _of_split(chunks: Sequence[Chunk], split: int) -> Ids:
    mine = [chunk.split == split for chunk in chunks]
    lengths = [chunk.lengths[chosen] for chunk, chosen in zip(chunks, mine, strict=True)]
    ids = [chunk.ids[np.repeat(chosen, chunk.lengths)] for chunk, chosen in zip(chunks, mine, strict=True)]
    return Ids(np.concatenate(lengths or [np.empty(0, np.int64)]), np.concatenate(ids or [np.empty(0, np.uint16)]))


class _Work:
    """What one process does."""

    def __init__(self, sources: Sequence[Source], pieces: Pieces, splits: int, show: Callable[[int], None]) -> None:
        self.parts = [_Part(source, number) for source in sources for number in range(source.parts)]
        self.pieces, self.splits, self.show = pieces, splits, show
        self.claims: set[BinaryIO] = set()
        self.looked = 0.0

    def go(self, encode: Encode) -> None:
        helping = False
        while not self._is_done():
            if not self._round(encode, helping) and helping:
                time.sleep(_PAUSE)
            helping = True

    def release(self) -> None:
        for claim in self.claims:
            claim.close()

    def _is_done(self) -> bool:
        """Whether all pieces are there; shows how much is."""
        there = self.pieces.there()
        for index, part in enumerate(self.parts):
            while (index, part.done) in there and (piece := self.pieces.find(index, part.done)):
                part.done, part.read = part.done + 1, piece.read
                part.end = part.done if piece.last else part.end
        self.show(sum(part.read for part in self.parts))
        self.looked = time.monotonic()
        return all(part.done == part.end for part in self.parts)

    def _round(self, encode: Encode, helping: bool) -> bool:
        """Make what can be had; whether there was anything."""
        waiting: deque[tuple[_Open, Future[Chunk] | None]] = deque()
        count = 0
        with closing(self._read(helping)) as read:
            for piece, documents in read:
                kind = self.parts[piece.part].source.kind
                waiting.append((piece, encode(documents, kind) if documents else None))
                while len(waiting) > 2 * process_count():
                    count += self._collect(*waiting.popleft())
        while waiting:
            count += self._collect(*waiting.popleft())
        return count > 0

    def _collect(self, piece: _Open, future: Future[Chunk] | None) -> bool:
        """Wait for ids; those of a whole piece are written."""
        if future is None:
            self.pieces.write(piece.part, piece.number, *piece.done(self.splits))
            self._give_back(piece.claim)
            if time.monotonic() > self.looked + _LOOK:
                self._is_done()
            return True
        try:
            piece.add(future.result())
        except BrokenProcessPool as error:
            name = self.parts[piece.part].source.name
            raise InsertlmError(f"{name}: a process that tokenises was killed; is there enough memory?") from error
        return False

    # --- Reading

    def _read(self, helping: bool) -> Generator[tuple[_Open, list[Document]], None, None]:
        """Documents by chunks, and an empty chunk behind every piece."""
        for index, part in enumerate(self.parts):
            if part.done == part.end:
                continue
            owned = self._claim(index)
            if owned or helping:
                yield from self._read_part(index, part)
            if owned:
                self._give_back(owned)

    def _read_part(self, index: int, part: _Part) -> Iterator[tuple[_Open, list[Document]]]:
        """All pieces that are not there and that nobody else has."""
        number, place = max(0, part.done - 1), None  # what is before the first of them tells where it begins
        with ExitStack() as stack:
            reader: Reader | None = None
            while part.end is None or number < part.end:
                if piece := self.pieces.find(index, number):
                    part.end = number + 1 if piece.last else part.end
                    number, place = number + 1, piece.place
                    continue
                claim = self._claim(index, number)
                if claim is None:
                    number, place = number + 1, None
                    continue
                if self.pieces.find(index, number):  # made by who had the claim until now
                    self._give_back(claim)
                    continue
                reader = reader or stack.enter_context(part.source.opened(part.number, _PIECE))
                if reader.go(number, place):
                    yield from _chunks(_Open(index, number, claim), reader)
                    number, place = number + 1, None
                else:
                    self._give_back(claim)
                    part.end = number

    def _claim(self, part: int, number: int | None = None) -> BinaryIO | None:
        claim = self.pieces.claim(part, number)
        if claim is not None:
            self.claims.add(claim)
        return claim

    def _give_back(self, claim: BinaryIO) -> None:
        self.claims.remove(claim)
        Path(claim.name).unlink(missing_ok=True)
        claim.close()


def _chunks(piece: _Open, reader: Reader) -> Iterator[tuple[_Open, list[Document]]]:
    documents, size = list[Document](), 0
    for document in reader.documents():
        documents.append(document)
        size += max(1, len(document.data))  # memory is bounded by empty rows, too
        if size >= _CHUNK:
            yield piece, documents
            documents, size = [], 0
    if documents:
        yield piece, documents
    piece.last, piece.place, piece.read, piece.lines = reader.over, reader.place, reader.read, reader.lines
    yield piece, []
