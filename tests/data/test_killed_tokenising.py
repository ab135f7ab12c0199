"""A tokenisation that is killed, or fails, goes on where it was, and ends with the same bytes as an undisturbed one."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import msgspec
import pytest
from killing import Moment, child, kill_until_done, slow_down, stored
from packers import PACKERS

from insertlm.core.errors import InsertlmError
from insertlm.core.files import write_durably
from insertlm.data import sources as reading
from insertlm.data import store, tokenising
from insertlm.data.sources import Document
from insertlm.data.store import Manifest, Options, open_store
from insertlm.text.subwords import train_bpe

TOKENIZER = train_bpe(["the cat sat on the mat and the dog ran"] * 9, 270)
OPTIONS = Options(block=60, longer="skip", excerpts=0.5, shares=(("train", 0.8), ("validation", 0.1), ("test", 0.1)))
BAD = {37: b"{", 38: b'{"text": "\xff"}', 160: b'{"text": ""}', 277: b"x", 278: b"y", 390: b"z"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # no processes of a process's own
    monkeypatch.setattr(reading, "PIECE_BYTES", 3000)
    monkeypatch.setattr(tokenising, "_CHUNK", 1000)
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Four files, one of them twice, with bad lines in several pieces of each."""
    stories = [json.dumps({"text": f"The cat {i} sat." + " Then it ran." * (i % 9)}).encode() for i in range(400)]
    data = b"".join(BAD.get(i, story) + b"\n" for i, story in enumerate(stories))
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d.txt.zst"]
    for name in names:
        (tmp_path / name).write_bytes(PACKERS[Path(name).suffix.replace(".jsonl", "")](data))
    return [str(tmp_path / name) for name in [*names, "a.jsonl"]]


@pytest.fixture
def whole(sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The store that nobody has disturbed."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("INSERTLM_CACHE", str(tmp_path / "whole"))
        open_store(sources, TOKENIZER, OPTIONS)
    return stored(tmp_path / "whole")


def work(sources: list[str], slow: float = 0.0) -> None:
    slow_down(slow)
    open_store(sources, TOKENIZER, OPTIONS)


def made(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.glob(".*/*.piece")}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("moment", "longest"), [("call", 150), ("time", 0.1)])
def test_killed_at_random_moments_it_is_the_same_store(
    sources: list[str], whole: dict[str, bytes], cache: Path, moment: Moment, longest: float, seed: int
) -> None:
    kills = kill_until_done(partial(work, sources, 0.003), moment, longest, seed)
    assert kills >= 5
    assert stored(cache) == whole
    assert [path for path in cache.iterdir() if not (path / "manifest.json").is_file()] == []


def test_bad_lines_are_counted_and_named_across_a_kill(sources: list[str], cache: Path) -> None:
    process = child(partial(work, sources), calls=100)
    process.join(60)
    assert 3 < len(made(cache)) < 30
    open_store(sources, TOKENIZER, OPTIONS)
    manifest = msgspec.json.decode(stored(cache)["manifest.json"], type=Manifest)
    assert manifest.bad == 4 * len(BAD) + 1  # of a .txt file only one has no text
    whys = ["broken JSON", "invalid UTF-8", "empty text", "broken JSON", "broken JSON"]
    assert manifest.named == [
        f"{sources[0]} line {line + 1} ({why})" for line, why in zip(sorted(BAD), whys, strict=False)
    ]


def test_what_is_there_is_not_made_again(sources: list[str], whole: dict[str, bytes], cache: Path) -> None:
    for calls in (100, 110, 120):
        before = made(cache)
        process = child(partial(work, sources), calls)
        process.join(60)
        assert before.items() <= made(cache).items()
    assert len(made(cache)) > 10
    process = child(partial(work, sources))
    process.join(60)
    assert stored(cache) == whole


