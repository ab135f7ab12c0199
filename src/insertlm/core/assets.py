"""The models that come with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled", "find_bundled", "is_bundled"]

_ASSETS = Path(__file__).parents[1] / "assets"


def bundled() -> list[str]:
    """Their names."""
    return sorted(path.parent.name for path in _ASSETS.glob("*/recipe.yaml"))


def find_bundled(name: str) -> Path | None:
    """The folder of the bundled model of that name, if there is one."""
    return _ASSETS / name if name in bundled() else None


def is_bundled(folder: Path) -> bool:
    return folder.parent == _ASSETS
