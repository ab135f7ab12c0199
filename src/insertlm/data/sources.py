"""Where training documents come from: text files, and data sets of the Hugging Face hub.

    stories.txt   a document per line, or with `documents: blank` the paragraphs between blank lines
    stories.jsonl {"text": …} per line
    either of them compressed: .gz, .xz, .zst
    hub:NAME:SPLIT, hub:NAME@REVISION:SPLIT   the `text` column, streamed (NAME may be a folder, too)

Design choices:
- Documents are bytes until they are tokenised: decoding and parsing cost more than reading, and tokenising runs in
  parallel. It also means that one bad line is reported and passed over; the readers of `datasets` and `pyarrow` give up
  the whole file.
- A source has parts that can be read independently: a file is one part, a data set has as many as it has shards.
- A part is read in pieces, the units of work that are shared, saved and resumed. Where a piece begins depends on the
  content only, so any process can read any piece. In a file, piece k begins with the first line that starts at byte
  k · PIECE_BYTES (unpacked) or later; in a shard, with row k · PIECE_ROWS. A plain file is opened right there; a
  compressed one has to be unpacked up to there, which takes a tenth of the time of tokenising; a shard, streamed.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import Kind, kind_of, reading, unpacked

__all__ = [
    "PIECE_BYTES",
    "PIECE_ROWS",
    "Document",
    "Separator",
    "TextSource",
    "documents",
    "source_of",
    "text_of",
    "texts",
]

Separator = Literal["line", "blank"]

PIECE_BYTES = 1 << 24  # of a file: a killed process loses no more than this
PIECE_ROWS = 1 << 14  # of a shard
_SAMPLE = 1 << 16  # bytes of a file's start, middle and end that go into its fingerprint
_BATCH = 256  # rows that `datasets` gives at a time: one by one takes four times as long
_PATIENCE = 10.0  # seconds until the hub counts as out of reach
_HUB = "hub:"


class Document(NamedTuple):
    """line: where it begins in its piece, from 1   data: as it stands in the file"""

    line: int
    data: bytes


def source_of(name: str, separator: Separator = "line") -> TextSource:
    if name.startswith(_HUB):
        return HubData(name)
    try:
        return TextFile(Path(name), separator)
    except InsertlmError as error:
        raise InsertlmError(f"{error}, or hub:NAME:SPLIT") from error


def documents(source: TextSource) -> Iterator[Document]:
    """All of them. Their lines count from the start of their piece."""
    for part in range(source.parts):
        with source.opened(part) as reader:
            for piece in count():
                yield from reader.read(piece)
                if reader.over:
                    break


def texts(sources: Iterable[TextSource]) -> Iterator[str]:
    """The texts of all documents that hold one."""
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
    """A document's text. A ValueError says why there is none."""
    try:
        text = data.decode() if kind == "txt" else _LINES.decode(data).text
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        # JSON with a wrong byte in it fails in several ways; the byte is what the user has to mend.
        if data.decode(errors="ignore").encode() != data:
            raise ValueError("invalid UTF-8") from error
        raise ValueError('no "text" in it' if isinstance(error, msgspec.ValidationError) else "broken JSON") from error
    if not text.strip():
        raise ValueError("empty text")
    return text


# --- Files


