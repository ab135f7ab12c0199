"""How text files are compressed, by their suffix."""

from __future__ import annotations

import gzip
import lzma
import sys
from collections.abc import Callable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["PACKERS"]

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}
