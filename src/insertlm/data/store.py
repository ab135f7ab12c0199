"""Documents as ids, in files that are mapped into memory: tokenised once, read by any number of processes.

A store is a folder in the cache, named by a fingerprint of the sources, the tokenizer and the options:

    tokens-SPLIT.bin    all ids of a split end to end, uint16 or uint32
    offsets-SPLIT.bin   int64, where each document begins, and the end of the last
    manifest.json       what is in it; written last

Design choices:
- All processes that want a store make its pieces (tokenising.py), in a hidden folder beside it. One of them joins the
  pieces in their order and renames the result when the disk has all of it. So a store does not depend on how many
  processes made it or how often they were killed, and nobody sees half of one. Until then the pieces take as much room
  again.
- Bad lines are counted and the first few named. They are no error unless no document is left.
- Equal texts go to the same split, since a hash of the text decides; an excerpt goes where its text goes.
- Flat files rather than Arrow tables: a random batch takes a tenth of the time that `datasets` needs for it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.files import cache_folder, sync, write_durably, writing
from insertlm.data.sources import TextSource, source_of
from insertlm.data.tokenising import NAMED, Longer, Options, Piece, PieceFolder, id_type, make_pieces, plan
from insertlm.text.subwords import SubwordTokenizer

__all__ = ["Longer", "Manifest", "Options", "Store", "open_store"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_SAMPLE = 4096  # tokens that a fingerprint knows, about
_ATTEMPTS = 10  # at pieces that vanish meanwhile: on a network's file system it takes a while to see why


class Manifest(msgspec.Struct):
    """documents, tokens: of each split   longer: documents that had more than `block` ids   bad: lines that hold none,
    of which the first few are in `named`"""

    format: int
    dtype: str
    documents: dict[str, int]
    tokens: dict[str, int]
    longer: int = 0
    bad: int = 0
    named: list[str] = []

    def remarks(self, options: Options) -> list[str]:
        """What a user should know."""
        lines = [f"{self.bad:,} lines hold no document: {'; '.join(self.named)}"] if self.bad else []
        if self.longer:
            what = {"truncate": "cut", "skip": "left out", "split": "split into passages"}[options.longer]
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
        """Changes when the documents do: it knows how many there are, their lengths, and a sample of the tokens."""
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(self.tokens[:: max(1, len(self.tokens) // _SAMPLE)].astype(np.uint32).tobytes())
        return digest.hexdigest()

    def padded(self, documents: NDArray[np.int64], width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids [N, width], 0 beyond a document's length, and lengths [N]."""
        first, last = self.offsets[documents], self.offsets[documents + 1]
        ids = np.zeros((len(documents), width), np.int32)
        # A slice per document takes a third of a microsecond; one gather for all by a mask grows with the width.
        for row, start, end in zip(ids, first.tolist(), last.tolist(), strict=True):
            row[: end - start] = self.tokens[start:end]
        return ids, (last - first).astype(np.int32)


def open_store(
    sources: Sequence[str],
    tokenizer: SubwordTokenizer,
    options: Options,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Store]:
    """The splits of these sources, tokenised now if they have not been. tell: is told what a user should know."""
    found = [source_of(name, options.separator) for name in sources]
    what = [_FORMAT, [source.fingerprint for source in found], tokenizer.fingerprint, msgspec.to_builtins(options)]
    place = cache_folder() / hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:32]
    if not (place / _MANIFEST).is_file():
        with writing(place):
            _build(found, tokenizer, options, place, tell)
    for pieces in place.parent.glob(f".{place.name}*"):
        _remove(pieces)
    manifest = msgspec.json.decode((place / _MANIFEST).read_bytes(), type=Manifest)
    return {split: _mapped(place, split, manifest) for split in manifest.documents}


def _mapped(place: Path, split: str, manifest: Manifest) -> Store:
    if not manifest.documents[split]:  # nothing cannot be mapped
        return Store(np.empty(0, np.uint16), np.zeros(1, np.int64))
    parts = ("tokens", manifest.dtype, manifest.tokens[split]), ("offsets", "int64", manifest.documents[split] + 1)
    # A file that was cut, by a full disk or a copy that broke off, would otherwise fail in the middle of training.
    for name, kind, count in parts:
        file, size = place / f"{name}-{split}.bin", count * np.dtype(kind).itemsize
        if not file.is_file() or file.stat().st_size != size:
            raise InsertlmError(f"{file}: expected {size} bytes; remove {place} to have the texts tokenised again")
    # As plain arrays, which still read from the files: slices of np.memmap take four times as long.
    tokens, offsets = (np.asarray(np.memmap(place / f"{name}-{split}.bin", kind, "r")) for name, kind, _ in parts)
    return Store(tokens, offsets)


