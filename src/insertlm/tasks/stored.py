"""Arrays that take minutes to make, kept in the user's cache folder."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from insertlm.core.errors import InsertlmError
from insertlm.core.files import cache_folder, write_atomically

__all__ = ["Arrays", "stored"]

Arrays = dict[str, NDArray[np.uint8]]


def stored(name: str, enough: Callable[[Arrays], bool], make: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under this name if they are `enough`, or else new ones, which are kept from then on.

    The name must contain everything that the arrays depend on.
    """
    path = cache_folder() / f"{name}.npz"
    found = _read(path)
    if found is not None and enough(found):
        return found
    arrays = make()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    with suppress(InsertlmError, OSError):  # a cache that cannot be written costs time, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())
    return arrays


def _read(path: Path) -> Arrays | None:
    """None if there is no such file or it is damaged. Every array has a checksum, so what can be read is right."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
