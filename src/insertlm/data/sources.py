"""Where documents come from: local files, plain or compressed, and data sets on the Hugging Face hub.

A source gives documents as bytes with the line they begin at; `text_of` makes text of them. The first is done by one
process as it reads, the second, which costs more, by as many as there are.

    stories.txt   a document a line, or with `documents: blank` what stands between blank lines
    stories.jsonl {"text": …} a line
    either of them with .gz, .xz or .zst behind
    hub:NAME:SPLIT, hub:NAME@REVISION:SPLIT   the `text` column, streamed (NAME may be a folder, too), see hub.py

A source has parts, a file one and a data set as many as it has shards, and a part is cut into pieces. Where depends on
the content alone, so that any process can take any piece, now or after a restart. A piece of a file begins with the
first line that begins at a multiple of the size, or behind it, in the file as it is unpacked. A plain file is opened
right there; a compressed one has to be unpacked up to there, which takes far less time than tokenising.
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol

import msgspec

from insertlm.core.errors import InsertlmError
from insertlm.data.unpacking import COMPRESSED, reading, unpacked

__all__ = ["Document", "Kind", "Reader", "Separator", "Source", "documents", "source_of", "text_of", "texts"]

Separator = Literal["line", "blank"]
Kind = Literal["txt", "jsonl"]

_KINDS: dict[str, Kind] = {".txt": "txt", ".jsonl": "jsonl"}
_SAMPLE = 1 << 16  # bytes of a file's start, middle and end that its fingerprint knows
_BLOCK = 1 << 20  # bytes of a compressed file that are passed over at a time
_HUB = "hub:"


class Document(NamedTuple):
    """line: where it begins in its piece, from 1   data: as it stands in the file"""

    line: int
    data: bytes


class Reader(Protocol):
    """Goes forwards through a part of a source, piece by piece.

    place: in the part, as it counts them: bytes or rows   lines: of the piece that was read last
    over: whether the part ended with that piece   read: how much of the part is read, see `Source.size`
    """

    place: int
    lines: int
    over: bool

    @property
    def read(self) -> int: ...

    def go(self, piece: int, place: int | None = None) -> bool:
        """To the beginning of a piece, which is at this place if that is known. False if the part ends before it."""
        ...

    def documents(self) -> Iterator[Document]:
        """Of the piece that it is at, to its end."""
        ...


class Source(Protocol):
    """kind: how `text_of` reads its documents"""

    name: str
    kind: Kind

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        ...

    @property
    def version(self) -> str:
        """What else tells whether the content is the same, if finding it out takes longer than a look."""
        ...

    @property
    def size(self) -> int | None:
        """What its readers count up to, all together; None if nobody knows."""
        ...

    @property
    def parts(self) -> int: ...

    def opened(self, part: int, size: float) -> AbstractContextManager[Reader]:
        """At the first piece. size: bytes of a piece, about"""
        ...


def source_of(name: str, separator: Separator = "line") -> Source:
    if name.startswith(_HUB):
        from insertlm.data.hub import Hub

        return Hub(name, name.removeprefix(_HUB))
    return _File(Path(name), separator)


def documents(source: Source) -> Iterator[Document]:
    """All of them, each part as one piece."""
    for part in range(source.parts):
        with source.opened(part, math.inf) as reader:
            yield from reader.documents()


def texts(sources: Iterable[Source]) -> Iterator[str]:
    """All that is text, one after the other."""
    for source in sources:
        for document in documents(source):
            try:
                yield text_of(document.data, source.kind)
            except ValueError:
                continue


class _Line(msgspec.Struct):
    text: str


_LINES = msgspec.json.Decoder(_Line)


def text_of(data: bytes, kind: Kind) -> str:
    """A document's text. Raises ValueError, which says why there is none."""
    try:
        text = data.decode() if kind == "txt" else _LINES.decode(data).text
    except msgspec.ValidationError as error:
        raise ValueError('no "text" in it' if _is_utf8(data) else "invalid UTF-8") from error
    except UnicodeDecodeError as error:
        raise ValueError("invalid UTF-8") from error
    except msgspec.DecodeError as error:
        raise ValueError("broken JSON" if _is_utf8(data) else "invalid UTF-8") from error
    if not text.strip():
        raise ValueError("empty text")
    return text


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- Files


