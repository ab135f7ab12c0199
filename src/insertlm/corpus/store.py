"""Documents as ids, in files that are mapped into memory: tokenised once, read by any number of processes.

A store is a folder in the cache, named by a fingerprint of the sources, the tokenizer and the options:

    tokens-SPLIT.bin    all ids of a split end to end, uint16 or uint32
    offsets-SPLIT.bin   int64, where each document begins, and the end of the last
    manifest.json       what is in it; written last

Design choices:
- One process reads and hands chunks of documents to others, which make ids of them; chunks are written in the order in
  which they were read, so a store does not depend on how many processes made it. Only a few chunks are under way at a
  time, so memory does not grow with the corpus.
- It is built under another name and renamed when the disk has all of it. A lock, which the system takes back from a
  killed process, lets one process build while others wait for the same store.
- What is no document is counted, and the first few are named. Nothing of that is fatal but having none at all.
- Documents go to splits by a hash of their text, so that a text that occurs twice is not in two splits. Excerpts go
  where their texts go.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.corpus.detokenise import Detokeniser, detokeniser
from insertlm.corpus.sentences import excerpt
from insertlm.corpus.sources import Document, Kind, Separator, Source, source_of, text_of
from insertlm.errors import InsertlmError
from insertlm.files import sync, write_durably, writing
from insertlm.subwords import SubwordTokenizer

__all__ = ["Encoder", "Longer", "Manifest", "Options", "Store", "cache_folder", "open_store"]

Longer = Literal["truncate", "skip"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_CHUNK = 1 << 20  # bytes of documents that a process takes at a time
_ALONE = 4  # chunks of a corpus for which starting processes is not worth it
_NAMED = 5  # bad lines that are named


class Options(msgspec.Struct, frozen=True):
    """What a store depends on beside its sources and its tokenizer.

    separator: of documents in .txt   block: most ids of a document   longer: what to do with those that have more
    excerpts: of the documents, of which some sentences are another one   shares: names of splits and how much of the
    documents goes to each
    """

    block: int
    separator: Separator = "line"
    detokenise: Detokeniser = "none"
    longer: Longer = "truncate"
    excerpts: float = 0.0
    shares: tuple[tuple[str, float], ...] = (("all", 1.0),)


class Manifest(msgspec.Struct, frozen=True):
    """documents, tokens: of each split   longer: documents that had more than `block` ids   bad: lines that hold none,
    of which the first few are in `named`"""

    format: int
    dtype: str
    documents: dict[str, int]
    tokens: dict[str, int]
    longer: int
    bad: int
    named: list[str]

    def remarks(self, options: Options) -> list[str]:
        """What a user should know."""
        lines = [f"{self.bad:,} lines hold no document: {'; '.join(self.named)}"] if self.bad else []
        if self.longer:
            what = "cut" if options.longer == "truncate" else "left out"
            lines.append(f"{self.longer:,} documents have more than {options.block} tokens and were {what}")
        return lines


@dataclass(frozen=True)
class Store:
    """One split. tokens: [T]   offsets: [N+1]"""

    tokens: NDArray[np.uint16 | np.uint32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def padded(self, documents: NDArray[np.int64], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids [N, width], 0 beyond a document's length, and lengths [N]."""
        start = self.offsets[documents]
        length = self.offsets[documents + 1] - start
        column = np.arange(width)
        there = column < length[:, None]
        ids = np.zeros(there.shape, np.int32)
        ids[there] = self.tokens[(start[:, None] + column)[there]]
        return ids, length.astype(np.int32)


def cache_folder() -> Path:
    """$INSERTLM_CACHE, or insertlm in the user's cache."""
    if place := os.environ.get("INSERTLM_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "insertlm"


def open_store(
    sources: Sequence[str],
    tokenizer: SubwordTokenizer,
    options: Options,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Store]:
    """The splits of these sources, tokenised now if they have not been. tell: is told what a user should know."""
    found = [source_of(name, options.separator) for name in sources]
    place = cache_folder() / _key(found, tokenizer, options)
    if not (place / _MANIFEST).is_file():
        with writing(place), _locked(place):
            if not (place / _MANIFEST).is_file():  # nobody built it while we waited
                _Building(found, tokenizer, options, place).go(tell)
    manifest = msgspec.json.decode((place / _MANIFEST).read_bytes(), type=Manifest)
    return {split: _mapped(place, split, manifest) for split in manifest.documents}


def _key(sources: Sequence[Source], tokenizer: SubwordTokenizer, options: Options) -> str:
    what = [_FORMAT, [source.fingerprint for source in sources], tokenizer.fingerprint, msgspec.to_builtins(options)]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:32]


