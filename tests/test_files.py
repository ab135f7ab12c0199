"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from insertlm.errors import InsertlmError
from insertlm.files import write_atomically


def test_write_atomically_replaces(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for data in (b"old", b"new and longer", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.yaml"]


def test_write_atomically_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    write_atomically(path, b"old")

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InsertlmError, match=f"^cannot write {path}: No space left on device$"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_disk_has_the_file_before_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda handle: folders.append(stat.S_ISDIR(os.fstat(handle).st_mode)))
    write_atomically(tmp_path / "recipe.yaml", b"new")
    assert folders == [False, True]


def test_two_processes_do_not_share_a_file_that_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda _: seen.update(path.name for path in tmp_path.iterdir()))
    for number in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        write_atomically(tmp_path / "recipe.yaml", b"new")
    assert len(seen - {"recipe.yaml"}) == 2


def test_write_atomically_into_a_missing_folder(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "result.json"
    with pytest.raises(InsertlmError, match=f"^cannot write {path}: No such file or directory$"):
        write_atomically(path, b"")