def _remove(folder: Path) -> None:
    """Rename first: processes still at work there must not take what is left for all there is."""
    with suppress(OSError):  # another process does the same, or it is not ours
        folder = folder.rename(folder.with_suffix(".gone"))
    shutil.rmtree(folder, ignore_errors=True)


# --- Building


def _build(
    sources: Sequence[TextSource],
    tokenizer: SubwordTokenizer,
    options: Options,
    place: Path,
    tell: Callable[[str], None],
) -> None:
    """Together with all processes that do the same: all make pieces, and the first to come joins them."""
    folder = place.with_name(f".{place.name}-{plan(sources)}")
    for left in reversed(range(_ATTEMPTS)):
        try:
            with PieceFolder(folder) as pieces:
                if not (place / _MANIFEST).is_file():
                    make_pieces(sources, tokenizer, options, pieces)
                    pieces.wait_to_join()
                if not (place / _MANIFEST).is_file():
                    manifest = _join(sources, tokenizer, options, pieces, place)
                    documents, tokens = (sum(counts.values()) for counts in (manifest.documents, manifest.tokens))
                    tell(f"tokenised {documents:,} documents, {tokens:,} tokens")
                    for line in manifest.remarks(options):
                        tell(line)
            return
        except FileNotFoundError:  # someone has joined the pieces and removed them, or has emptied the cache
            if (place / _MANIFEST).is_file():
                return
            if not left:
                raise


def _join(
    sources: Sequence[TextSource], tokenizer: SubwordTokenizer, options: Options, pieces: PieceFolder, place: Path
) -> Manifest:
    staging = pieces.path / "store"
    shutil.rmtree(staging, ignore_errors=True)  # of a killed process; we hold the lock, so nobody writes there
    staging.mkdir()
    splits, kind = [name for name, _ in options.shares], id_type(tokenizer)
    manifest = Manifest(_FORMAT, kind.name, dict.fromkeys(splits, 0), dict.fromkeys(splits, 0))
    with ExitStack() as stack:
        tokens, offsets = (
            [stack.enter_context((staging / f"{what}-{split}.bin").open("wb")) for split in splits]
            for what in ("tokens", "offsets")
        )
        for file in offsets:
            file.write(np.zeros(1, np.int64).tobytes())
        for source, line, piece in _in_order(sources, pieces):
            for chunk in piece.chunks:
                owner, lengths = np.frombuffer(chunk.splits, np.int8), np.frombuffer(chunk.lengths, np.int64)
                ids = np.frombuffer(chunk.ids, kind)
                for number, split in enumerate(splits):
                    mine = owner == number
                    tokens[number].write(ids[np.repeat(mine, lengths)].tobytes())
                    offsets[number].write((manifest.tokens[split] + np.cumsum(lengths[mine])).tobytes())
                    manifest.documents[split] += int(mine.sum())
                    manifest.tokens[split] += int(lengths[mine].sum())
                manifest.longer += chunk.longer
                manifest.bad += chunk.bad
                room = NAMED - len(manifest.named)
                manifest.named += [f"{source.name} line {line + at} ({why})" for at, why in chunk.named[:room]]
    if not any(manifest.documents.values()):
        names, remarks = ", ".join(source.name for source in sources), "; ".join(manifest.remarks(options))
        raise InsertlmError(f"{names}: no usable document" + (f": {remarks}" if remarks else "; expected text"))
    # First the contents, then the manifest, then the name: after a crash, a store that is there is whole.
    for path in staging.iterdir():
        sync(path)
    write_durably(staging / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    sync(staging)
    staging.rename(place)
    sync(place.parent)
    return manifest


def _in_order(sources: Sequence[TextSource], pieces: PieceFolder) -> Iterator[tuple[TextSource, int, Piece]]:
    """Each piece with its source, and how many of the source's lines come before it."""
    found, index = pieces.found(), 0
    for source in sources:
        line = 0
        for _ in range(source.parts):
            number, over = 0, False
            while not over:
                if (index, number) not in found:
                    raise FileNotFoundError(pieces.path)  # another process has just found it damaged and removed it
                path, _, over = found[index, number]
                piece = pieces.read(path)
                yield source, line, piece
                line, number = line + piece.lines, number + 1
            index += 1
