"""SHA256SUMS: the hash of every file of a released model, in the form that `sha256sum --check` reads.

Written where a model is exported or released, and checked where it is loaded: by `read_weights`, and by the code that
goes with an export. Hashing 90 MB takes less than a tenth of a second. A folder without the file is read as before, and
so is a file that is not named in it, such as README.md, which its owner may edit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["SUMS", "check_sums", "sums_of"]

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\]+)")


def sums_of(contents: Mapping[str, bytes]) -> bytes:
    """The file for a folder with these contents, by name."""
    return "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in sorted(contents)).encode()


def check_sums(folder: Path) -> None:
    """Refuse a folder in which a file is not the one that was released."""
    place = folder / SUMS
    if not place.is_file():
        return
    for name, expected in _read(place).items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise InsertlmError(f"{folder / name}: missing; {place} names it") from error
        except OSError as error:
            raise InsertlmError(f"{folder / name}: cannot be read: {reason(error)}") from error
        if found != expected:
            raise InsertlmError(
                f"{folder / name}: altered: its SHA-256 is {found}, expected {expected}; if you changed it yourself, "
                f"remove its line from {place}"
            )


def _read(place: Path) -> dict[str, str]:
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise InsertlmError(f"{place}: cannot be read: {why}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InsertlmError(f"{place}, line {number}: expected a SHA-256 and the name of a file beside it")
        found[match[2]] = match[1]
    return found
