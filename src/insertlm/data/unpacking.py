"""Compressed files, read as they are unpacked: .gz, .xz and .zst."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["COMPRESSED", "reading", "unpacked"]

COMPRESSED = (".gz", ".xz", ".zst")
_CHUNK = 1 << 16


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Whatever is wrong with the file becomes one line that names it. expected: what it should be"""
    try:
        yield
    except FileNotFoundError as error:
        raise InsertlmError(f"{path}: no such file; expected {expected}") from error
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error
    except _broken_errors() as error:
        raise InsertlmError(f"{path}: cannot be unpacked: {error}") from error


def _broken_errors() -> tuple[type[Exception], ...]:
    """What unpacking raises, beside OSError, when a file is cut or is none of its kind."""
    errors = (EOFError, lzma.LZMAError, zlib.error)
    try:
        import zstandard
    except ImportError:
        return errors
    return (*errors, zstandard.ZstdError)


def unpacked(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return _zstandard(raw) if suffix == ".zst" else raw


def _zstandard(raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise InsertlmError("a .zst file needs zstandard; install it with: pip install 'insertlm[text]'") from error
    return cast(BinaryIO, io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor().decompressobj)))


class _Frames(io.RawIOBase):
    """Zstandard frames, one after the other. The library's own reader takes a file that was cut for one that ends."""

    def __init__(self, raw: BinaryIO, frame: Callable[[], Any]) -> None:
        self._raw, self._frame = raw, frame
        self._open: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._open.unused_data if self._open and self._open.eof else b""
            data = rest or self._raw.read(_CHUNK)
            if not data:
                if self._open and not self._open.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._open is None or self._open.eof:
                self._open = self._frame()
            self._ready = memoryview(self._open.decompress(data))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
