"""A training run: steps, log, validation, checkpoints. Killed at any moment, it goes on where the last checkpoint was.

All randomness is a function of the step, so the state of a run is its weights, their average, the optimiser's moments
and one number.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.files import write_atomically
from insertlm.core.processes import Processes
from insertlm.core.version import VERSION
from insertlm.data.order import Order
from insertlm.evaluation.accuracy import accuracy
from insertlm.evaluation.losses import mean_losses
from insertlm.families.base import Family
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import Prompt
from insertlm.recipe import Recipe, TrainConfig, build_family, differences, load_recipe, to_yaml
from insertlm.storage import checkpoints as checkpoint
from insertlm.tasks.base import Corpus, Examples
from insertlm.text.tokenizers import matching_ids
from insertlm.training.metrics import MetricsLog, open_tracker
from insertlm.training.optim import freeze
from insertlm.training.parallel import ParallelStep, ReplicatedStep
from insertlm.training.saving import Saver, locked
from insertlm.training.step import TrainStep

__all__ = ["build_step", "train"]

_VALIDATION_BATCH = 500
_LISTED = 64  # examples that an error names
_BY_ID = ("backbone.embedding.weight", "unembedding.weight")  # have a row for every id
_TOPOLOGY = ("train.accumulate ", "train.parallel ")  # what may change from one start of a run to the next


def train(recipe: Recipe, run: Path, processes: Processes, console: Console) -> bool:
    """Train to the last step, from the newest checkpoint in `run` if there is one; whether it got there.

    It stops earlier, with a checkpoint, if SIGTERM or Ctrl-C asks for it.
    """
    _check(recipe.train, processes)
    with torch.device("meta"):  # what cannot be a model, or write as it is to, is refused before anything is written
        family = build_family(recipe)
    if recipe.train.validate_every and recipe.task.has_answers:
        family.check(_prompts(recipe.task.examples("validation")), recipe.decode)
    processes.agree("recipe", f"insertlm {VERSION}\n{to_yaml(recipe)}")
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the heads' float32 products may use TF32
    with _claimed(run, recipe) if processes.first else nullcontext():
        processes.gather(None)  # the folder is there
        return _Run(recipe, run, processes, console).go()


def _check(config: TrainConfig, processes: Processes) -> None:
    pieces = processes.world * config.accumulate
    if config.batch_size % pieces:
        each = f" of {config.accumulate} pieces each" if config.accumulate > 1 else ""
        raise InsertlmError(
            f"train.batch_size {config.batch_size} cannot be shared by {processes.world} processes{each}; "
            f"expected a multiple of {pieces}"
        )


@contextmanager
def _claimed(run: Path, recipe: Recipe) -> Iterator[None]:
    """Make the folder this recipe's, unless it holds a checkpoint of another, and nobody else's while this lasts."""
    new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InsertlmError(f"cannot make the run folder {run}: {error.strerror}") from error
    with locked(run), _swept_away_unless_begun(run, new):
        place = run / "recipe.yaml"
        if checkpoint.latest(run / "checkpoints") is not None:
            different = [what for what in differences(recipe, load_recipe(place)) if not what.startswith(_TOPOLOGY)]
            if not recipe.task.fits_files(run):
                different.append("task.tokenizer has changed since")
            if different:
                raise InsertlmError(
                    f"{run} holds a run of another recipe ({'; '.join(different)}); choose another --run"
                )
        else:
            recipe.task.save_files(run)
            write_atomically(place, to_yaml(recipe).encode())
        checkpoint.sweep(run / "checkpoints")
        yield


@contextmanager
def _swept_away_unless_begun(run: Path, new: bool) -> Iterator[None]:
    """A new folder goes again if a mistake of the recipe is found before the first step."""
    try:
        yield
    except InsertlmError:
        if new and not (run / "metrics.jsonl").exists():
            shutil.rmtree(run)
        raise


class _Run:
    """One process's part in a run, from the newest checkpoint to the last step."""

    def __init__(self, recipe: Recipe, run: Path, processes: Processes, console: Console) -> None:
        self.recipe, self.run, self.checkpoints = recipe, run, run / "checkpoints"
        self.processes = processes
        data = recipe.task.training_set()
        if recipe.train.validate_every:
            recipe.task.examples("validation", 1)  # if there are none, now is the time to know
        if data.fingerprint is not None:
            self._recognise(data.fingerprint)
        self.order = Order(len(data), recipe.train.batch_size, recipe.train.seed)
        self.step = build_step(recipe, data, self.order, processes)
        self.best: float | None = None  # validation of a checkpoint
        self.done = self._resume()
        self.saver = Saver(self.checkpoints, processes, recipe.train.keep, keep_best=recipe.train.keep_best)
        after = self.done or None
        kind = recipe.train.tracker if processes.first else "none"
        self.tracker = open_tracker(kind, run, msgspec.to_builtins(recipe), after)
        self.metrics = MetricsLog(run / "metrics.jsonl", after) if processes.first else None
        self.progress = _progress_bar(console if processes.first else Console(quiet=True))
        fields: dict[str, Any] = {"loss": "–", "speed": "–"}
        self.bar = self.progress.add_task("train", total=recipe.train.steps, completed=self.done, **fields)
        self.logged, self.logged_at = self.done, time.monotonic()

    def _recognise(self, fingerprint: str) -> None:
        """A run learns from the same texts whenever it is started, or it would be that of no recipe."""
        place = self.run / "corpus.sha256"
        if place.is_file() and checkpoint.latest(self.checkpoints) is not None:
            if place.read_text() != fingerprint:
                raise InsertlmError(f"{self.run}: its training texts have changed since it began; choose another --run")
        elif self.processes.first:
            write_atomically(place, fingerprint.encode())

    def go(self) -> bool:
        """Whether the last step was reached."""
        config, stopping = self.recipe.train, False
        self.step.family.train()
        shown = self.progress if self.done < config.steps else nullcontext()  # there may be nothing left to do
        with self.processes.stopping_on_signals(), self.metrics or nullcontext(), self.saver.finishing(), shown:
            while self.done < config.steps and not stopping:
                self.step(self.done)
                self.done += 1
                self.progress.update(self.bar, completed=self.done)
                stopping = self.processes.stopping()
                saving = stopping or self._due(config.save_every)
                validating = config.validate_every > 0 and self._due(config.validate_every)
                # A mean never spans a checkpoint, so resuming repeats it.
                if saving or self._due(config.log_every) or (validating and config.keep_best):
                    self._log_losses()
                with self._off_the_clock():
                    score = self._validate() if validating else None
                    better = self._is_best(score)
                    if saving or (config.keep_best and better):
                        self.saver.save(self.done, self.step.to_save(), score)
                self.saver.check()
        self.tracker.close()
        return self.done == config.steps

    def _due(self, every: int) -> bool:
        return self.done % every == 0 or self.done == self.recipe.train.steps

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        started = time.monotonic()
        yield
        self.logged_at += time.monotonic() - started

    def _log_losses(self) -> None:
        count = self.done - self.logged
        values = self.step.ledger.means(count)
        if self.step.ledger.bad is not None:
            raise InsertlmError(self._what_went_wrong(self.logged + self.step.ledger.bad))
        values["learning_rate"] = self.recipe.optim.rate(self.done - 1, self.recipe.train.steps)
        values["steps_per_second"] = count / (time.monotonic() - self.logged_at)
        if (waited := self.step.source.waited()) is not None:
            values["data_wait"] = waited
        self._report(values)
        speed = f"{values['steps_per_second']:.1f}"
        self.progress.update(self.bar, loss=f"{values['loss']:.4f}", speed=speed)
        self.logged, self.logged_at = self.done, time.monotonic()

    def _what_went_wrong(self, step: int) -> str:
        self.saver.wait()
        good = checkpoint.latest(self.checkpoints)
        examples = self.order.batches(step, 1)[0][0].tolist()
        listed = ", ".join(map(str, examples[:_LISTED])) + (" …" if len(examples) > _LISTED else "")
        return f"the loss is not finite at step {step} (from 0), whose examples are {listed}; " + (
            f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        )

    def _report(self, values: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write({"step": self.done, **values})
        self.tracker.log(self.done, values)

    def _validate(self) -> float:
        """With the averaged weights, on the validation split: exact match where the prefix asks for something, the
        losses of training where nothing does and no text is the right one. A score, higher is better."""
        examples = self.recipe.task.examples("validation")
        answers = self.recipe.task.has_answers
        with self.step.averaged() as family:
            family.eval()
            scores = self._accuracy(family, examples) if answers else self._losses(family, examples)
            family.train()
        self._report({f"validation_{name}": value for name, value in scores.items()})
        shown = f"{scores['sequence_accuracy']:.2f} % exact" if answers else f"loss {scores['loss']:.4f}"
        self.progress.console.print(f"step {self.done}: validation {shown}")
        return scores["sequence_accuracy"] if answers else -scores["loss"]

    def _is_best(self, score: float | None) -> bool:
        if score is None or not score > (-math.inf if self.best is None else self.best):  # nor is nan
            return False
        self.best = score
        return True

    def _accuracy(self, family: Family, examples: Examples) -> dict[str, float]:
        """Greedy or not as the recipe says."""
        paths = generate(family, _prompts(examples), self.recipe.decode, _VALIDATION_BATCH, processes=self.processes)
        return accuracy(self.recipe.task, examples, [path.ids for path in paths])

    def _losses(self, family: Family, examples: Examples) -> dict[str, float]:
        size, halved = self.recipe.train.batch_size, self.step.halved
        return mean_losses(family, examples, size, bf16=halved, processes=self.processes)

    def _resume(self) -> int:
        """Load the newest checkpoint, or what a fresh run begins with; the number of steps done."""
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            if self.recipe.train.start:
                try:
                    self._begin_with(self.recipe.train.start)
                except InsertlmError as error:
                    raise InsertlmError(f"train.start: {error}") from error
            return 0
        self.step.load(checkpoint.Parts(newest))
        best = checkpoint.best(self.checkpoints)
        self.best = None if best is None else checkpoint.score_of(best)
        return checkpoint.step_of(newest)

    def _begin_with(self, name: str) -> None:
        from insertlm.storage.folders import find, read_weights

        folder, task = find(name), self.recipe.task
        if not task.fits_files(folder):
            raise InsertlmError(f"{name}: has another tokenizer than task.tokenizer")
        other, weights = load_recipe(folder / "recipe.yaml"), read_weights(folder)[0]
        if (theirs := other.model.heads) != (ours := self.recipe.model.heads):
            raise InsertlmError(f"{name}: has {theirs} heads, expected {ours}, as model.heads has it")
        if task.kind != "text":  # else the ids are the same
            if other.task.kind == "text":
                raise InsertlmError(f"{name}: is a model of text; expected one of tasks")
            weights = _renumbered(weights, matching_ids(task.tokenizer, other.task.tokenizer))
        try:
            self.step.begin_with(weights, akin=other.family.tag != self.recipe.family.tag)
        except InsertlmError as error:
            raise InsertlmError(f"{name}: {error}") from error


def _prompts(examples: Examples) -> list[Prompt]:
    return [Prompt(example.prefix, seed) for seed, example in enumerate(examples)]


def _renumbered(weights: Mapping[str, Tensor], ids: Sequence[int | None]) -> dict[str, Tensor]:
    """Weights as a vocabulary needs them whose ids were these in theirs; what had none begins as the mean of all."""
    known = torch.tensor([number is not None for number in ids])
    old = torch.tensor([number or 0 for number in ids])
    changed = {name: weights[name] for name in _BY_ID if name in weights}
    changed = {name: torch.where(known[:, None], value[old], value.mean(0)) for name, value in changed.items()}
    return {**weights, **changed}


def build_step(recipe: Recipe, data: Examples | Corpus, order: Order, processes: Processes) -> TrainStep:
    """One device and one piece: a step of its own, captured as a whole. Else steps in pieces."""
    config = recipe.train
    sharded = config.parallel == "fsdp" and processes.world > 1
    family = build_family(recipe)
    freeze(family, recipe.optim)
    if not sharded:  # shards go to the device one by one
        family.to(processes.device)
    rows = family.rows(data) if isinstance(data, Examples) else data
    settings: dict[str, Any] = {
        "optim": recipe.optim,
        "steps": config.steps,
        "device": processes.device,
        "compiled": config.compile and processes.device.type == "cuda",  # elsewhere its import alone takes seconds
        "precision": config.precision,
    }
    if processes.world * config.accumulate == 1:
        return TrainStep(family, rows, order, **settings)
    kind: type[ParallelStep] = ReplicatedStep
    if sharded:
        from insertlm.training.sharded import ShardedStep  # slow to import

        kind = ShardedStep
    return kind(family, rows, order, **settings, processes=processes, accumulate=config.accumulate)


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} steps/s"),
        TimeRemainingColumn(),
        console=console,
    )
