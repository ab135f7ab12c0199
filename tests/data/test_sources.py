"""Documents come out of files as they went in, and what is none is said to be none."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import os
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packers import PACKERS

from insertlm.core.errors import InsertlmError
from insertlm.data import sources
from insertlm.data.sources import Document, Separator, TextSource, source_of, text_of, texts
from insertlm.data.textfiles import unpacked


def documents(path: Path, separator: Separator = "line") -> list[Document]:
    return list(sources.documents(source_of(str(path), separator)))


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_line_is_a_document_however_it_is_packed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix]("one é\r\n\n  \ntwo".encode()))
    assert documents(path) == [Document(1, "one é".encode()), Document(4, b"two")]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](codecs.BOM_UTF8 + b"one\ntwo \xef\xbb\xbf\n"))
    assert documents(path) == [Document(1, b"one"), Document(2, b"two \xef\xbb\xbf")]


def test_what_repeats_itself_is_unpacked_as_fast_as_the_rest() -> None:
    packed = io.BytesIO(PACKERS[".zst"](b"the cat sat on the mat\n" * 2_000_000))
    start = time.process_time()
    assert sum(1 for _ in unpacked(packed, ".zst")) == 2_000_000
    assert time.process_time() - start < 10  # a fraction of a second; 42 where the rest is copied at every read


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
        ("a.csv", b"", "expected a .txt or .jsonl file, plain or compressed (.gz, .xz, .zst), or hub:NAME:SPLIT"),
        ("a.gz", b"", "expected a .txt or .jsonl file"),
        ("none.txt", None, "no such file; expected a .txt or .jsonl file"),
        ("a.txt.gz", b"not packed", "cannot be"),
        ("b.txt.gz", gzip.compress(b"many words\n" * 99)[:-20], "cannot be unpacked"),
        ("a.txt.xz", b"not packed", "cannot be unpacked"),
        ("b.txt.xz", lzma.compress(b"many words\n" * 99)[:-20], "cannot be unpacked"),
        ("a.txt.zst", b"not packed", "cannot be unpacked"),
        ("b.txt.zst", PACKERS[".zst"](b"many words\n" * 99)[:-5], "cannot be unpacked: Compressed file ended before"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InsertlmError) as caught:
        documents(tmp_path / name)
    assert line in str(caught.value)
    assert name in str(caught.value)


# --- Pieces


def pieces(source: TextSource) -> list[list[Document]]:
    """Read one after the other."""
    found = list[list[Document]]()
    with source.opened(0) as reader:
        over = False
        while not over:
            found.append(list(reader.read(len(found))))
            over = reader.over
        assert not list(reader.read(len(found)))
    return found


LINES = st.lists(st.sampled_from([b"", b" ", b"a", b"bb ", b"a long line of many words", b"x" * 70]), max_size=30)


@given(LINES, st.integers(1, 60), st.sampled_from(["line", "blank"]), st.sampled_from(sorted(PACKERS)), st.booleans())
@settings(max_examples=60)
def test_pieces_are_the_whole_however_they_are_reached(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    size: int,
    separator: Separator,
    suffix: str,
    end: bool,
) -> None:
    path = tmp_path_factory.mktemp("pieces") / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](b"\n".join(lines) + b"\n" * end))
    source = source_of(str(path), separator)
    whole = [document.data for document in documents(path, separator)]
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(sources, "PIECE_BYTES", size)
        found = pieces(source)
        assert [document.data for piece in found for document in piece] == whole
        for stride in (2, 3):
            with source.opened(0) as reader:
                for number in range(stride - 1, len(found), stride):
                    assert list(reader.read(number)) == found[number]
                    assert reader.over == (number == len(found) - 1)
        with source.opened(0) as reader:
            assert not list(reader.read(len(found) + 2))
            assert reader.over


def test_lines_of_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a bad line can be named by its number in the file."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%d\n" % number + b"\n" * (number % 3) for number in range(1, 200)))
    whole, before, numbers = documents(path), 0, []
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    with source_of(str(path)).opened(0) as reader:
        for piece in count():
            numbers += [before + document.line for document in reader.read(piece)]
            before += reader.lines
            if reader.over:
                break
    assert numbers == [document.line for document in whole]
    assert before == len(path.read_bytes().splitlines())
