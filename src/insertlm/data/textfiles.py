"""Text files: .txt and .jsonl, plain or compressed (.gz, .xz, .zst).

`unpacked` and `reading` serve training corpora, which are read as streams and may have bad lines. `read_texts` and
`read_records` read a small file whole, for evaluation: there the first bad line is an error.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    try:
        from backports import zstd
    except ImportError:  # it comes with the extra `text`
        zstd = None  # type: ignore[assignment]

__all__ = ["Kind", "kind_of", "read_records", "read_texts", "reading", "stem", "unpacked"]

Kind = Literal["txt", "jsonl"]

_COMPRESSED = (".gz", ".xz", ".zst")
_BROKEN: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error)  # what unpacking a damaged file raises
if zstd is not None:
    _BROKEN = (*_BROKEN, zstd.ZstdError)


def kind_of(path: Path) -> Kind:
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    if suffix not in (".txt", ".jsonl"):
        raise InsertlmError(f"{path}: expected a .txt or .jsonl file, plain or compressed (.gz, .xz, .zst)")
    return "txt" if suffix == ".txt" else "jsonl"


def stem(path: Path) -> str:
    """`stories` for `here/stories.jsonl.xz`."""
    return path.name.partition(".")[0] or path.name


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with the file becomes one line that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise InsertlmError(f"{path}: no such file; expected a .txt or .jsonl file") from error
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error
    except _BROKEN as error:
        raise InsertlmError(f"{path}: cannot be unpacked: {error}") from error


def unpacked(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if suffix != ".zst":
        return raw
    if zstd is None:
        raise InsertlmError("a .zst file needs backports.zstd; install it with: pip install 'insertlm[text]'")
    return cast(BinaryIO, zstd.ZstdFile(raw))


# --- Small files, read whole


def read_texts(path: Path, field: str = "text", count: int | None = None) -> list[str]:
    """A text per line (.txt), or a JSON object per line that has the text under `field` (.jsonl).

    A blank line of a .txt file is an empty text. count: only the first ones.
    """
    if kind_of(path) == "txt":
        return _lines(path)[:count]
    records = read_records(path, count)
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get(field), str):
            raise InsertlmError(f"{path}, line {number}: expected a text under {field!r}, got {_shown(record)}")
    return [record[field] for record in records]


def read_records(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    records = []
    for number, line in enumerate(_lines(path)[:count], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InsertlmError(f"{path}, line {number}: expected a JSON object, got {_shown(line)}") from error
        if not isinstance(record, dict):
            raise InsertlmError(f"{path}, line {number}: expected a JSON object, got {_shown(record)}")
        # JSON can spell half of a surrogate pair, which no tokenizer takes. A quick test first, since it is rare.
        if "\\ud" in line.lower() and not _is_unicode(record):
            raise InsertlmError(f"{path}, line {number}: not Unicode; expected no half of a surrogate pair alone")
        records.append(record)
    return records


def _lines(path: Path) -> list[str]:
    # Split at line ends only: str.splitlines would also split at characters such as U+2028, which belong to a text.
    with reading(path), path.open("rb") as raw, unpacked(raw, path.suffix) as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    lines = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise InsertlmError(f"{path}, line {number}: not UTF-8; expected text in UTF-8") from error
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise InsertlmError(f"{path}: is empty; expected a text per line")
    return lines


def _is_unicode(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
