"""A training run: steps, log, validation, checkpoints. Killed at any moment, it goes on where the last checkpoint was.

All randomness is a function of the step, so the state of a run is its weights, their average, the optimiser's moments
and two numbers: how many steps, and how many seconds of training if these end it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.core.version import VERSION
from insertlm.data.order import Order
from insertlm.recipe import Recipe, TrainConfig, build_family, to_yaml
from insertlm.storage import checkpoints
from insertlm.training.clock import Clock
from insertlm.training.deterministic import deterministic
from insertlm.training.metrics import MetricsLog, open_tracker
from insertlm.training.parallel import build_step
from insertlm.training.run_folder import claimed, recognise
from insertlm.training.saving import Saver
from insertlm.training.start import begin_with
from insertlm.training.validation import check, validate

__all__ = ["train"]

_LISTED = 64  # examples that an error names


def train(recipe: Recipe, run: Path, processes: Processes, console: Console) -> int:
    """Train to the end, which is the last step or the last minute, from the newest checkpoint in `run` if there is one.
    Returns how many steps it took, or 0 if it did not get there: SIGTERM or Ctrl-C end it earlier, with a checkpoint.
    """
    _check_batch(recipe.train, processes)
    with torch.device("meta"):  # a model that cannot be, or cannot write, is refused before anything is written
        check(build_family(recipe), recipe)
    processes.agree("recipe", f"insertlm {VERSION}\n{to_yaml(recipe)}")
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the heads' float32 products may use TF32
    with _no_denormals(), claimed(run, recipe) if processes.first else nullcontext("") as note:
        if note:
            console.print(note, highlight=False, soft_wrap=True)
        processes.gather(None)  # the folder is there
        begun = _Run(recipe, run, processes, console)
        if processes.first:  # not earlier: what is wrong with the recipe or its data is known only now
            several = f", {processes.world} processes" if processes.world > 1 else ""
            console.print(f"run: {run} on {processes.device}{several}", highlight=False, soft_wrap=True)
        return begun.go()


@contextmanager
def _no_denormals() -> Iterator[None]:
    """The moments of words that do not occur shrink to denormal numbers, with which a CPU takes 30 times as long.
    Threads inherit this, so it helps most where torch has not computed anything before."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _check_batch(config: TrainConfig, processes: Processes) -> None:
    pieces = processes.world * config.accumulate
    if config.batch_size % pieces:
        each = f" of {config.accumulate} pieces each" if config.accumulate > 1 else ""
        raise InsertlmError(
            f"train.batch_size {config.batch_size} cannot be shared by {processes.world} processes{each}; "
            f"expected a multiple of {pieces}"
        )


