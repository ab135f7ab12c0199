"""Documents as ids, in files that are mapped into memory: tokenised once, read by any number of processes.

A store is a folder in the cache, named by a fingerprint of the sources, the tokenizer and the options:

    tokens-SPLIT.bin    all ids of a split end to end, uint16 or uint32
    offsets-SPLIT.bin   int64, where each document begins, and the end of the last
    manifest.json       what is in it; written last

Design choices:
- It is made in pieces (pieces.py), by all processes that want it (tokenising.py), in a hidden folder beside it. After
  a kill they go on with the pieces that are not there. When all are, one process joins them in their order, and renames
  the result once the disk has all of it. So a store does not depend on how many processes made it, or on how often they
  were killed, and nobody sees half of one. Until it is there, the pieces take as much room again.
- What is no document is counted, and the first few are named. Nothing of that is fatal but having none at all.
- Documents go to splits by a hash of their text, so that a text that occurs twice is not in two splits. Excerpts go
  where their texts go.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.files import cache_folder, sync, write_durably, writing
from insertlm.data.encoding import Encoder, Longer, Options
from insertlm.data.pieces import NAMED, Ids, Piece, Pieces, locked
from insertlm.data.sources import Source, source_of
from insertlm.data.tokenising import plan, tokenise
from insertlm.text.subwords import SubwordTokenizer

__all__ = ["Encoder", "Longer", "Manifest", "Options", "Store", "open_store"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_SAMPLE = 4096  # tokens that a fingerprint knows, about
_ATTEMPTS = 10  # at pieces that go away meanwhile; a network's file system may not show at once what became of them


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

    @property
    def fingerprint(self) -> str:
        """Changes when the documents do: it knows how many there are, their lengths, and tokens here and there."""
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(self.tokens[:: max(1, len(self.tokens) // _SAMPLE)].astype(np.uint32).tobytes())
        return digest.hexdigest()

    def padded(self, documents: NDArray[np.int64], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids [N, width], 0 beyond a document's length, and lengths [N]."""
        start = self.offsets[documents]
        length = self.offsets[documents + 1] - start
        column = np.arange(width)
        there = column < length[:, None]
        ids = np.zeros(there.shape, np.int32)
        ids[there] = self.tokens[(start[:, None] + column)[there]]
        return ids, length.astype(np.int32)


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
        with writing(place):
            _build(found, tokenizer, options, place, tell)
    for pieces in place.parent.glob(f".{place.name}*"):  # that nobody needs any more
        _remove(pieces)
    manifest = msgspec.json.decode((place / _MANIFEST).read_bytes(), type=Manifest)
    return {split: _mapped(place, split, manifest) for split in manifest.documents}


def _key(sources: Sequence[Source], tokenizer: SubwordTokenizer, options: Options) -> str:
    what = [_FORMAT, [source.fingerprint for source in sources], tokenizer.fingerprint, msgspec.to_builtins(options)]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:32]


def _mapped(place: Path, split: str, manifest: Manifest) -> Store:
    if not manifest.documents[split]:
        return Store(np.empty(0, np.uint16), np.zeros(1, np.int64))
    parts = ("tokens", manifest.dtype, manifest.tokens[split]), ("offsets", "int64", manifest.documents[split] + 1)
    for name, kind, count in parts:
        file, size = place / f"{name}-{split}.bin", count * np.dtype(kind).itemsize
        if not file.is_file() or file.stat().st_size != size:
            raise InsertlmError(f"{file}: expected {size} bytes; remove {place} to have the texts tokenised again")
    tokens, offsets = (np.memmap(place / f"{name}-{split}.bin", kind, "r") for name, kind, _ in parts)
    return Store(tokens, offsets)


def _remove(folder: Path) -> None:
    """At once for those who are still at work there: they shall not take what is left for all there is."""
    with suppress(OSError):  # another process does the same, or it is not ours
        folder = folder.rename(folder.with_suffix(".gone"))
    shutil.rmtree(folder, ignore_errors=True)


