"""Where documents come from: local files, plain or compressed, and data sets on the Hugging Face hub.

A source gives documents as bytes with the line they begin at; `text_of` makes text of them. The first is done by one
process as it reads, the second, which costs more, by as many as there are.

    stories.txt   a document a line, or with `documents: blank` what stands between blank lines
    stories.jsonl {"text": …} a line
    either of them with .gz, .xz or .zst behind
    hub:NAME:SPLIT, hub:NAME@REVISION:SPLIT   the `text` column, streamed (NAME may be a folder, too)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from insertlm.corpus.unpacking import COMPRESSED, reading, unpacked
from insertlm.errors import InsertlmError

__all__ = ["Document", "Kind", "Separator", "Source", "source_of", "text_of", "texts"]

Separator = Literal["line", "blank"]
Kind = Literal["txt", "jsonl"]

_KINDS: dict[str, Kind] = {".txt": "txt", ".jsonl": "jsonl"}
_SAMPLE = 1 << 16  # bytes of a file's start, middle and end that its fingerprint knows
_HUB = "hub:"


class Document(NamedTuple):
    """line: where it begins, from 1   data: as it stands in the file"""

    line: int
    data: bytes


class Source(Protocol):
    """kind: how `text_of` reads its documents"""

    name: str
    kind: Kind

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        ...

    @property
    def size(self) -> int | None:
        """What `documents` counts up to while it reads; None if nobody knows."""
        ...

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Each with how much of the source is read."""
        ...


def source_of(name: str, separator: Separator = "line") -> Source:
    return _Hub(name) if name.startswith(_HUB) else _File(Path(name), separator)


def texts(sources: Iterable[Source]) -> Iterator[str]:
    """All that is text, one after the other."""
    for source in sources:
        for document, _ in source.documents():
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

    def documents(self) -> Iterator[tuple[Document, int]]:
        with self._reading(), self.path.open("rb") as raw, unpacked(raw, self.path.suffix) as file:
            lines = (Document(number, line.rstrip(b"\r\n")) for number, line in enumerate(file, start=1))
            for document in _paragraphs(lines) if self._blank else lines:
                if document.data and not document.data.isspace():
                    yield document, raw.tell()

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self.path, "text to learn from")


def _paragraphs(lines: Iterable[Document]) -> Iterator[Document]:
    """What stands between blank lines, line ends inside kept."""
    first, parts = 0, list[bytes]()
    for number, line in lines:
        if line and not line.isspace():
            first = first if parts else number
            parts.append(line)
        elif parts:
            yield Document(first, b"\n".join(parts))
            parts = []
    if parts:
        yield Document(first, b"\n".join(parts))


# --- The hub


class _Hub:
    """Nobody says whether a data set on the hub has changed without asking it, so its fingerprint is its name with the
    revision, if one is given."""

    size = None
    kind: Kind = "txt"  # the library has read the JSON

    def __init__(self, name: str) -> None:
        self.name = name
        whole, _, self._split = name.removeprefix(_HUB).rpartition(":")
        self._data, _, revision = whole.partition("@")
        self._revision = revision or None
        if not self._data or not self._split:
            raise InsertlmError(f"{name}: expected hub:NAME:SPLIT, for example hub:roneneldan/TinyStories:train")

    @property
    def fingerprint(self) -> str:
        return self.name

    def documents(self) -> Iterator[tuple[Document, int]]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise InsertlmError(f"{self.name} needs datasets; install it with: pip install 'insertlm[text]'") from error
        try:
            rows = load_dataset(self._data, split=self._split, streaming=True, revision=self._revision)
            for number, row in enumerate(rows, start=1):
                text = row.get("text")
                yield Document(number, text.encode("utf-8", "replace") if isinstance(text, str) else b""), number
        except InsertlmError:
            raise
        except Exception as error:  # the library raises whatever its parts do
            what = " ".join(str(error).split())
            raise InsertlmError(f"{self.name}: cannot be read from the hub: {what:.200}") from error
