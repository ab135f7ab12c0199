"""Results that come one by one, kept in a JSONL file so that no result is computed twice.

The key of a result is a hash of everything it depends on. So one file may serve many calls in any order, and a changed
setting never finds an old result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, writing

__all__ = ["Journal", "key_of"]


def key_of(*parts: Any) -> str:
    """A hash of any JSON values, the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Journal:
    """A dictionary from keys to records. A killed process loses at most the line that it was writing. Without a path it
    is kept in memory. Use it in a `with`; the file is created when the first new record is added. Several processes may
    add to one file at once: none sees what the others add meanwhile, but nothing is lost."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._records: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._records[key]

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep a record, and flush its line so that a kill does not lose it."""
        self._records[key] = dict(record)
        if self._path is None:
            return
        with writing(self._path):
            # Opened late, so that a command that fails before its first result leaves no file behind.
            if self._file is None:
                self._file = self._path.open("ab")
                data = self._path.read_bytes()  # as it is now: others may have added to it
                if (end := _whole_lines(data)) < len(data):
                    self._file.truncate(end)  # drops a line that a kill cut short
            self._file.write(json.dumps({"key": key, **record}, allow_nan=False).encode() + b"\n")
            self._file.flush()  # to the system: that survives our death, though not a power cut

    def _read(self, path: Path) -> None:
        """Only the last line can be cut short; it then has no line break."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error
        for number, line in enumerate(data[: _whole_lines(data)].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._records[record.pop("key")] = record
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise InsertlmError(
                    f"{path}, line {number}: expected a result of an earlier call; move the file away to start again"
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(data: bytes) -> int:
    """Where the last whole line ends."""
    return data.rfind(b"\n") + 1
