"""Tokenising a corpus: documents to ids, in parallel, in pieces that survive a kill.

Design choices:
- Nobody shares out the work. Every process (torchrun may have started many, on several nodes) goes through all parts,
  begins with a different one, and makes the pieces that are not there and that nobody else has claimed. What a killed
  process has left is made by another, or after a restart, whatever the number of processes.
- A process reads in one thread and encodes in a pool. Only a few chunks of documents are under way at a time, and a
  piece is kept only until it is written, so memory does not grow with the corpus.
- A piece depends on the sources only, never on who makes it. Should it be made twice, because a network's file system
  shows late what another node has done, the copies are equal.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from insertlm.core.cores import cores
from insertlm.core.errors import InsertlmError
from insertlm.core.files import sync, write_durably
from insertlm.data import sources as reading
from insertlm.data.sources import Document, Separator, TextSource, text_of
from insertlm.data.textfiles import Kind
from insertlm.text.detokenise import Detokeniser, detokeniser
from insertlm.text.sentences import excerpt, lines_and_sentences, passages
from insertlm.text.subwords import SubwordTokenizer

__all__ = [
    "NAMED",
    "Chunk",
    "Encoder",
    "Longer",
    "Options",
    "Piece",
    "PieceFolder",
    "id_type",
    "make_pieces",
    "plan",
    "process_count",
]

Longer = Literal["truncate", "skip", "split"]

NAMED = 5  # bad lines that are named, of all that are counted
_CHUNK = 1 << 20  # bytes of documents that are encoded at a time
_ALONE = 4  # for a corpus of fewer chunks, starting processes takes longer than encoding
_PAUSE = 0.2  # seconds between looks, while other processes make the last pieces


class Options(msgspec.Struct, frozen=True):
    """What a store depends on besides its sources and its tokenizer.

    separator: of documents in .txt   block: most ids of a document   longer: what to do with those that have more
    excerpts: share of documents of which some sentences are a document of their own
    shares: the splits, and the share of the documents that goes to each
    """

    block: int
    separator: Separator = "line"
    detokenise: Detokeniser = "none"
    longer: Longer = "truncate"
    excerpts: float = 0.0
    shares: tuple[tuple[str, float], ...] = (("all", 1.0),)


class Chunk(msgspec.Struct):
    """Documents as ids: arrays as bytes, since that is how they travel and are stored.

    splits: int8 [N], the split of each document   lengths: int64 [N]   ids: of all documents, end to end
    longer: documents that had too many ids   bad: lines without a document, of which the first are in `named`
    """

    splits: bytes
    lengths: bytes
    ids: bytes
    longer: int
    bad: int
    named: list[tuple[int, str]]


class Piece(msgspec.Struct):
    """lines: that it was read from"""

    lines: int
    chunks: list[Chunk]


def plan(sources: Sequence[TextSource]) -> str:
    """Names the folder of pieces: those of different plans do not fit together."""
    what = [reading.PIECE_BYTES, reading.PIECE_ROWS, _CHUNK, [(source.version, source.parts) for source in sources]]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:8]


# --- Encoding


class Encoder:
    """Makes ids of documents. Every process has its own."""

    def __init__(self, tokenizer: SubwordTokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self._clean = detokeniser(options.detokenise)
        self._bounds = np.cumsum([share for _, share in options.shares])[:-1]

    def __call__(self, documents: Sequence[Document], kind: Kind) -> Chunk:
        texts, bad = dict[int, str](), list[tuple[int, str]]()  # by line
        for line, data in documents:
            try:
                texts[line] = self._clean(text_of(data, kind))
            except ValueError as error:
                bad.append((line, str(error)))
        encoded = self.tokenizer.encode_many(list(texts.values()))
        bad += [(line, "no token in it") for line, ids in zip(texts, encoded, strict=True) if not ids]
        found = [(text, ids) for text, ids in zip(texts.values(), encoded, strict=True) if ids]
        block = self.options.block
        kept = [(text, ids) for text, ids in found if len(ids) <= block]
        longer = len(found) - len(kept)
        if self.options.longer == "truncate":
            kept = [(text, ids[:block]) for text, ids in found]
        elif self.options.longer == "split":
            kept += self._passages([text for text, ids in found if len(ids) > block])
        kept += self._excerpts(list(texts.values()))
        return Chunk(
            splits=self._splits([text for text, _ in kept]),
            lengths=np.array([len(ids) for _, ids in kept], np.int64).tobytes(),
            ids=np.fromiter(chain.from_iterable(ids for _, ids in kept), id_type(self.tokenizer)).tobytes(),
            longer=longer,
            bad=len(bad),
            named=bad[:NAMED],
        )

    def _passages(self, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Each with the text it is from, which decides its split."""
        found = [(text, lines_and_sentences(text)) for text in texts]
        sizes = iter(self.tokenizer.encode_many([text[a:b] for text, ranges in found for a, b in ranges]))
        block, parts = self.options.block, list[tuple[str, str]]()
        for text, ranges in found:
            parts += [(text, part) for part in passages(text, [len(next(sizes)) for _ in ranges], block)]
        encoded = self.tokenizer.encode_many([part for _, part in parts])
        # A sentence by itself may have a token less than in its passage, where a space may be before it.
        return [(text, ids) for (text, _), ids in zip(parts, encoded, strict=True) if 0 < len(ids) <= block]

    def _excerpts(self, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Each with the text it is from, which decides its split."""
        if not self.options.excerpts:
            return []
        parts = {text: part for text in texts if (part := excerpt(text, self.options.excerpts))}
        encoded = zip(parts, self.tokenizer.encode_many(list(parts.values())), strict=True)
        return [(text, ids) for text, ids in encoded if 0 < len(ids) <= self.options.block]

    def _splits(self, texts: Sequence[str]) -> bytes:
        """By a hash of each text, so that equal texts are never in different splits."""
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        uniform = np.frombuffer(digests, "<u8") / 2.0**64
        return np.searchsorted(self._bounds, uniform, side="right").astype(np.int8).tobytes()


def id_type(tokenizer: SubwordTokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


Encode = Callable[[Sequence[Document], Kind], Future[Chunk]]


def process_count() -> int:
    """Processes that encode: the cores, shared with the other processes that torchrun has started on this machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _encoding(stack: ExitStack, tokenizer: SubwordTokenizer, options: Options, alone: bool) -> Encode:
    """Encodes in a pool until the stack ends; alone, in this process, at once."""
    encoder = Encoder(tokenizer, options)

    def at_once(documents: Sequence[Document], kind: Kind) -> Future[Chunk]:
        future: Future[Chunk] = Future()
        future.set_result(encoder(documents, kind))
        return future

    if alone or process_count() == 1:
        return at_once
    pool = ProcessPoolExecutor(process_count(), get_context("spawn"), _start, (tokenizer.json, options))
    stack.callback(pool.shutdown, cancel_futures=True)
    under_way = deque[Future[Chunk]](maxlen=2 * process_count())

    def in_pool(documents: Sequence[Document], kind: Kind) -> Future[Chunk]:
        if len(under_way) == under_way.maxlen:
            under_way[0].result()  # wait for the oldest, so that reading never runs far ahead of encoding
        under_way.append(pool.submit(_encode, documents, kind))
        return under_way[-1]

    return in_pool


_here: list[Encoder] = []  # the encoder of a process of the pool


def _start(tokenizer: str, options: Options) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many
    Thread(target=_end_with_parent, daemon=True).start()
    _here.append(Encoder(SubwordTokenizer.from_json(tokenizer), options))


def _end_with_parent() -> None:
    """The processes of a pool outlive a parent that is killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(documents: Sequence[Document], kind: Kind) -> Chunk:
    return _here[0](documents, kind)


# --- Pieces on the disk


class _Found(NamedTuple):
    """A piece that is there, as its file's name tells. place, over: of the reader when it had read the piece"""

    path: Path
    place: int
    over: bool


class PieceFolder:
    """The pieces of a store that is being made, by part (of all parts of all sources) and number.

    A piece is a file, a SHA-256 and msgpack, that appears when the disk has all of it. A claim is a lock on one byte of
    a common file, which the system takes back from a killed process.
    """

    _JOINING = 1 << 62  # the byte that stands for joining all pieces

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self._locks = path, (path / "locks").open("wb")

    def __enter__(self) -> PieceFolder:
        return self

    def __exit__(self, *what: object) -> None:
        self._locks.close()  # with all claims

    def found(self) -> dict[tuple[int, int], _Found]:
        pieces = {}
        for path in self.path.iterdir():
            if path.suffix == ".piece":
                part, number, place, over = map(int, path.stem.split("-"))
                pieces[part, number] = _Found(path, place, bool(over))
        return pieces

    def write(self, part: int, number: int, place: int, over: bool, piece: Piece) -> None:
        path = self.path / f"{part:05}-{number:06}-{place}-{over:d}.piece"
        content = msgspec.msgpack.encode(piece)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            write_durably(temporary, hashlib.sha256(content).digest() + content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # after success this name no longer exists
        sync(self.path)

    def read(self, path: Path) -> Piece:
        data = path.read_bytes()
        content = memoryview(data)[32:]
        if hashlib.sha256(content).digest() != data[:32]:
            path.unlink()
            raise InsertlmError(f"{path} was damaged on the disk and has been removed; start again to make it anew")
        return msgspec.msgpack.decode(content, type=Piece)

    def claim(self, part: int, number: int) -> bool:
        """False if another process has it."""
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, part << 32 | number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give_back(self, part: int, number: int) -> None:
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, part << 32 | number)

    def wait_to_join(self) -> None:
        """Until no other process is joining the pieces."""
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, self._JOINING)