class TextFile:
    """kind: how its documents are written   size: where its readers end   parts: how many can be read independently"""

    parts = 1
    version = ""

    def __init__(self, path: Path, separator: Separator) -> None:
        self.path, self.name, self.kind = path, str(path), kind_of(path)
        self._blank = separator == "blank" and self.kind == "txt"

    @property
    def size(self) -> int:
        with reading(self.path):
            return self.path.stat().st_size

    @property
    def fingerprint(self) -> str:
        """Name, size, time of change and samples of the content. Hashing a hundred gigabytes at every start would take
        minutes, and a time alone does not tell a copy from another file. The folder does not count: a corpus may
        move."""
        with reading(self.path), self.path.open("rb") as file:
            state = self.path.stat()
            digest = hashlib.sha256(f"{self.path.name}:{state.st_size}:{state.st_mtime_ns}:{self._blank}".encode())
            for place in (0, state.st_size // 2, max(0, state.st_size - _SAMPLE)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    @contextmanager
    def opened(self, part: int) -> Iterator[_FileReader]:
        with reading(self.path):
            raw = self.path.open("rb")
        with raw, unpacked(raw, self.path.suffix) as file:
            yield _FileReader(self.path, raw, file, self._blank)


class _FileReader:
    """Reads pieces in ascending order. It always holds the line it has come to, which shows whether a piece ends there.

    raw: the file on the disk   file: unpacked   blank: whether blank lines separate documents
    place: read so far, to show progress   lines: of the piece read last   over: whether the part ended with that piece
    """

    def __init__(self, path: Path, raw: BinaryIO, file: BinaryIO, blank: bool) -> None:
        self._path, self._raw, self._file, self._blank = path, raw, file, blank
        self.lines, self._start = 0, 0
        with reading(path):
            self._line = file.readline()

    @property
    def place(self) -> int:
        return self._raw.tell()

    @property
    def over(self) -> bool:
        return not self._line

    def read(self, piece: int) -> Iterator[Document]:
        for is_blank, lines in groupby(self._lines(piece), key=lambda line: not line.data.strip()):
            if is_blank:
                continue
            if self._blank:
                first, *others = lines
                yield Document(first.line, b"\n".join([first.data, *(line.data for line in others)]))
            else:
                yield from lines

    def _lines(self, piece: int) -> Iterator[Document]:
        with reading(self._path):
            if piece:
                self._go(piece * PIECE_BYTES)
            self.lines = 0
            while self._line and not self._begins_piece((piece + 1) * PIECE_BYTES):
                self.lines += 1
                # Some editors begin a file with a byte order mark, which is no part of the text.
                line = self._line if self._start else self._line.removeprefix(codecs.BOM_UTF8)
                yield Document(self.lines, line.rstrip(b"\r\n"))
                self._next()

    def _go(self, place: int) -> None:
        """To the first line that begins a piece at this place or later."""
        if self._start + len(self._line) < place:
            # From the byte before: it ends a line or belongs to one that starts too early. Both are passed over.
            self._start = self._file.seek(place - 1)
            self._line = self._file.readline()
        while self._line and not self._begins_piece(place):
            self._next()

    def _begins_piece(self, place: int) -> bool:
        """No paragraph is cut, so where they are documents a piece begins with a blank line."""
        return self._start >= place and (not self._blank or not self._line.strip())

    def _next(self) -> None:
        self._start += len(self._line)
        self._line = self._file.readline()


# --- Data sets of the hub, streamed by the `datasets` library


class HubData:
    """A data set on the hub or in a folder."""

    kind: Kind = "txt"  # the library has parsed whatever format the data set has
    size = None  # unknown before all is read

    def __init__(self, name: str) -> None:
        self.name = name
        whole, _, self._split = name.removeprefix(_HUB).rpartition(":")
        self._data, _, self._revision = whole.partition("@")
        if not self._data or not self._split:
            raise InsertlmError(f"{name}: expected hub:NAME:SPLIT, for example hub:roneneldan/TinyStories:train")

    @property
    def fingerprint(self) -> str:
        """Only the name: whether the data set has changed is known to the hub, and to open a store that is there must
        not need a connection."""
        return self.name

    @property
    def version(self) -> str:
        """Knows the commit, or the files' times of change, and is asked for while a store is made."""
        return f"{self._builder.config_id} {self._builder.hash}"

    @property
    def parts(self) -> int:
        return int(self._rows.n_shards)

    @contextmanager
    def opened(self, part: int) -> Iterator[_HubReader]:
        yield _HubReader(self, self._rows.shard(self.parts, part))

    @cached_property
    def _builder(self) -> Any:
        try:
            from datasets import load_dataset_builder
        except ImportError as error:
            raise InsertlmError(f"{self.name} needs datasets; install it with: pip install 'insertlm[text]'") from error
        with self.asking():
            if not Path(self._data).is_dir():
                # Without a connection the builder would try for half a minute, and tell of every attempt.
                from huggingface_hub import HfApi

                HfApi(library_name="insertlm").dataset_info(
                    self._data, revision=self._revision or None, timeout=_PATIENCE
                )
            return load_dataset_builder(self._data, revision=self._revision or None)

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


class _HubReader:
    """Reads pieces in ascending order. rows: of one shard   place, lines, over: as above, in rows"""

    def __init__(self, hub: HubData, rows: Any) -> None:
        self._hub, self._rows = hub, rows
        self._texts: Iterator[bytes] | None = None
        self.place, self.lines, self.over = 0, 0, False

    def read(self, piece: int) -> Iterator[Document]:
        first = piece * PIECE_ROWS
        # The library skips rows by reading them, so once it has begun, going on is never slower than starting anew.
        if self._texts is None:
            self.place, self._texts = first, self._from(first)
        for _ in islice(self._texts, first - self.place):
            self.place += 1
        self.lines = 0
        for text in islice(self._texts, PIECE_ROWS):
            self.lines, self.place = self.lines + 1, self.place + 1
            yield Document(self.lines, text)
        self.over = self.lines < PIECE_ROWS

    def _from(self, row: int) -> Iterator[bytes]:
        rows = self._rows.skip(row) if row else self._rows
        with self._hub.asking():
            for batch in rows.iter(batch_size=_BATCH):
                number = len(next(iter(batch.values())))
                # A row without a text stays a document, an empty one, so that it is counted as bad and lines agree.
                for text in batch.get("text") or [None] * number:
                    yield text.encode("utf-8", "replace") if isinstance(text, str) else b""


TextSource = TextFile | HubData