# --- Building


def _build(
    sources: Sequence[Source],
    tokenizer: SubwordTokenizer,
    options: Options,
    place: Path,
    tell: Callable[[str], None],
) -> None:
    """Together with others: all make pieces, and who comes first joins them."""
    folder = place.with_name(f".{place.name}-{plan(sources)}")
    for left in reversed(range(_ATTEMPTS)):
        try:
            pieces = tokenise(sources, tokenizer, options, folder)
            with locked(place.with_suffix(".lock")):
                if not (place / _MANIFEST).is_file():
                    _Joining(sources, pieces, options).go(place, tell)
            return
        except FileNotFoundError:  # someone has joined the pieces and removed them, or has emptied the cache
            if (place / _MANIFEST).is_file():
                return
            if not left:
                raise


class _Joining:
    """All pieces in their order, read one at a time."""

    def __init__(self, sources: Sequence[Source], pieces: Pieces, options: Options) -> None:
        self.sources, self.pieces, self.options = sources, pieces, options
        self.splits = [name for name, _ in options.shares]
        self.documents, self.tokens = Counter[str](), Counter[str]()
        self.longer, self.bad, self.named = 0, 0, list[str]()

    def go(self, place: Path, tell: Callable[[str], None]) -> None:
        staging = self.pieces.folder / "store"
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process; we hold the lock, so nobody writes there
        staging.mkdir()
        try:
            with ExitStack() as stack:
                tokens, offsets = (
                    [stack.enter_context((staging / f"{what}-{split}.bin").open("wb")) for split in self.splits]
                    for what in ("tokens", "offsets")
                )
                self._write(tokens, offsets)
            manifest = self._manifest()
            for path in staging.iterdir():
                sync(path)
            write_durably(staging / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            sync(staging)
            staging.rename(place)
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # after success this name no longer exists
        sync(place.parent)
        tell(f"tokenised {sum(manifest.documents.values()):,} documents, {sum(manifest.tokens.values()):,} tokens")
        for line in manifest.remarks(self.options):
            tell(line)

    def _write(self, tokens: Sequence[BinaryIO], offsets: Sequence[BinaryIO]) -> None:
        for file in offsets:
            file.write(np.zeros(1, np.int64).tobytes())
        for source, line, piece, ids in self._all():
            for split, (lengths, flat), to, ends in zip(self.splits, ids, tokens, offsets, strict=True):
                to.write(flat.tobytes())
                ends.write((self.tokens[split] + np.cumsum(lengths)).tobytes())
                self.documents[split] += len(lengths)
                self.tokens[split] += len(flat)
            self.longer += piece.longer
            self.bad += piece.bad
            room = NAMED - len(self.named)
            self.named += [f"{source.name} line {line + number} ({why})" for number, why in piece.named[:room]]

    def _all(self) -> Iterator[tuple[Source, int, Piece, list[Ids]]]:
        """Each with its source, and how many of the source's lines are before it."""
        parts = ((source, part) for source in self.sources for part in range(source.parts))
        line = 0
        for index, (source, part) in enumerate(parts):
            line, last, number = line if part else 0, False, 0
            while not last:
                piece, ids = self.pieces.read(index, number)
                yield source, line, piece, ids
                line, last, number = line + piece.lines, piece.last, number + 1

    def _manifest(self) -> Manifest:
        manifest = Manifest(
            format=_FORMAT,
            dtype=self.pieces.dtype.name,
            documents={split: self.documents[split] for split in self.splits},
            tokens={split: self.tokens[split] for split in self.splits},
            longer=self.longer,
            bad=self.bad,
            named=self.named,
        )
        if not sum(manifest.documents.values()):
            remarks = "; ".join(manifest.remarks(self.options))
            names = ", ".join(source.name for source in self.sources)
            raise InsertlmError(f"{names}: no usable document" + (f": {remarks}" if remarks else "; expected text"))
        return manifest
