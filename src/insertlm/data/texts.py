"""Texts to be measured or taken apart, from files. Unlike those of a corpus to learn from, all must be right: the first
bad line is an error.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.data.unpacking import COMPRESSED, reading, unpacked

__all__ = ["read_records", "read_texts", "stem"]


def read_texts(path: Path, field: str = "text", count: int | None = None) -> list[str]:
    """One text a line (.txt), or one JSON object a line that has it under `field` (.jsonl); compressed ones too.

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
        if "\\ud" in line.lower() and not _is_unicode(record):
            raise InsertlmError(f"{path}, line {number}: not Unicode; expected no half of a surrogate pair alone")
        records.append(record)
    return records


def stem(path: Path) -> str:
    """`stories` for `here/stories.jsonl.xz`."""
    return path.name.partition(".")[0] or path.name


def _is_json(path: Path) -> bool:
    kind = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if kind not in (".txt", ".jsonl"):
        raise InsertlmError(f"{path}: expected a file of texts, .txt or .jsonl, also .xz, .gz or .zst of these")
    return kind == ".jsonl"


def _lines(path: Path) -> list[str]:
    """Split at line ends alone: a text may hold any other character that Unicode calls a line break."""
    expected = "a file of texts, .txt or .jsonl"
    with reading(path, expected), path.open("rb") as raw, unpacked(raw, path.suffix) as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
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


def _is_unicode(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
