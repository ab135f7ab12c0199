"""Texts from files, and what is wrong with a file in one line."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
from pathlib import Path

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import read_texts, stem

TEXTS = ["Once upon a time,", "", "“Zwei”\x0b\x85\u2028drei"]
AS_TXT = "\n".join([*TEXTS, ""]).encode()
AS_JSONL = "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in TEXTS).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", AS_TXT),
        ("a.txt", AS_TXT[:-1]),
        ("a.txt", codecs.BOM_UTF8 + AS_TXT),
        ("a.jsonl", codecs.BOM_UTF8 + AS_JSONL),
        ("a.txt", AS_TXT.replace(b"\n", b"\r\n")),
        ("a.jsonl", AS_JSONL),
        ("a.txt.xz", lzma.compress(AS_TXT)),
        ("a.jsonl.xz", lzma.compress(AS_JSONL)),
        ("a.b.jsonl.gz", gzip.compress(AS_JSONL)),
    ],
)
def test_every_kind_of_file_holds_the_same_texts(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert read_texts(path) == TEXTS
    assert read_texts(path, count=1) == TEXTS[:1]
    assert stem(path) == "a"


def test_another_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "output": "y"}\n', encoding="utf-8")
    assert read_texts(path, "output") == ["y"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"x", r"expected a .txt or .jsonl file, plain or compressed \(.gz, .xz, .zst\)"),
        ("a.txt", b"", "is empty; expected a text per line"),
        ("a.txt", b"good\n\xff\xfe\n", "line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\nx\n', "line 2: expected a JSON object, got 'x'"),
        ("a.jsonl", b"[1]\n", r"line 1: expected a JSON object, got \[1\]"),
        ("a.jsonl", b'{"story": "x"}\n', "line 1: expected a text under 'text', got {'story'"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: expected a text under 'text'"),
        (
            "a.jsonl",
            b'{"text": "x \\ud83c\\udf89"}\n{"text": "x \\uD800 y"}\n',
            "line 2: not Unicode; expected no half",
        ),
        ("a.txt.xz", b"plain", "cannot be unpacked"),
        ("a.txt.xz", lzma.compress(b"x" * 999)[:-20], "cannot be unpacked"),
        ("a.txt.gz", gzip.compress(b"x" * 999)[:-9], "cannot be unpacked"),
    ],
)
def test_bad_files_in_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InsertlmError, match=message):
        read_texts(tmp_path / name)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InsertlmError, match="no such file"):
        read_texts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InsertlmError, match="cannot be read: Is a directory"):
        read_texts(tmp_path / "folder.txt")