def _mapped(place: Path, split: str, manifest: Manifest) -> Store:
    if not manifest.documents[split]:
        return Store(np.empty(0, np.uint16), np.zeros(1, np.int64))
    tokens = np.memmap(place / f"tokens-{split}.bin", manifest.dtype, "r")
    return Store(tokens, np.memmap(place / f"offsets-{split}.bin", np.int64, "r"))


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Building


class _Chunk(NamedTuple):
    """Documents as ids. split: [N] number of each one's split   lengths: [N]   ids: of all, end to end"""

    split: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: NDArray[np.uint16 | np.uint32]
    longer: int
    bad: list[tuple[int, str]]


class Encoder:
    """Makes ids of documents. Every process has its own."""

    def __init__(self, tokenizer: SubwordTokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
        self.bounds = np.cumsum([share for _, share in options.shares])[:-1]

    def __call__(self, documents: Sequence[Document], kind: Kind) -> _Chunk:
        texts, bad = self._texts(documents, kind)
        encoded = list(zip(texts.values(), self.tokenizer.encode_many(list(texts.values())), strict=True))
        bad += [(line, "no token in it") for line, (_, ids) in zip(texts, encoded, strict=True) if not ids]
        found = [(text, ids) for text, ids in encoded if ids]
        kept = [(text, ids) for text, ids in found if len(ids) <= self.options.block]
        longer = len(found) - len(kept)
        if self.options.longer == "truncate":
            kept = [(text, ids[: self.options.block]) for text, ids in found]
        kept += self._excerpts(list(texts.values()))
        lengths = np.array([len(ids) for _, ids in kept], np.int64)
        flat = np.fromiter(chain.from_iterable(ids for _, ids in kept), self.dtype, int(lengths.sum()))
        return _Chunk(self._splits([text for text, _ in kept]), lengths, flat, longer, bad)

    def _texts(self, documents: Sequence[Document], kind: Kind) -> tuple[dict[int, str], list[tuple[int, str]]]:
        """By line, and what is wrong with the lines that hold none."""
        clean = detokeniser(self.options.detokenise)
        texts: dict[int, str] = {}
        bad: list[tuple[int, str]] = []
        for line, data in documents:
            try:
                texts[line] = clean(text_of(data, kind))
            except ValueError as error:
                bad.append((line, str(error)))
        return texts, bad

    def _excerpts(self, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
        """With the text that each is from, whose split is its own too."""
        if not self.options.excerpts:
            return []
        parts = {text: part for text in texts if (part := excerpt(text, self.options.excerpts))}
        encoded = zip(parts, self.tokenizer.encode_many(list(parts.values())), strict=True)
        return [(text, ids) for text, ids in encoded if 0 < len(ids) <= self.options.block]

    def _splits(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """By a hash of each text, uniform on [0, 1)."""
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        return np.searchsorted(self.bounds, np.frombuffer(digests, "<u8") / 2.0**64, side="right")


class _Building:
    def __init__(self, sources: Sequence[Source], tokenizer: SubwordTokenizer, options: Options, place: Path) -> None:
        self.sources, self.tokenizer, self.options, self.place = sources, tokenizer, options, place
        self.splits = [name for name, _ in options.shares]
        self.documents, self.tokens = Counter[str](), Counter[str]()
        self.longer, self.bad, self.named = 0, 0, list[str]()

    def go(self, tell: Callable[[str], None]) -> None:
        staging = self.place.with_name(f".{self.place.name}.writing")
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process; we hold the lock, so nobody writes there
        staging.mkdir()
        try:
            with ExitStack() as stack:
                open_ = partial(_open, stack, staging)
                files = [(open_(f"tokens-{split}.bin"), open_(f"offsets-{split}.bin")) for split in self.splits]
                self._write(files)
            self._finish(staging, tell)
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # after success this name no longer exists

    def _write(self, files: Sequence[tuple[BinaryIO, BinaryIO]]) -> None:
        for _, offsets in files:
            offsets.write(np.zeros(1, np.int64).tobytes())
        for source, chunk in self._encoded():
            for number, (split, (tokens, offsets)) in enumerate(zip(self.splits, files, strict=True)):
                mine = chunk.split == number
                tokens.write(chunk.ids[np.repeat(mine, chunk.lengths)].tobytes())
                ends = self.tokens[split] + np.cumsum(chunk.lengths[mine])
                offsets.write(ends.astype(np.int64).tobytes())
                self.documents[split] += int(mine.sum())
                self.tokens[split] += int(chunk.lengths[mine].sum())
            self.longer += chunk.longer
            self.bad += len(chunk.bad)
            room = _NAMED - len(self.named)
            self.named += [f"{source.name} line {line} ({why})" for line, why in chunk.bad[:room]]

    def _finish(self, staging: Path, tell: Callable[[str], None]) -> None:
        names = ", ".join(source.name for source in self.sources)
        manifest = Manifest(
            format=_FORMAT,
            dtype=Encoder(self.tokenizer, self.options).dtype.name,
            documents={split: self.documents[split] for split in self.splits},
            tokens={split: self.tokens[split] for split in self.splits},
            longer=self.longer,
            bad=self.bad,
            named=self.named,
        )
        remarks = manifest.remarks(self.options)
        if not sum(manifest.documents.values()):
            why = f": {'; '.join(remarks)}" if remarks else "; expected text"
            raise InsertlmError(f"{names}: no usable document{why}")
        for path in staging.iterdir():
            sync(path)
        write_durably(staging / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync(staging)
        staging.rename(self.place)
        sync(self.place.parent)
        tell(f"tokenised {sum(manifest.documents.values()):,} documents, {sum(manifest.tokens.values()):,} tokens")
        for line in remarks:
            tell(line)

    # --- Tokenising in parallel

    def _encoded(self) -> Iterator[tuple[Source, _Chunk]]:
        """Chunks in order, with the progress shown."""
        from insertlm.terminal import progress_bar

        sizes = [source.size for source in self.sources]
        known = [size for size in sizes if size is not None]
        total = sum(known) if len(known) == len(sizes) else None
        with progress_bar("tokenising", total) as show, ExitStack() as stack:
            chunks = _chunks(self.sources)
            encode = self._workers(stack, total)
            waiting: deque[tuple[Source, int, Future[_Chunk]]] = deque()
            for source, documents, done in chunks:
                waiting.append((source, done, encode(documents, source.kind)))
                while len(waiting) > 2 * _processes():
                    yield _ready(waiting.popleft(), show)
            while waiting:
                yield _ready(waiting.popleft(), show)

    def _workers(self, stack: ExitStack, total: int | None) -> Callable[[Sequence[Document], Kind], Future[_Chunk]]:
        """What encodes: other processes, or for a small corpus this one."""
        if _processes() == 1 or (total is not None and total < _ALONE * _CHUNK):
            return partial(_at_once, Encoder(self.tokenizer, self.options))
        pool = ProcessPoolExecutor(
            _processes(), get_context("spawn"), initializer=_start, initargs=(self.tokenizer.json, self.options)
        )
        stack.callback(pool.shutdown, cancel_futures=True)
        return lambda documents, kind: pool.submit(_encode, documents, kind)


def _open(stack: ExitStack, folder: Path, name: str) -> BinaryIO:
    return stack.enter_context((folder / name).open("wb"))


def _processes() -> int:
    return len(os.sched_getaffinity(0))


def _chunks(sources: Iterable[Source]) -> Iterator[tuple[Source, list[Document], int]]:
    """Documents of about `_CHUNK` bytes, all of one source, and how much has been read."""
    before = 0
    for source in sources:
        documents, size, done = list[Document](), 0, 0
        for document, done in source.documents():
            documents.append(document)
            size += len(document.data)
            if size >= _CHUNK:
                yield source, documents, before + done
                documents, size = [], 0
        if documents:
            yield source, documents, before + done
        before += source.size or done


def _ready(item: tuple[Source, int, Future[_Chunk]], show: Callable[[int], None]) -> tuple[Source, _Chunk]:
    source, done, future = item
    try:
        chunk = future.result()
    except BrokenProcessPool as error:
        raise InsertlmError(f"{source.name}: a process that tokenises was killed; is there enough memory?") from error
    show(done)
    return source, chunk


def _at_once(encoder: Encoder, documents: Sequence[Document], kind: Kind) -> Future[_Chunk]:
    future: Future[_Chunk] = Future()
    future.set_result(encoder(documents, kind))
    return future


_here: list[Encoder] = []  # of a process of the pool


def _start(tokenizer: str, options: Options) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many
    Thread(target=_end_with_parent, daemon=True).start()
    _here.append(Encoder(SubwordTokenizer.from_json(tokenizer), options))


def _end_with_parent() -> None:
    """A pool does not end its processes when it is killed itself."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(documents: Sequence[Document], kind: Kind) -> _Chunk:
    return _here[0](documents, kind)
