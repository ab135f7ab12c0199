"""Tokenising that is killed again and again, in forked processes, until it is done."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from insertlm.data.tokenising import Chunk, Encoder

__all__ = ["Moment", "child", "kill_until_done", "slow_down", "stored"]

Moment = Literal["call", "time"]

_FORK = get_context("fork")
_CALLS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "fcntl.lockf"}


def child(work: Callable[[], Any], calls: int | None = None) -> Any:
    """A process that does it. calls: of the file system, after which it kills itself"""
    process = _FORK.Process(target=_do, args=(work, calls))  # no daemon: those may have no children
    process.start()
    return process


def kill_until_done(work: Callable[[], Any], moment: Moment, longest: float, seed: int = 0) -> int:
    """Kill it by SIGKILL at random moments, after up to `longest` calls or seconds, and some more every time; how many
    kills it took."""
    draw, kills = random.Random(seed), 0
    while True:
        until = draw.uniform(0, longest * (1 + kills / 20))
        process = child(work, int(until) if moment == "call" else None)
        process.join(until if moment == "time" else 60)
        if process.is_alive():
            process.kill()
        process.join(60)
        if process.exitcode == 0:
            return kills
        assert process.exitcode == -signal.SIGKILL, f"it ended by itself with {process.exitcode}"
        kills += 1
        assert kills < 300, "it comes no further"


def slow_down(seconds: float) -> None:
    """Let every chunk of documents take so much longer in this process."""
    plain = Encoder.__call__

    def call(self: Encoder, *what: Any) -> Chunk:
        time.sleep(seconds)
        return plain(self, *what)

    Encoder.__call__ = call  # type: ignore[assignment, method-assign]


def stored(cache: Path) -> dict[str, bytes]:
    """The files of the only store there is."""
    [manifest] = cache.glob("*/manifest.json")
    return {path.name: path.read_bytes() for path in manifest.parent.iterdir()}


def _do(work: Callable[[], Any], calls: int | None) -> None:
    left = calls

    def count(event: str, arguments: Any) -> None:
        nonlocal left
        if event in _CALLS and left is not None:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    work()
    os._exit(0)
