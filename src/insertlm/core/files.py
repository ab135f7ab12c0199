"""Writes files so that they are either the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from insertlm.core.errors import InsertlmError

__all__ = [
    "cache_folder",
    "check_writable",
    "place_and_reason",
    "reason",
    "sync",
    "write_atomically",
    "write_durably",
    "writing",
]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path`: a reader, or a run after a crash, sees all of the old content or all of the new.

    A link stays a link, and its target is replaced. Devices and pipes cannot be replaced, so they are written to."""
    if _is_special(path):
        with writing(path):
            path.write_bytes(data)
        return
    place = _place(path)
    # The process id keeps two processes that write the same file from sharing a half-written one.
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            write_durably(temporary, data)
            temporary.replace(place)
            sync(place.parent)
    finally:
        with suppress(OSError):  # a failure to clean up must not hide the first one
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the system inside the block becomes one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise InsertlmError(f"cannot write {path}: {reason(error)}") from error


def cache_folder() -> Path:
    """$INSERTLM_CACHE, or `insertlm` in the user's cache folder."""
    if place := os.environ.get("INSERTLM_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "insertlm"


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written. Called before the work, so that it is not lost at the end."""
    if path.is_dir():
        raise InsertlmError(f"cannot write {path}: it is a folder")
    if _is_special(path):
        return
    # The folder counts, not the file: a new file is renamed into its place.
    folder = _place(path).parent
    if not folder.is_dir():
        raise InsertlmError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InsertlmError(f"cannot write {path}: nothing may be written to the folder {folder}")


def _is_special(path: Path) -> bool:
    """Whether it is a device, a pipe or the like."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _place(path: Path) -> Path:
    """The target of a link; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def write_durably(path: Path, data: bytes) -> None:
    """Write, and wait until the disk has it."""
    # A plain write can be lost in a crash, or reach the disk after a later rename.
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def place_and_reason(error: OSError) -> str:
    """`data.txt: Permission denied`, or the reason alone where no file is known."""
    return f"{error.filename}: {reason(error)}" if error.filename else reason(error)


def reason(error: OSError) -> str:
    """`No space left on device`, without the error number and the file name, often a temporary one, of str(error)."""
    return error.strerror or str(error)
