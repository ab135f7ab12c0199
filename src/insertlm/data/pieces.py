"""Pieces of a store that is being made: what is done of it, and who does the rest.

A piece is one file. It appears, whole, when the disk has all of it; after a killed process it is there or it is not.

    a SHA-256 of the rest
    a line of JSON, see `Piece`
    for each split the lengths of its documents, int64, and their ids, end to end

A process that makes a piece holds a lock on it, which the system takes back from a killed one. Should a piece be made
twice, because a network's file system shows late what another node has done, it is replaced by the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.files import sync, write_durably

__all__ = ["NAMED", "Ids", "Piece", "Pieces", "locked"]

NAMED = 5  # bad lines that a piece, or a store, names
_SUFFIX = ".piece"
_DIGEST = 64  # letters


class Piece(msgspec.Struct, frozen=True):
    """What is in a piece. last: whether its part ends with it   place: in the part, where it ends   read: of the part,
    for the progress that is shown   lines: that it was read from   documents, tokens: of each split
    longer: documents that had too many ids   bad: lines that hold none, of which the first few are in `named`"""

    last: bool
    place: int
    read: int
    lines: int
    documents: list[int]
    tokens: list[int]
    longer: int
    bad: int
    named: list[tuple[int, str]]


class Ids(NamedTuple):
    """Of the documents of a split in a piece. lengths: [N]   ids: end to end"""

    lengths: NDArray[np.int64]
    ids: NDArray[np.uint16 | np.uint32]


class Pieces:
    """Of a store, by the number of their part among all parts of all sources, and their number in it."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder, self.dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)

    def there(self) -> set[tuple[int, int]]:
        names = (path.stem.split("-") for path in self.folder.iterdir() if path.suffix == _SUFFIX)
        return {(int(part), int(number)) for part, number in names}

    def find(self, part: int, number: int) -> Piece | None:
        try:
            with self._path(part, number).open("rb") as file:
                file.seek(_DIGEST + 1)
                return _described(file.readline())
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, part: int, number: int, piece: Piece, splits: list[Ids]) -> None:
        path = self._path(part, number)
        content = b"".join([msgspec.json.encode(piece), b"\n", *(array.tobytes() for ids in splits for array in ids)])
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            write_durably(temporary, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # after success this name no longer exists
        sync(self.folder)

    def read(self, part: int, number: int) -> tuple[Piece, list[Ids]]:
        path = self._path(part, number)
        digest, _, content = path.read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            path.unlink()
            raise InsertlmError(f"{path} was damaged on the disk, and is removed; start again to make it anew")
        line, _, data = content.partition(b"\n")
        piece, splits, place = _described(line), list[Ids](), 0
        for documents, tokens in zip(piece.documents, piece.tokens, strict=True):
            lengths = np.frombuffer(data, np.int64, documents, place)
            place += lengths.nbytes
            splits.append(Ids(lengths, np.frombuffer(data, self.dtype, tokens, place)))
            place += splits[-1].ids.nbytes
        return piece, splits

    def claim(self, part: int, number: int | None = None) -> BinaryIO | None:
        """A lock on a piece, or on a part, held until it is closed; None if another process has it."""
        file = self._path(part, number).with_suffix(".lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _path(self, part: int, number: int | None) -> Path:
        return self.folder / (f"{part:05}.part" if number is None else f"{part:05}-{number:06}{_SUFFIX}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """By this process alone, after those that came before."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _described(line: bytes) -> Piece:
    return msgspec.json.decode(line, type=Piece)
