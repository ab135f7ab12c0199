"""Runs commands in several processes at once, for scripts that may be stopped at any time. No process outlives us.

Children stay in our process group, so that killing the group kills them, too. But they ignore Ctrl-C and a closed
terminal: we ask them to end with SIGTERM instead, so that they can save. On Linux the kernel kills them if we are
killed.
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

_TICK = 0.1  # seconds between polls
_PATIENCE = 12.0  # seconds that children have to end: a checkpoint of 90M weights takes about 6
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other as long as each succeeds. Their output is appended to `log`.

    warm: whether the first command has finished what it can do early, such as compiling
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
    """Run all jobs, with the first commands of up to `at_once` jobs at a time; returns whether all were run. Later
    commands of a job do not count. Up to `ahead` more jobs are started early, one by one, and paused once they are
    warm.

    `ended` is called for each job with its last line of output if it failed, else with None. A signal, or the time
    `until` (of time.monotonic()), stops everything early; `ended` is not called for jobs that are stopped.
    """
    waiting, running = deque(jobs), list[_Running]()
    with _asked_to_stop() as asked:
        try:
            while waiting or running:
                over = [child for child in running if child.over()]
                if (
                    asked() or time.monotonic() >= until
                ):  # after over(): children that the same signal stopped have not failed
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
    """Free places go to the jobs that were started first; the others are paused once they are warm."""
    free = at_once - sum(child.state == "placed" for child in running)
    early = [child for child in running if child.state in ("early", "held")]
    for child in early[:free]:
        child.go_on()
    for child in early[free:]:
        if child.state == "early" and child.job.warm():
            child.hold()


def _room(running: Sequence[_Running], at_once: int, ahead: int) -> bool:
    """Whether one more job may be started, either in a free place or as the only one that is warming up."""
    states = [child.state for child in running]
    return states.count("placed") < at_once or ("early" not in states and states.count("held") < ahead)


class _Running:
    """A job that is running. problem: the last line of output of a job that failed, else None

    state: early (started before there is a place), held (paused until then), placed (its first command has a place), or
    past (its later commands, which need no place)
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
        """Whether the job has ended. Starts its next command if one is left."""
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
                preexec_fn=_tie_to_parent,  # noqa: PLW1509  # unsafe with threads, but there are none here
            )


def _tie_to_parent() -> None:
    """Runs in the child before its command: it ignores the terminal's signals, and is killed if we are."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Catches signals that would end us; the function returns whether there was one."""
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
        process.send_signal(signal.SIGCONT)  # a paused process gets no signals
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