# --- The work of one process


class _UnderWay(NamedTuple):
    """A piece that has been read and is being encoded. lines, place, over: what the reader said behind it"""

    part: int
    number: int
    lines: int
    place: int
    over: bool
    chunks: list[Future[Chunk]]


def make_pieces(
    sources: Sequence[TextSource], tokenizer: SubwordTokenizer, options: Options, folder: PieceFolder
) -> None:
    """Make, together with all processes that do the same, the pieces that are not in the folder."""
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with _progress(total) as show, ExitStack() as stack:
        alone = total is not None and total < _ALONE * _CHUNK
        work = _Work(sources, folder, _encoding(stack, tokenizer, options, alone), show)
        try:
            work.run()
        except BrokenProcessPool as error:
            raise InsertlmError("a process that tokenises was killed; is there enough memory?") from error


def _progress(total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """The first process shows the progress of all."""
    from insertlm.core.progress import progress_bar

    return progress_bar("tokenising", total) if os.environ.get("RANK", "0") == "0" else nullcontext(lambda done: None)


class _Work:
    """encode: starts to encode a chunk   show: takes how far all processes are"""

    def __init__(
        self, sources: Sequence[TextSource], folder: PieceFolder, encode: Encode, show: Callable[[int], None]
    ) -> None:
        self.parts = [(source, part) for source in sources for part in range(source.parts)]
        self.folder, self.encode, self.show = folder, encode, show

    def run(self) -> None:
        while not self._is_done():
            waiting, made = deque[_UnderWay](), 0
            for piece in self._read():
                waiting.append(piece)
                # Reading goes on meanwhile, so that the pool has work at the end of a piece, too.
                while waiting and all(chunk.done() for chunk in waiting[0].chunks):
                    self._write(waiting.popleft())
                made += 1
            for piece in waiting:
                self._write(piece)
            if not made:  # others are at work on what is left
                time.sleep(_PAUSE)

    def _read(self) -> Iterator[_UnderWay]:
        """Claim and read all pieces that can be had."""
        # Each process begins with another part, since two at the same part both have to read (or unpack) all of it.
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        first = rank * len(self.parts) // world
        for index in [*range(first, len(self.parts)), *range(first)]:
            source, part = self.parts[index]
            number = self._claim(index, 0)
            if number is None:
                continue
            with source.opened(part) as reader:
                while number is not None:
                    chunks = [self.encode(chunk, source.kind) for chunk in _chunks(reader.read(number))]
                    yield _UnderWay(index, number, reader.lines, reader.place, reader.over, chunks)
                    number = None if reader.over else self._claim(index, number + 1)

    def _claim(self, part: int, number: int) -> int | None:
        """The next piece, from this one on, that is neither there nor being made; None if the part is known to end.

        While its last piece is being made nobody else knows where a part ends. Whoever then claims a piece behind it
        finds no text and writes an empty piece, which does no harm.
        """
        found = self._look()
        while True:
            if piece := found.get((part, number)):
                if piece.over:
                    return None
            elif self.folder.claim(part, number):
                found = self._look()
                if (part, number) not in found:
                    return number
                self.folder.give_back(part, number)  # another process has just made it
                continue
            number += 1

    def _write(self, piece: _UnderWay) -> None:
        part, number, lines, place, over, chunks = piece
        self.folder.write(part, number, place, over, Piece(lines, [chunk.result() for chunk in chunks]))
        self.folder.give_back(part, number)

    def _is_done(self) -> bool:
        found = self._look()
        for part in range(len(self.parts)):
            number = 0
            while (part, number) in found and not found[part, number].over:
                number += 1
            if (part, number) not in found:
                return False
        return True

    def _look(self) -> dict[tuple[int, int], _Found]:
        """What is there by now, which the progress bar shows too."""
        found = self.folder.found()
        places = dict[int, int]()
        for (part, _), piece in found.items():
            places[part] = max(piece.place, places.get(part, 0))
        self.show(sum(places.values()))
        return found


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk, size = list[Document](), 0
    for document in documents:
        chunk.append(document)
        size += max(1, len(document.data))  # a row of a data set may be empty, and a million of them is a chunk
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