class _Run:
    """One process's part in a run.

    done, seconds: of training so far, the same in all processes
    best: the highest score of a validation whose checkpoint is kept
    """

    def __init__(self, recipe: Recipe, run: Path, processes: Processes, console: Console) -> None:
        self.recipe, self.config, self.processes = recipe, recipe.train, processes
        self.run, self.checkpoints = run, run / "checkpoints"
        data = recipe.task.training_set()
        if self.config.validate_every:
            recipe.task.examples("validation", 1)  # if there are none, now is the time to know
        if data.fingerprint is not None:
            recognise(run, data.fingerprint, first=processes.first)
        self.order = Order(len(data), self.config.batch_size, self.config.seed)
        self.step = build_step(recipe, data, self.order, processes)
        self.saver = Saver(self.checkpoints, processes, self.config.keep, keep_best=self.config.keep_best)
        self.clock = Clock(self.config.minutes, processes.device)
        self.done, self.seconds, self.best = 0, 0.0, -math.inf
        self._begin()
        self.logged, self.logged_at = self.done, time.monotonic()
        self.progress = _progress_bar(console if processes.first else Console(quiet=True))
        shown: dict[str, Any] = {"loss": "–", "speed": "–"}
        self.bar = self.progress.add_task("train", total=1.0, **self._place(), **shown)

    def _begin(self) -> None:
        """From the newest checkpoint, or from what a fresh run begins with."""
        newest = checkpoints.latest(self.checkpoints)
        if newest is not None:
            self.step.load(checkpoints.Parts(newest))  # any number of processes may have written it
            self.done, self.seconds = checkpoints.step_of(newest), checkpoints.seconds_of(newest)
            best = checkpoints.best(self.checkpoints)
            score = None if best is None else checkpoints.score_of(best)
            self.best = -math.inf if score is None else score
        elif self.config.start:
            try:
                begin_with(self.config.start, self.step, self.recipe)
            except InsertlmError as error:
                raise InsertlmError(f"train.start: {error}") from error

    @property
    def over(self) -> bool:
        return self.done >= self.config.steps or self.seconds >= self.clock.budget

    def go(self) -> int:
        """The number of steps, or 0 if the end was not reached."""
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(self.processes.stopping_on_signals())
            self._open_logs(stack)
            stack.enter_context(self.saver.finishing())
            if not self.over:  # there may be nothing left to do
                stack.enter_context(self.progress)
            self.step.family.train()
            self.clock.set(self.seconds)
            self.processes.seconds = self.seconds
            fresh, stopping = self.processes.device.type == "cuda", False
            while not self.over and not stopping:
                with deterministic(config.deterministic):
                    self.step(self.done, self.clock.elapsed(self.seconds))
                self.done += 1
                if fresh:  # in the first step on a GPU programs are compiled, which is no training
                    self.clock.set(self.seconds)
                    fresh = False
                stopping = self._agree()
                saving = stopping or self._due(config.save_every)
                validating = config.validate_every > 0 and self._due(config.validate_every)
                # A mean never spans a checkpoint, so that a run that goes on from there repeats it.
                if saving or self._due(config.log_every) or (validating and config.keep_best):
                    self._log_losses()
                with self._off_the_clock():
                    score = self._validate() if validating else None
                    better = score is not None and score > self.best  # a score that is no number is not
                    if better and score is not None:
                        self.best = score
                    if saving or (config.keep_best and better):
                        self.saver.save(self.done, self.step.to_save(), score, self.seconds)
                self.saver.check()
        return self.done if self.over else 0

    def _agree(self) -> bool:
        """After a step: whether to stop, and how long this has taken, the same in all processes."""
        stopping = self.processes.stopping(self.clock.seconds())  # all stop at the same step, or none
        self.seconds = self.processes.seconds
        if self.over and self.done < self.config.steps:
            self.step.ema.end(self.done - 1)  # nobody knew before that this was the last step
        self.progress.update(self.bar, **self._place())
        return stopping

    def _place(self) -> dict[str, Any]:
        """How far this is, for the bar."""
        config, elapsed = self.config, self.clock.elapsed(self.seconds)
        shown = f"{self.seconds / 60:.1f}/{config.minutes:g} min, step {self.done}"
        place = shown if config.minutes else f"{self.done}/{config.steps}"
        return {"completed": max(self.done / config.steps, elapsed), "place": place}

    def _open_logs(self, stack: ExitStack) -> None:
        """They are closed with the stack, whatever ends the run."""
        first, after = self.processes.first, self.done or None
        self.metrics = stack.enter_context(MetricsLog(self.run / "metrics.jsonl", after)) if first else None
        kind = self.config.tracker if first else "none"
        self.tracker = stack.enter_context(
            closing(open_tracker(kind, self.run, msgspec.to_builtins(self.recipe), after))
        )

    def _due(self, every: int) -> bool:
        return self.done % every == 0 or self.over

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        # Not in a `finally`: after an error nobody reads the clock.
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.logged_at += seconds
        self.clock.leave_out(seconds)

    def _log_losses(self) -> None:
        """The means since the last time; an infinite one ends the run."""
        # This is where the host waits for the device, so a line of the log costs a little.
        count = self.done - self.logged
        values = self.step.ledger.means(count)
        if self.step.ledger.bad is not None:
            raise InsertlmError(self._what_went_wrong(self.logged + self.step.ledger.bad))
        values["learning_rate"] = self.step.optimizer.rate
        values["steps_per_second"] = count / (time.monotonic() - self.logged_at)
        values["data_wait"] = self.step.source.waited()
        self._report(values)
        speed = f"{values['steps_per_second']:.1f}"
        self.progress.update(self.bar, loss=f"{values['loss']:.4f}", speed=speed)
        self.logged, self.logged_at = self.done, time.monotonic()

    def _what_went_wrong(self, step: int) -> str:
        self.saver.wait()  # the last good checkpoint may be on its way to the disk
        good = checkpoints.latest(self.checkpoints)
        examples = self.order.batches(step, 1)[0][0].tolist()
        listed = ", ".join(map(str, examples[:_LISTED])) + (" …" if len(examples) > _LISTED else "")
        return f"the loss is not finite at step {step} (from 0), whose examples are {listed}; " + (
            f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        )

    def _validate(self) -> float:
        """With the averaged weights. Returns the score."""
        with self.step.averaged() as family:
            family.eval()
            found = validate(family, self.recipe, self.processes, bf16=self.step.bf16)
            family.train()
        self._report({f"validation_{name}": value for name, value in found.values.items()})
        self.progress.console.print(f"step {self.done}: validation {found.shown}")
        return found.score

    def _report(self, values: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write({"step": self.done, **values})
        self.tracker.log(self.done, values)


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.fields[place]}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} steps/s"),
        TimeRemainingColumn(),
        console=console,
    )
