"""How much a request may ask for, and how many may run. Quick to import, because the command line lists the limits."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Limits"]


def _limit(default: int, about: str) -> int:
    value: int = field(default=default, metadata={"about": about})
    return value


@dataclass(frozen=True)
class Limits:
    """Each is an option of `insertlm serve`: --max-bytes and so on."""

    bytes: int = _limit(1 << 20, "bytes of a request")
    characters: int = _limit(20_000, "characters of a text")
    blanks: int = _limit(64, "blanks of a text")
    tokens: int = _limit(512, "tokens written for a text")
    samples: int = _limit(16, "texts of one request")
    words: int = _limit(32, "banned words of a request, and required ones")
    choices: int = _limit(64, "choices of a text, those of all its blanks together")
    concurrent: int = _limit(32, "texts that a model writes at once")
    queue: int = _limit(64, "texts that may wait in the queue beside those")
    seconds: float = _limit(120, "seconds from the arrival of a request to the end of its answer")
