"""Documents come out of files as they went in, and what is none is said to be none."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from insertlm.corpus.sources import Document, Separator, source_of, text_of, texts
from insertlm.errors import InsertlmError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def documents(path: Path, separator: Separator = "line") -> list[Document]:
    return [document for document, _ in source_of(str(path), separator).documents()]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_line_is_a_document_however_it_is_packed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix]("one é\r\n\n  \ntwo".encode()))
    assert documents(path) == [Document(1, "one é".encode()), Document(4, b"two")]


def test_packed_files_may_be_joined(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(pack(b"one\n") + pack(b"two\n" * 50_000))
        assert len(documents(path)) == 50_001


def test_blank_lines_may_separate_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\nmore\n\n \ntwo\n")
    assert documents(path, "blank") == [Document(3, b"one\nmore"), Document(7, b"two")]


def test_jsonl_has_a_document_a_line_whatever_separates_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "a\\nb", "more": [1]}\n')
    assert [text_of(data, "jsonl") for _, data in documents(path, "blank")] == ["one", "a\nb"]
    assert list(texts([source_of(str(path))])) == ["one", "a\nb"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1), max_size=5))
@settings(max_examples=20)
def test_all_lines_are_found(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    # Blank is what bytes call so; a line of other white space is a document, which text_of then refuses.
    assert [data.decode() for _, data in documents(path)] == [line for line in lines if not line.encode().isspace()]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"{", "broken JSON"),
        (b'{"text": "a"} x', "broken JSON"),
        (b'{"text": 3}', 'no "text" in it'),
        (b"[]", 'no "text" in it'),
        (b'{"story": "a"}', 'no "text" in it'),
        (b'{"text": " \\n"}', "empty text"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
    ],
)
def test_what_is_wrong_with_a_line_of_json(data: bytes, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        text_of(data, "jsonl")


@pytest.mark.parametrize(("data", "line"), [(b"a\xffb", "invalid UTF-8"), ("\u2003".encode(), "empty text")])
def test_what_is_wrong_with_a_line_of_text(data: bytes, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        text_of(data, "txt")


def test_a_fingerprint_knows_name_content_and_time_but_not_the_folder(tmp_path: Path) -> None:
    def fingerprint(folder: str, name: str, content: bytes, when: int = 1, separator: Separator = "line") -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (when, when))
        return source_of(str(path), separator).fingerprint

    same = fingerprint("a", "x.txt", b"one\n")
    assert fingerprint("b", "x.txt", b"one\n") == same
    others = [
        fingerprint("a", "y.txt", b"one\n"),
        fingerprint("a", "x.txt", b"two\n"),
        fingerprint("a", "x.txt", b"one\n", when=2),
        fingerprint("a", "x.txt", b"one\n", separator="blank"),
    ]
    assert len({same, *others}) == 5


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", b"", "cannot tell what it holds; expected .txt or .jsonl"),
        ("a.gz", b"", "cannot tell what it holds"),
        ("none.txt", None, "no such file; expected text to learn from"),
        ("a.txt.gz", b"not packed", "cannot be"),
        ("b.txt.gz", gzip.compress(b"many words\n" * 99)[:-20], "cannot be unpacked"),
        ("a.txt.xz", b"not packed", "cannot be unpacked"),
        ("b.txt.xz", lzma.compress(b"many words\n" * 99)[:-20], "cannot be unpacked"),
        ("a.txt.zst", b"not packed", "cannot be unpacked"),
        ("b.txt.zst", PACKERS[".zst"](b"many words\n" * 99)[:-5], "cannot be unpacked: it ends in the middle"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InsertlmError) as caught:
        documents(tmp_path / name)
    assert line in str(caught.value)
    assert name in str(caught.value)


# --- The hub


def test_a_data_set_of_the_hub_s_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is the data set that needs no connection; the code is the same."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"text": "one"}\n{"text": "two é"}\n')
    source = source_of(f"hub:{data}:train")
    assert [(document.data.decode(), done) for document, done in source.documents()] == [("one", 1), ("two é", 2)]
    assert source.size is None
    with pytest.raises(InsertlmError, match="cannot be read from the hub"):
        list(source_of(f"hub:{data}:validation").documents())


def test_a_revision_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def load(name: str, **how: object) -> list[dict[str, object]]:
        asked.append((name, how))
        return [{"text": "one"}, {"text": None}]

    monkeypatch.setattr("datasets.load_dataset", load)
    found = [document.data for document, _ in source_of("hub:owner/set@refs/x:test").documents()]
    assert asked == [("owner/set", {"split": "test", "streaming": True, "revision": "refs/x"})]
    assert found == [b"one", b""]


def test_a_name_without_a_split_is_refused() -> None:
    with pytest.raises(InsertlmError, match="expected hub:NAME:SPLIT"):
        source_of("hub:roneneldan/TinyStories")
