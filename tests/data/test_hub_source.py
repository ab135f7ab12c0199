"""Data sets of the Hugging Face library, streamed. A folder is one that needs no connection; the code is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from killing import Moment, child, kill_until_done, slow_down, stored

from insertlm.core.errors import InsertlmError
from insertlm.data import sources, tokenising
from insertlm.data.sources import Document, documents, source_of
from insertlm.data.store import Manifest, Options, open_store
from insertlm.data.tokenising import PieceFolder
from insertlm.text.subwords import train_bpe

TOKENIZER = train_bpe(["the cat sat on the mat and the dog ran"] * 9, 270)
ROWS = [f"The cat number {i} sat on the mat" + " and ran" * (i % 5) if i % 40 else "" for i in range(400)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "PIECE_ROWS", 45)
    monkeypatch.setattr(tokenising, "_CHUNK", 500)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # no processes of a process's own
    return tmp_path / "cache"


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Three shards, of different sizes."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shard, (first, last) in enumerate([(0, 200), (200, 220), (220, 400)]):
        lines = [json.dumps({"text": text, "n": 1}) + "\n" for text in ROWS[first:last]]
        (folder / f"train-{shard}.jsonl").write_text("".join(lines))
    return f"hub:{folder}:train"


def tokenised(name: str, cache: Path) -> dict[str, bytes]:
    """What a store holds that nobody has disturbed."""
    before, os.environ["INSERTLM_CACHE"] = os.environ["INSERTLM_CACHE"], str(cache)
    open_store([name], TOKENIZER, Options(block=200))
    os.environ["INSERTLM_CACHE"] = before
    return stored(cache)


def test_shards_are_parts_and_in_order_the_whole(name: str) -> None:
    source = source_of(name)
    assert (source.parts, source.size) == (3, None)
    assert [document.data.decode() for document in documents(source)] == ROWS
    found = list[str]()
    for part in range(3):
        with source.opened(part) as reader:
            for piece in count():
                found += [document.data.decode() for document in reader.read(piece)]
                if reader.over:
                    break
    assert found == ROWS


def test_any_piece_can_be_read_first_and_later_ones_after_it(name: str) -> None:
    source = source_of(name)
    pieces = list[list[Document]]()
    with source.opened(0) as reader:
        while not reader.over:
            pieces.append(list(reader.read(len(pieces))))
    assert [len(piece) for piece in pieces] == [45, 45, 45, 45, 20]
    for number in range(len(pieces)):
        with source.opened(0) as reader:
            for later in range(number, len(pieces), 2):
                assert list(reader.read(later)) == pieces[later]
                assert reader.place == min(45 * (later + 1), 200)
    with source.opened(0) as reader:
        assert not list(reader.read(len(pieces)))
        assert reader.over


def test_a_shard_may_end_with_a_whole_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_ROWS", 20)
    assert [document.data.decode() for document in documents(source_of(name))] == ROWS
    assert len(open_store([name], TOKENIZER, Options(block=200))["all"]) == 390


def test_a_store_has_the_rows_and_names_the_empty_ones(name: str, cache: Path) -> None:
    store = open_store([name], TOKENIZER, Options(block=200))["all"]
    assert len(store) == 390
    manifest = msgspec.json.decode(stored(cache)["manifest.json"], type=Manifest)
    assert manifest.bad == 10
    assert manifest.named == [f"{name} line {line} (empty text)" for line in (1, 41, 81, 121, 161)]


@pytest.mark.parametrize("moment", ["call", "time"])
def test_killed_and_resumed_it_is_the_same_store(name: str, cache: Path, tmp_path: Path, moment: Moment) -> None:
    whole = tokenised(name, tmp_path / "whole")

    def work() -> None:
        slow_down(0.03)
        open_store([name], TOKENIZER, Options(block=200))

    assert kill_until_done(work, moment, {"call": 100, "time": 0.3}[moment]) >= 3
    assert stored(cache) == whole
    assert not list(cache.glob(".*"))


def test_several_at_once_share_shards_and_what_is_in_them(name: str, cache: Path, tmp_path: Path) -> None:
    """There are more processes than shards."""
    whole = tokenised(name, tmp_path / "whole")
    made = tmp_path / "made"

    def work() -> None:
        slow_down(0.02)
        plain = PieceFolder.write

        def write(self: PieceFolder, part: int, number: int, *what: Any) -> None:
            plain(self, part, number, *what)
            with made.open("a") as file:
                file.write(f"{os.getpid()} {part}-{number}\n")

        PieceFolder.write = write  # type: ignore[assignment, method-assign]
        open_store([name], TOKENIZER, Options(block=200))

    together = [child(work) for _ in range(4)]
    for process in together:
        process.join(60)
    assert [process.exitcode for process in together] == [0] * 4
    assert stored(cache) == whole
    shared = [line.split() for line in made.read_text().splitlines()]
    assert len({pid for pid, _ in shared}) > 1
    assert len({piece for _, piece in shared}) == len(shared) > 9  # none is made twice


def test_a_lost_connection_is_one_line_and_then_it_goes_on(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokenised(name, tmp_path / "whole")
    from datasets import IterableDataset

    plain = IterableDataset.iter

    def breaking(rows: Any, batch_size: int) -> Iterator[Any]:
        for number, batch in enumerate(plain(rows, batch_size)):
            if number == 150:
                raise ConnectionError("the line is dead")
            yield batch

    monkeypatch.setattr(sources, "_BATCH", 1)
    monkeypatch.setattr(IterableDataset, "iter", breaking)
    with pytest.raises(InsertlmError, match=r"hub:.*train: cannot be read from the hub: the line is dead"):
        open_store([name], TOKENIZER, Options(block=200))
    made = {path.name: path.stat().st_mtime_ns for path in cache.glob(".*/*.piece")}
    assert made
    with pytest.raises(InsertlmError, match="the line is dead"):  # later: what is there is not read again
        open_store([name], TOKENIZER, Options(block=200))
    monkeypatch.setattr(IterableDataset, "iter", plain)
    assert made.items() < {path.name: path.stat().st_mtime_ns for path in cache.glob(".*/*.piece")}.items()
    open_store([name], TOKENIZER, Options(block=200))
    assert stored(cache) == whole


def test_pieces_of_a_data_set_that_has_changed_are_of_no_use(name: str, cache: Path, tmp_path: Path) -> None:
    work = partial(open_store, [name], TOKENIZER, Options(block=200))
    started = child(work, calls=150)
    started.join(60)
    assert list(cache.glob(".*/*.piece"))
    for path in (tmp_path / "data").iterdir():
        path.write_text(path.read_text().replace("cat", "dog"))
    assert work()["all"].tokens.tobytes() == tokenised(name, tmp_path / "whole")["tokens-all.bin"]
    assert not list(cache.glob(".*"))


def test_what_is_not_there_is_one_line(name: str) -> None:
    for wrong in (name.replace(":train", ":validation"), "hub:/nowhere:train"):
        with pytest.raises(InsertlmError, match="cannot be read from the hub"):
            open_store([wrong], TOKENIZER, Options(block=200))


def test_a_revision_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, dict[str, object]]]()

    def load(name: str, **how: object) -> None:
        asked.append((name, how))
        raise ValueError("nobody is there")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, **how: None)  # the hub answers
    monkeypatch.setattr("datasets.load_dataset_builder", load)
    with pytest.raises(InsertlmError, match="nobody is there"):
        list(documents(source_of("hub:owner/set@refs/x:test")))
    assert asked == [("owner/set", {"revision": "refs/x"})]


def test_a_name_without_a_split_is_refused() -> None:
    with pytest.raises(InsertlmError, match="expected hub:NAME:SPLIT"):
        source_of("hub:roneneldan/TinyStories")


def test_a_hub_that_cannot_be_reached_is_one_line_and_soon(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "insertlm", "data", "tokenizer", "hub:nobody/nothing:train", "--out", "t.json"]
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    # The library alone would print a line for each of its six attempts, which take 23 seconds.
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("insertlm: hub:nobody/nothing:train: cannot be read from the hub: ")
