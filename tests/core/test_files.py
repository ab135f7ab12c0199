"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically


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


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    file.parent.mkdir()
    link.symlink_to(file)
    for data in (b"new", b"newer"):  # also where there is nothing yet
        check_writable(link)
        write_atomically(link, data)
        assert link.is_symlink()
        assert file.read_bytes() == data
    assert [each.name for each in file.parent.iterdir()] == ["file"]
    link.unlink()
    link.symlink_to(tmp_path / "none" / "file")
    with pytest.raises(InsertlmError, match=f"^cannot write {link}: there is no folder {tmp_path / 'none'}$"):
        check_writable(link)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_atomically(pipe, b"data")
        assert os.read(reader, 10) == b"data"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_is_no_file_and_cannot_be_written_to_is_named_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(InsertlmError, match=r"^cannot write socket: No such device or address$"):
            write_atomically(Path("socket"), b"data")
    assert Path("socket").is_socket()
    assert list(tmp_path.iterdir()) == [tmp_path / "socket"]
