"""A training run: steps, log, validation, checkpoints. Killed at any moment, it goes on where the last checkpoint was.

All randomness is a function of the step, so the state of a run is its weights, their average, the optimiser's moments
and one number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from insertlm.config import Recipe, differences, load_recipe, to_yaml
from insertlm.decoding.settings import Prompt
from insertlm.errors import InsertlmError
from insertlm.evaluation.accuracy import accuracy, generate
from insertlm.evaluation.losses import mean_losses
from insertlm.families.base import Family
from insertlm.files import write_atomically
from insertlm.tasks.base import Examples
from insertlm.tasks.text import Text
from insertlm.training import checkpoint
from insertlm.training.metrics import MetricsLog, open_tracker
from insertlm.training.order import Order
from insertlm.training.step import TrainStep

__all__ = ["build_family", "train"]

_VALIDATION_BATCH = 500


def build_family(recipe: Recipe) -> Family:
    """A fresh model; its weights depend on `train.seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        return recipe.family.build(recipe.model, recipe.task.tokenizer)


def train(recipe: Recipe, run: Path, device: torch.device, console: Console) -> None:
    """Train to the last step, from the newest checkpoint in `run` if there is one."""
    _claim(run, recipe)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the heads' float32 products may use TF32
    _Run(recipe, run, device, console).go()


def _claim(run: Path, recipe: Recipe) -> None:
    """Make the folder this recipe's, unless it holds a checkpoint of another."""
    place = run / "recipe.yaml"
    if checkpoint.latest(run / "checkpoints") is not None:
        different = differences(recipe, load_recipe(place))
        if isinstance(recipe.task, Text) and not recipe.task.keeps(run):
            different.append(f"{recipe.task.vocabulary} has changed since")
        if different:
            raise InsertlmError(f"{run} holds a run of another recipe ({'; '.join(different)}); choose another --run")
        return
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InsertlmError(f"cannot make the run folder {run}: {error.strerror}") from error
    if isinstance(recipe.task, Text):
        recipe.task.keep(run)
    write_atomically(place, to_yaml(recipe).encode())


class _Run:
    """One process's part in a run, from the newest checkpoint to the last step."""

    def __init__(self, recipe: Recipe, run: Path, device: torch.device, console: Console) -> None:
        self.recipe, self.run, self.checkpoints = recipe, run, run / "checkpoints"
        self.family = build_family(recipe).to(device)
        data = recipe.task.training_set()
        order = Order(len(data), recipe.train.batch_size, recipe.train.seed)
        self.step = TrainStep(
            self.family,
            self.family.rows(data) if isinstance(data, Examples) else data,
            order,
            optim=recipe.optim,
            steps=recipe.train.steps,
            device=device,
            compiled=recipe.train.compile,
            precision=recipe.train.precision,
        )
        self.done = self._resume()
        after = self.done or None
        self.metrics = MetricsLog(run / "metrics.jsonl", after)
        self.tracker = open_tracker(recipe.train.tracker, run, msgspec.to_builtins(recipe), after)
        self.progress = _progress_bar(console)
        fields: dict[str, Any] = {"loss": math.nan, "speed": 0.0}
        self.bar = self.progress.add_task("train", total=recipe.train.steps, completed=self.done, **fields)
        self.logged, self.logged_at = self.done, time.monotonic()

    def go(self) -> None:
        config = self.recipe.train
        self.family.train()
        with self.metrics, self.progress:
            while self.done < config.steps:
                self.step(self.done)
                self.done += 1
                saving = self._due(config.save_every)
                if saving or self._due(config.log_every):  # a mean never spans a checkpoint, so resuming repeats it
                    self._log_losses()
                with self._off_the_clock():
                    if config.validate_every and self._due(config.validate_every):
                        self._validate()
                    if saving:
                        self._save()
        self.tracker.close()

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
        values = self.step.means(count)
        if not math.isfinite(values["loss"]):
            good = checkpoint.latest(self.checkpoints)
            raise InsertlmError(
                f"the loss is {values['loss']} within steps {self.logged} … {self.done}; "
                + (f"the last good checkpoint is {good}" if good else "there is no checkpoint yet")
            )
        values["learning_rate"] = self.recipe.optim.rate(self.done - 1, self.recipe.train.steps)
        values["steps_per_second"] = count / (time.monotonic() - self.logged_at)
        if (waited := self.step.source.waited()) is not None:
            values["data_wait"] = waited
        self._report(values)
        self.progress.update(self.bar, completed=self.done, loss=values["loss"], speed=values["steps_per_second"])
        self.logged, self.logged_at = self.done, time.monotonic()

    def _report(self, values: dict[str, float]) -> None:
        self.metrics.write({"step": self.done, **values})
        self.tracker.log(self.done, values)

    def _validate(self) -> None:
        """With the averaged weights, on the validation split: exact match where the prefix asks for something, the
        losses of training where nothing does and no text is the right one."""
        examples = self.recipe.task.examples("validation")
        answers = self.recipe.task.longest_prefix > 0
        self.family.eval()
        with self.step.optimizer.replaced(self.step.ema.average):
            scores = self._accuracy(examples) if answers else self._losses(examples)
        self.family.train()
        self._report({f"validation_{name}": value for name, value in scores.items()})
        shown = f"{scores['sequence_accuracy']:.2f} % exact" if answers else f"loss {scores['loss']:.4f}"
        self.progress.console.print(f"step {self.done}: validation {shown}")

    def _accuracy(self, examples: Examples) -> dict[str, float]:
        """Greedy or not as the recipe says."""
        prompts = [Prompt(example.prefix, seed) for seed, example in enumerate(examples)]
        written = [t.ids for t in generate(self.family, prompts, self.recipe.decode, _VALIDATION_BATCH)]
        return accuracy(self.recipe.task, examples, written)

    def _losses(self, examples: Examples) -> dict[str, float]:
        return mean_losses(self.family, examples, self.recipe.train.batch_size, halved=self.step.halved)

    def _save(self) -> None:
        checkpoint.save(self.checkpoints, self.done, self.step.state(), self.recipe.train.keep)

    def _resume(self) -> int:
        """Load the newest checkpoint; the number of steps done."""
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            return 0
        saved = checkpoint.load(newest)
        self.step.load(saved.tensors)
        return saved.step


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:.1f} steps/s"),
        TimeRemainingColumn(),
        console=console,
    )
