"""A store holds every document once, however it was made and whatever happened meanwhile."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from insertlm.core.errors import InsertlmError
from insertlm.core.files import cache_folder
from insertlm.data import sources, tokenising
from insertlm.data import store as module
from insertlm.data.store import Manifest, Options, Store, open_store
from insertlm.text.subwords import SubwordTokenizer, load_tokenizer, train_bpe

TOKENIZER = train_bpe(["the cat sat on the mat and the dog ran"] * 9, 270)
STORIES = [f"The cat number {i} sat on the mat" + " and ran" * (i % 5) for i in range(300)]
THREE = (("train", 0.8), ("validation", 0.1), ("test", 0.1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(folder: Path, name: str = "a.jsonl", stories: list[str] = STORIES) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    return str(path)


def read(store: Store, tokenizer: SubwordTokenizer = TOKENIZER) -> list[str]:
    ids, lengths = store.padded(np.arange(len(store)), 200)
    return [tokenizer.decode(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]


def manifest(cache: Path) -> Manifest:
    [place] = cache.glob("*/manifest.json")
    return msgspec.json.decode(place.read_bytes(), type=Manifest)


def test_documents_come_back_in_order(tmp_path: Path) -> None:
    found = open_store([written(tmp_path)], TOKENIZER, Options(block=200))
    assert read(found["all"]) == STORIES
    assert found["all"].tokens.dtype == np.uint16


def test_any_documents_in_any_order(tmp_path: Path) -> None:
    store = open_store([written(tmp_path)], TOKENIZER, Options(block=200))["all"]
    ids, lengths = store.padded(np.array([7, 3, 7]), 150)
    assert ids.shape == (3, 150)
    assert [TOKENIZER.decode(row[:n].tolist()) for row, n in zip(ids, lengths, strict=True)] == [
        STORIES[i] for i in (7, 3, 7)
    ]
    assert not ids[0, lengths[0] :].any()


def test_processes_make_the_same_store_as_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    alone = open_store([path], TOKENIZER, Options(block=200, shares=THREE))
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(tokenising, "_CHUNK", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 5000)
    monkeypatch.setattr(tokenising, "process_count", lambda: 2)
    together = open_store([path], TOKENIZER, Options(block=200, shares=THREE))
    for split in ("train", "validation", "test"):
        assert np.array_equal(alone[split].tokens, together[split].tokens)
        assert np.array_equal(alone[split].offsets, together[split].offsets)


def test_splits_share_no_text_and_miss_none(tmp_path: Path) -> None:
    found = open_store([written(tmp_path, stories=STORIES * 2)], TOKENIZER, Options(block=200, shares=THREE))
    parts = {split: read(store) for split, store in found.items()}
    assert sorted(text for part in parts.values() for text in part) == sorted(STORIES * 2)
    assert not set(parts["train"]) & set(parts["test"])
    assert not set(parts["train"]) & set(parts["validation"])
    assert 0.7 < len(parts["train"]) / 600 < 0.9


@pytest.mark.parametrize(("longer", "count"), [("truncate", 300), ("skip", 60)])
def test_long_documents_are_cut_or_left_out(tmp_path: Path, cache: Path, longer: str, count: int) -> None:
    block = max(len(TOKENIZER.encode(story)) for story in STORIES[::5])
    lines: list[str] = []
    options = Options(block=block, longer=longer)  # type: ignore[arg-type]
    store = open_store([written(tmp_path)], TOKENIZER, options, lines.append)["all"]
    assert len(store) == count
    assert np.diff(store.offsets).max() <= block
    assert manifest(cache).longer == 240
    assert lines[1].startswith(f"240 documents have more than {block} tokens")


def test_a_large_vocabulary_has_large_ids(tmp_path: Path) -> None:
    pieces = ["[UNK]", *(f"w{i}" for i in range(70_000))]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    store = open_store([written(tmp_path, stories=["w69999 w3"])], load_tokenizer(str(tmp_path)), Options(block=9))
    assert store["all"].tokens.dtype == np.uint32
    assert store["all"].tokens.tolist() == [70_000, 4]


# --- What is kept


def test_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    lines: list[str] = []
    first = open_store([path], TOKENIZER, Options(block=200), lines.append)
    assert lines == [f"tokenised 300 documents, {len(first['all'].tokens):,} tokens"]
    monkeypatch.setattr(module, "make_pieces", None)
    assert len(open_store([path], TOKENIZER, Options(block=200), lines.append)["all"]) == 300
    assert len(lines) == 1


def test_whatever_matters_makes_another_store(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path)
    for options in (Options(block=200), Options(block=100), Options(block=200, longer="skip")):
        open_store([path], TOKENIZER, options)
    open_store([path, path], TOKENIZER, Options(block=200))
    open_store([path], train_bpe(["dog"], 263), Options(block=200))
    written(tmp_path, stories=STORIES[:-1])
    open_store([path], TOKENIZER, Options(block=200))
    assert len(list(cache.glob("*/manifest.json"))) == 6


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("INSERTLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/insertlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/insertlm")


# --- Bad input


def test_bad_lines_are_counted_and_the_first_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a cat"}\n{\n{"text": "\xff"}\n{"story": 1}\n{"text": "a dog"}\n' + b"x\n" * 9)
    lines: list[str] = []
    store = open_store([str(path)], TOKENIZER, Options(block=9), lines.append)["all"]
    assert read(store) == ["a cat", "a dog"]
    assert manifest(cache).bad == 12
    assert lines[1] == "12 lines hold no document: " + "; ".join(
        f"{path} line {number} ({why})"
        for number, why in [
            (2, "broken JSON"),
            (3, "invalid UTF-8"),
            (4, 'no "text" in it'),
            (6, "broken JSON"),
            (7, "broken JSON"),
        ]
    )


def test_a_text_without_a_token_is_a_bad_line(tmp_path: Path, cache: Path) -> None:
    """BERT throws control characters away."""
    (tmp_path / "vocab.txt").write_text("[UNK]\ncat\n")
    path = written(tmp_path, stories=["cat", "\x00\x01", "cat cat"])
    store = open_store([path], load_tokenizer(str(tmp_path)), Options(block=9))["all"]
    assert np.diff(store.offsets).tolist() == [1, 2]
    assert manifest(cache).named == [f"{path} line 2 (no token in it)"]


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"", "no usable document; expected text"), (b"{\n", "no usable document: 1 lines hold no document")],
)
def test_a_corpus_without_a_document_is_refused(tmp_path: Path, cache: Path, content: bytes, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(InsertlmError) as caught:
            open_store([str(path)], TOKENIZER, Options(block=9))
        assert line in str(caught.value)
        assert not list(cache.glob("*/manifest.json"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InsertlmError, match="cannot write"):
        open_store([written(tmp_path)], TOKENIZER, Options(block=9))


@pytest.mark.parametrize("name", ["tokens-all.bin", "offsets-all.bin"])
def test_a_store_that_was_cut_is_named(tmp_path: Path, cache: Path, name: str) -> None:
    source = written(tmp_path)
    open_store([source], TOKENIZER, Options(block=200))
    [file] = cache.glob(f"*/{name}")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 2])
    with pytest.raises(InsertlmError, match=f"{name}: expected {size} bytes; remove {file.parent} to have"):
        open_store([source], TOKENIZER, Options(block=200))


def test_long_documents_are_split_into_passages_of_whole_sentences(tmp_path: Path) -> None:
    """None is lost, and all of a document go to its split."""
    long = [" ".join(f"Bird {i} saw mat {k}." for k in range(60)) for i in range(40)]
    options = Options(block=100, longer="split", shares=THREE)
    found = open_store([written(tmp_path, stories=[*long, *STORIES[:5]])], TOKENIZER, options)
    seen = list[str]()
    for store in found.values():
        texts = read(store)
        assert all(text in STORIES[:5] or text.startswith("Bird") for text in texts)
        numbers = {text.split()[1] for text in texts if text.startswith("Bird")}
        assert not numbers & {*seen}
        seen += numbers
        for number in numbers:
            mine = [text for text in texts if text.startswith(f"Bird {number} ")]
            assert " ".join(mine) == long[int(number)]
            assert len({len(text) for text in mine}) > 1
    assert len(seen) == 40


def test_excerpts_are_sentences_in_a_row_beside_their_documents(tmp_path: Path) -> None:
    stories = [f"The cat {i} sat. Then the dog {i} ran! The mat {i} was red. It was {i}." for i in range(120)]
    plain, more = (
        open_store([written(tmp_path, stories=stories)], TOKENIZER, Options(block=200, excerpts=share, shares=THREE))
        for share in (0.0, 0.5)
    )
    lengths = set()
    for split in plain:
        whole, everything = read(plain[split]), read(more[split])
        assert [text for text in everything if text in whole] == whole
        others = [text for text in everything if text not in whole]
        assert all(any(text in story for story in whole) for text in others)  # nothing comes from another split
        lengths |= {
            text.count("sat.") + text.count("ran!") + text.count("red.") + text.count("It was") for text in others
        }
    assert lengths == {1, 2, 3}
    added = sum(map(len, more.values())) - sum(map(len, plain.values()))
    assert 40 <= added <= 80


def test_a_single_sentence_has_no_excerpt(tmp_path: Path) -> None:
    found = open_store([written(tmp_path)], TOKENIZER, Options(block=200, excerpts=1.0))
    assert read(found["all"]) == STORIES


# --- On the way


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(tokenising, "_CHUNK", 5000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # no processes of a process's own


@pytest.mark.usefixtures("small")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = list[int]()
    for size in (5, 5, 30):  # the first one fills caches
        path = written(tmp_path, f"{len(peaks)}.jsonl", STORIES * size)
        tracemalloc.start()
        open_store([path], TOKENIZER, Options(block=200))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_shows_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    shown = list[int]()

    @contextmanager
    def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
        assert (name, total) == ("tokenising", Path(path).stat().st_size)
        yield shown.append

    path = written(tmp_path, stories=STORIES * 9)
    monkeypatch.setattr("insertlm.core.progress.progress_bar", bar)
    monkeypatch.setenv("RANK", str(rank))
    open_store([path], TOKENIZER, Options(block=200))
    if rank:
        assert not shown
    else:
        assert shown == sorted(shown)
        assert (len(set(shown)) > 4, shown[-1]) == (True, Path(path).stat().st_size)