class _File:
    """A file's fingerprint is its name, size, time of change and samples of its content. Reading a hundred gigabytes
    at every start only to hash them would take minutes; a time alone does not tell a copy from another file. The folder
    does not count, so a corpus may move."""

    version, parts = "", 1

    def __init__(self, path: Path, separator: Separator) -> None:
        plain = path.with_suffix("") if path.suffix in COMPRESSED else path
        if plain.suffix not in _KINDS:
            raise InsertlmError(
                f"{path}: cannot tell what it holds; expected .txt or .jsonl, with .gz, .xz or .zst or without, "
                "or hub:NAME:SPLIT"
            )
        self.path, self.name, self.kind = path, str(path), _KINDS[plain.suffix]
        self._blank = separator == "blank" and self.kind == "txt"

    @property
    def size(self) -> int:
        with self._reading():
            return self.path.stat().st_size

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        with self._reading(), self.path.open("rb") as file:
            state = self.path.stat()
            digest.update(f"{self.path.name}:{state.st_size}:{state.st_mtime_ns}:{self._blank}".encode())
            for place in (0, state.st_size // 2, max(0, state.st_size - _SAMPLE)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    @contextmanager
    def opened(self, part: int, size: float) -> Iterator[Reader]:
        with self._reading():
            raw = self.path.open("rb")
        with raw, unpacked(raw, self.path.suffix) as file:
            yield _FileReader(self._reading, raw, file, self._blank, size)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self.path, "text to learn from")


class _FileReader:
    """Has read the line at `place`, but not passed it."""

    def __init__(
        self,
        reading: Callable[[], AbstractContextManager[None]],
        raw: BinaryIO,
        file: BinaryIO,
        blank: bool,
        size: float,
    ) -> None:
        self._reading, self._raw, self._file, self._blank, self._size = reading, raw, file, blank, size
        self._piece, self.place, self.lines = 0, 0, 0
        with reading():
            self._line = file.readline()
        self.over = not self._line

    @property
    def read(self) -> int:
        return self._raw.tell()

    def go(self, piece: int, place: int | None = None) -> bool:
        if piece > self._piece:
            with self._reading():
                self._pass_over(int(piece * self._size))
            self._piece = piece
        self.over = not self._line
        return piece == 0 or not self.over

    def documents(self) -> Iterator[Document]:
        lines = self._lines()
        for document in _paragraphs(lines) if self._blank else lines:
            if not _is_blank(document.data):
                yield document
        self._piece += 1
        self.over = not self._line

    def _lines(self) -> Iterator[Document]:
        end, self.lines = (self._piece + 1) * self._size, 0
        with self._reading():
            while self._line and not (self.place >= end and self._may_begin()):
                self.lines += 1
                data = self._line if self.place else self._line.removeprefix(codecs.BOM_UTF8)
                yield Document(self.lines, data.rstrip(b"\r\n"))
                self._next()

    def _next(self) -> None:
        self.place += len(self._line)
        self._line = self._file.readline()

    def _may_begin(self) -> bool:
        """Whether a piece may: no paragraph is cut."""
        return not self._blank or _is_blank(self._line)

    def _pass_over(self, start: int) -> None:
        """To the first line from `start` on with which a piece may begin."""
        here = self.place + len(self._line)  # of the file
        if here < start:
            self._jump(here, start - 1)
            self.place, self._line = start - 1, self._file.readline()  # the rest of a line, be it only its end
        if self.place < start:
            self._next()
        while self._line and not self._may_begin():
            self._next()

    def _jump(self, here: int, there: int) -> None:
        if self._file is self._raw:
            self._file.seek(there)
            return
        while here < there and (block := self._file.read(min(_BLOCK, there - here))):
            here += len(block)


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def _paragraphs(lines: Iterable[Document]) -> Iterator[Document]:
    """What stands between blank lines, line ends inside kept."""
    first, parts = 0, list[bytes]()
    for number, line in lines:
        if not _is_blank(line):
            first = first if parts else number
            parts.append(line)
        elif parts:
            yield Document(first, b"\n".join(parts))
            parts = []
    if parts:
        yield Document(first, b"\n".join(parts))
