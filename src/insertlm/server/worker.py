"""Workers: a thread for each model, which writes all of its texts together with a scheduler.

Torch computes in the worker's thread, so the event loop never waits for it. A job learns what happens to it through
`Job.tell`, which is called in the worker's thread.

A thread ends when there is nothing more to write. Every thread that computes has its own OpenMP threads. If there are
more of these than cores, even idle ones, OpenMP lets threads sleep instead of spin, and a step takes a fifth longer.
For the same reason models are loaded in a thread that ends (cli/serve.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.inference.scheduler import Progress, Scheduler
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.infill.drafts import Draft, Event
from insertlm.server.errors import RefusedError, invalid

__all__ = ["Began", "Ended", "Failed", "Job", "Message", "Worker"]

_log = logging.getLogger("insertlm.server")


class Began(NamedTuple):
    """The first text of a job is running."""


class Ended(NamedTuple):
    """All texts of a job are done. results: in the order of its drafts"""

    results: list[Any]


class Failed(NamedTuple):
    error: Exception


Message = Began | list[Event] | Ended | Failed


@dataclass(eq=False)
class Job:
    """Texts with the same settings. watched: whether to report single insertions"""

    drafts: Sequence[Draft[Any]]
    settings: DecodeConfig
    watched: bool
    tell: Callable[[Message], None]
    begun: bool = False
    results: dict[int, Any] = field(default_factory=dict)


class _Place(NamedTuple):
    """Whose text it is: of the draft of that number, its prompt number `which`."""

    job: Job
    number: int
    which: int


class Worker:
    """Writes the texts of one model. concurrent: how many run at once   queue: how many more may wait"""

    def __init__(self, name: str, family: Family, concurrent: int, queue: int) -> None:
        self.family, self.concurrent, self.queue = family, concurrent, queue
        self.tokens = self.steps = self.cancelled = 0
        self._scheduler = Scheduler(family, concurrent, watched=True)
        self._jobs: set[Job] = set()  # all that are not done
        self._new: list[Job] = []  # of these, the ones that the thread has not seen yet
        self._gone: list[Job] = []  # and the ones whose clients have left
        self._texts: dict[int, _Place] = {}  # by the scheduler's key
        self._changed = threading.Condition()
        self._closing = False
        self._name = f"insertlm-{name}"
        self._thread: threading.Thread | None = None  # while there is something to do

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        with self._changed:
            new = sum(len(draft.prompts) for job in self._new for draft in job.drafts)
            return new + len(self._scheduler) - self.running

    @property
    def alive(self) -> bool:
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def submit(self, job: Job) -> None:
        with self._changed:
            if not self.alive:
                raise RefusedError(503, "the server is shutting down")
            ahead, most = sum(len(other.drafts) for other in self._jobs), self.concurrent + self.queue
            if len(job.drafts) > most:
                raise invalid(f"expected at most {most} texts at once, got {len(job.drafts)}")
            if ahead + len(job.drafts) > most:
                raise RefusedError(429, f"{ahead} texts are under way or waiting; try again later")
            self._new.append(job)
            self._jobs.add(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def leave(self, job: Job) -> None:
        """Nobody waits for this job any more. (If it is done, nothing happens.)"""
        with self._changed:
            if job in self._jobs:
                self._gone.append(job)

    def close(self, seconds: float | None = None, *, finish: bool = True) -> None:
        """Take nothing new, and finish what is there, or leave it."""
        with self._changed:
            self._closing = True
            if not finish:
                self._gone += self._jobs
            self._changed.wait_for(lambda: self._thread is None, seconds)

    def _run(self) -> None:
        while self._work_to_do():
            self._take_in()
            self._advance()

    def _work_to_do(self) -> bool:
        """If there is none, the thread ends. Checked under the lock, so that `submit` starts a new one if needed."""
        with self._changed:
            if self._jobs:
                return True
            self._thread = None
            self._changed.notify_all()
            return False

    def _take_in(self) -> None:
        """Drop the jobs whose clients have left, queue the new ones, and start as many texts as there is room for."""
        with self._changed:
            new, self._new = self._new, []
            gone, self._gone = self._jobs.intersection(self._gone), []
        for job in gone:
            self._drop(job)
            self.cancelled += 1
        for job in new:
            if job not in gone:
                drafts = enumerate(job.drafts)
                self._queue(
                    {_Place(job, n, k): prompt for n, draft in drafts for k, prompt in enumerate(draft.prompts)}
                )
        for job in {self._texts[key].job for key in self._scheduler.admit()}:
            if not job.begun:
                job.begun = True
                job.tell(Began())

    def _queue(self, prompts: Mapping[_Place, Prompt], *, first: bool = False) -> None:
        """Of one job."""
        job = next(iter(prompts)).job
        try:
            keys = self._scheduler.submit([*prompts.values()], job.settings, first=first)
        except Exception as error:
            self._fail(job, error)
        else:
            self._texts |= zip(keys, prompts, strict=True)

    def _advance(self) -> None:
        try:
            progress = self._scheduler.advance()
        except Exception as error:  # it is unknown which text caused it, so all that run have failed
            for job in {self._texts[key].job for key in self._scheduler.abandon()}:
                self._fail(job, error)
            return
        self.steps += bool(progress)
        for each in progress:
            self._report(each)

    def _report(self, progress: Progress) -> None:
        self.tokens += len(progress.events)
        if progress.key not in self._texts:  # another text of the job has failed
            return
        place = job, number, which = self._texts[progress.key]
        try:
            events, result, again = job.drafts[number].see(progress, number, which)
        except Exception as error:
            self._fail(job, error)
            return
        if events and job.watched:
            job.tell(events)
        if progress.ended is None:
            return
        del self._texts[progress.key]
        if again is not None:
            self._queue({place: again}, first=True)
        if result is None:
            return
        job.results[number] = result
        if len(job.results) == len(job.drafts):
            self._drop(job)
            job.tell(Ended([job.results[number] for number in range(len(job.drafts))]))

    def _drop(self, job: Job) -> None:
        for key in [key for key, place in self._texts.items() if place.job is job]:
            self._scheduler.cancel(key)
            del self._texts[key]
        with self._changed:
            self._jobs.discard(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, InsertlmError):
            _log.error("a text could not be written", exc_info=error)
        self._drop(job)
        job.tell(Failed(error))
