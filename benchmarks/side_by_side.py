"""Commands in several processes at once, none of which outlives us: for scripts that may be stopped at any time.

Children stay in our process group, so that whoever kills the group gets them too, but Ctrl-C, or a terminal that is
closed, is for us alone: we ask them to end in their own way. On Linux the system ends them if we are killed.
"""

from __future__ import annotations

import ctypes
import math
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Job", "run"]

_TICK = 0.1  # seconds between looks
_PATIENCE = 12.0  # seconds that children have to end once asked: a checkpoint of 90M weights takes about 6
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """Commands that follow one another as long as each succeeds. All they print goes to the end of `log`.

    warm: whether the first of them, under way, has done what it can do before its turn, such as compiling
    """

    name: str
    commands: Sequence[Sequence[str]]
    log: Path
    warm: Callable[[], bool] = lambda: False


def run(
    jobs: Iterable[Job],
    at_once: int,
    ended: Callable[[Job, str | None], None],
    until: float = math.inf,
    *,
    ahead: int = 0,
) -> bool:
    """Carry out all jobs, the first commands of up to `at_once` at a time; whether we got through. What follows a first
    command takes no place. Up to `ahead` more are started one by one before their turn, and held as soon as they are
    warm.

    `ended` hears of each: its last word if it failed, else None. A signal, or the time `until` (as time.monotonic() has
    it), ends everything before: children are stopped, and of those `ended` hears nothing.
    """
    waiting, running = deque(jobs), list[_Running]()
    with _asked_to_stop() as asked:
        try:
            while waiting or running:
                over = [child for child in running if child.over()]
                if asked() or time.monotonic() >= until:  # asked last: who is stopped with us has not failed
                    return False
                for child in over:
                    running.remove(child)
                    ended(child.job, child.problem)
                _give_places(running, at_once)
                while waiting and _room(running, at_once, ahead):
                    running.append(_Running(waiting.popleft()))
                    _give_places(running, at_once)
                time.sleep(_TICK)
            return True
        finally:
            _stop([child.process for child in running])


def _give_places(running: Sequence[_Running], at_once: int) -> None:
    """To those that were started first; others are held if they are warm."""
    free = at_once - sum(child.state == "placed" for child in running)
    early = [child for child in running if child.state in ("early", "held")]
    for child in early[:free]:
        child.go_on()
    for child in early[free:]:
        if child.state == "early" and child.job.warm():
            child.hold()


def _room(running: Sequence[_Running], at_once: int, ahead: int) -> bool:
    """Whether one more may be started: to have a place, or to be the only one that is getting warm."""
    states = [child.state for child in running]
    return states.count("placed") < at_once or ("early" not in states and states.count("held") < ahead)


class _Running:
    """A job under way, at least one command of which there is. problem: what it ended with, None if all went well

    state: started before its turn, held until then, at its first command, or past it
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.problem: str | None = None
        self.state: Literal["early", "held", "placed", "past"] = "early"
        self._waiting = deque(job.commands)
        self.process = self._start()

    def hold(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.state = "held"

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.state = "placed"

    def over(self) -> bool:
        """Looks, and starts the next command when it is its turn."""
        code = self.process.poll()
        if code == 0 and self._waiting:
            self.process = self._start()
            self.state = "past"
            return False
        if code:
            self.problem = _last_line(self.job.log) if code > 0 else f"killed by {signal.Signals(-code).name}"
        return code is not None

    def _start(self) -> subprocess.Popen[bytes]:
        command = self._waiting.popleft()
        with self.job.log.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_tie_to_parent,  # noqa: PLW1509  # unsafe with threads, of which we have none
            )


def _tie_to_parent() -> None:
    """In the child, before it becomes its command: what a terminal sends is not for it, and it ends when we do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Signals that would end us are noted instead; the function tells whether there was one."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in _SIGNALS}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # who is held would hear nothing
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
