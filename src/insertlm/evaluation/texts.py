"""Texts to be measured, from files."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insertlm.errors import InsertlmError
from insertlm.files import reason

__all__ = ["read_records", "read_texts", "stem"]

_OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}


def read_texts(path: Path, field: str = "text", count: int | None = None) -> list[str]:
    """One text a line (.txt), or one JSON object a line that has it under `field` (.jsonl); .xz and .gz of them too.

    A blank line of a .txt file is an empty text. count: only the first ones.
    """
    if not _is_json(path):
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
        records.append(record)
    return records


def stem(path: Path) -> str:
    """`stories` for `here/stories.jsonl.xz`."""
    return path.name.partition(".")[0] or path.name


def _is_json(path: Path) -> bool:
    kind = path.with_suffix("").suffix if path.suffix in _OPENERS else path.suffix
    if kind not in (".txt", ".jsonl"):
        raise InsertlmError(f"{path}: expected a file of texts, .txt or .jsonl, also .xz or .gz of these")
    return kind == ".jsonl"


def _lines(path: Path) -> list[str]:
    """Split at line ends alone: a text may hold any other character that Unicode calls a line break."""
    try:
        data = path.read_bytes()
        data = _OPENERS.get(path.suffix, bytes)(data)
    except FileNotFoundError as error:
        raise InsertlmError(f"{path}: no such file; expected a file of texts, .txt or .jsonl") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise InsertlmError(f"{path}: cannot be read: {why}") from error
    lines = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise InsertlmError(f"{path}, line {number}: not UTF-8; expected text in UTF-8") from error
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise InsertlmError(f"{path}: is empty; expected a text a line")
    return lines


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
