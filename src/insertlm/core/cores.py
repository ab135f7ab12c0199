"""How many processor cores there are."""

from __future__ import annotations

import os

__all__ = ["cores"]


def cores() -> int:
    """Cores this process may use; all of the machine where the system does not tell, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