def test_killed_while_pieces_are_joined(
    sources: list[str], whole: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call from the last piece on."""
    with monkeypatch.context() as never_joining:
        never_joining.setattr(store, "_join", lambda *what: os._exit(1))
        process = child(partial(work, sources))
        process.join(60)
    pieces, calls = made(cache), 0
    assert len(pieces) > 30
    while not list(cache.glob("*/manifest.json")):
        assert made(cache) == pieces
        process = child(partial(work, sources), calls)
        process.join(60)
        calls += 1
    assert calls > 40
    assert stored(cache) == whole


def test_several_at_once_share_the_work(sources: list[str], whole: dict[str, bytes], cache: Path) -> None:
    """Also when one of them is killed, which another one then makes up for."""
    together = [child(partial(work, sources, 0.01)) for _ in range(3)]
    while len(made(cache)) < 5:
        time.sleep(0.005)
    together[0].kill()
    for process in together:
        process.join(60)
    assert [process.exitcode for process in together] == [-9, 0, 0]
    assert stored(cache) == whole
    assert not list(cache.glob(".*"))


def test_a_full_disk_is_one_line_and_then_it_goes_on(
    sources: list[str], whole: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = write_durably, 7

    def full(path: Path, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        plain(path, data)

    monkeypatch.setattr(tokenising, "write_durably", full)
    with pytest.raises(InsertlmError, match=r"cannot write .*: No space left on device$"):
        open_store(sources, TOKENIZER, OPTIONS)
    assert len(made(cache)) == 7
    assert not list(cache.glob(".*/*.tmp"))
    left = 1 << 30
    open_store(sources, TOKENIZER, OPTIONS)
    assert stored(cache) == whole


def test_a_damaged_piece_is_found_and_made_anew(sources: list[str], whole: dict[str, bytes], cache: Path) -> None:
    process = child(partial(work, sources), calls=100)
    process.join(60)
    damaged = sorted(cache.glob(".*/*.piece"))[1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(
        InsertlmError, match=r"00000-000001-\d+-0.piece was damaged on the disk and has been removed; start again"
    ):
        open_store(sources, TOKENIZER, OPTIONS)
    open_store(sources, TOKENIZER, OPTIONS)
    assert stored(cache) == whole


def test_a_removed_cache_is_no_trouble(sources: list[str], whole: dict[str, bytes], cache: Path) -> None:
    """Whoever is still at work begins anew."""
    process = child(partial(work, sources, 0.004))
    while len(made(cache)) < 3:
        time.sleep(0.005)
    [folder] = cache.glob(".*")
    folder.rename(cache / "elsewhere")
    process.join(60)
    assert process.exitcode == 0
    assert stored(cache) == whole


def test_a_killed_process_of_the_pool_is_one_line(
    sources: list[str], whole: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it left is made by the next start."""
    plain = tokenising._chunks

    def killing(documents: Iterable[Document]) -> Iterator[list[Document]]:
        for chunk in plain(documents):
            yield chunk
            for worker in active_children():
                worker.kill()

    with monkeypatch.context() as deadly:
        deadly.setattr(tokenising, "process_count", lambda: 2)
        deadly.setattr(tokenising, "_chunks", killing)
        with pytest.raises(InsertlmError, match="a process that tokenises was killed; is there enough memory"):
            open_store(sources, TOKENIZER, OPTIONS)
    open_store(sources, TOKENIZER, OPTIONS)
    assert stored(cache) == whole


def test_the_processes_of_a_killed_one_end_too(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*what: Any) -> None:
        """Where the first piece would be written."""
        (tmp_path / "tmp").write_text(" ".join(str(worker.pid) for worker in active_children()))
        (tmp_path / "tmp").rename(tmp_path / "pids")
        time.sleep(60)

    monkeypatch.setattr(tokenising.PieceFolder, "write", stop)
    monkeypatch.setattr(tokenising, "process_count", lambda: 2)
    process = child(partial(work, sources))
    patience = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < patience
        time.sleep(0.01)
    process.kill()
    process.join()
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2
    while any(map(alive, workers)):
        assert time.monotonic() < patience, "processes are left behind"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
