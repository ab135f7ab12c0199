"""The experiments of the star-graph table: their commands, the files these leave, and the records of the results."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from insertlm.recipe import Recipe, differences, load_recipe
from insertlm.storage import checkpoints
from insertlm.training.metrics import accuracies, read_metrics, training_seconds

__all__ = ["RECIPES", "Experiment"]

RECIPES = Path(__file__).parents[1] / "recipes"
# Decoding settings with which a model of each family is evaluated, one row of the table each. Other families are
# evaluated once, with the settings of their recipe.
WAYS: dict[str, list[dict[str, str]]] = {
    "mdm": [{"order": "random"}, {"order": "certainty"}, {"order": "margin"}],
    "it": [{"parallel": "1"}, {"parallel": "0"}, {"stop_threshold": "0.5"}],
}


@dataclass(frozen=True)
class Experiment:
    """One training with its evaluations.

    folder: of all runs   family: the name of the recipe   rate: the learning rate (None: the recipe's)
    changes: other overrides of the recipe   options: further options of every command
    """

    folder: Path
    task: str
    family: str
    preset: str
    seed: int
    rate: str | None
    split: str
    changes: tuple[tuple[str, str], ...]
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        rate = [] if self.rate is None else [f"rate{self.rate}"]
        return "-".join([self.task, self.family, self.preset, f"seed{self.seed}", *rate])

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def recipe_path(self) -> Path:
        """Relative to the working directory, as one would type it."""
        return Path(os.path.relpath(RECIPES / f"star_{self.task}" / f"{self.family}.yaml"))

    @property
    def overrides(self) -> list[tuple[str, str]]:
        rate = [] if self.rate is None else [("optim.learning_rate", self.rate)]
        return [("model.preset", self.preset), ("train.seed", str(self.seed)), *rate, *self.changes]

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.recipe_path, self.overrides)

    @property
    def ways(self) -> list[dict[str, str]]:
        return WAYS.get(self.family, [{}])

    # --- Commands, as arguments of `insertlm`

    def training(self) -> list[str]:
        changes = [word for key, value in self.overrides for word in (f"--{key}", value)]
        return ["train", str(self.recipe_path), "--run", str(self.run), *changes, *self.options]

    def evaluation(self, way: Mapping[str, str]) -> list[str]:
        changes = [word for key, value in way.items() for word in (f"--decode.{key}", value)]
        out = ["--split", self.split, "--out", str(self._scores_path(way))]
        return ["evaluate", str(self.run), *out, *changes, *self.options]

    def missing(self) -> list[list[str]]:
        """The commands that have not been run yet."""
        if not self._trained():
            return [self.training(), *map(self.evaluation, self.ways)]
        return [self.evaluation(way) for way in self.ways if self._scores(way) is None]

    # --- Results

    def warm(self) -> bool:
        """Whether a running training has logged steps since its last checkpoint, so that everything is compiled."""
        newest, log = checkpoints.latest(self.run / "checkpoints"), self.run / "metrics.jsonl"
        steps = [measure.step for measure in read_metrics(log)] if log.is_file() else []
        return max(steps, default=0) > (checkpoints.step_of(newest) if newest else 0)

    def records(self) -> list[dict[str, Any]]:
        """A record for every evaluation that is done."""
        if not self._trained():
            return []
        log = read_metrics(self.run / "metrics.jsonl")
        [seconds] = training_seconds(log, [self.recipe.train.steps])
        common = {
            "task": f"star-{self.task}",
            "family": self.family,
            "preset": self.preset,
            "seed": self.recipe.train.seed,
            "rate": self.recipe.optim.learning_rate,
            "graphs": self.recipe.task.train,
            "steps": self.recipe.train.steps,
            "batch_size": self.recipe.train.batch_size,
            "training_minutes": round(seconds / 60, 2),
            "validation": dict(accuracies(log)),
        }
        found = ((way, self._scores(way)) for way in self.ways)
        return [{**common, **self._evaluated(way, scores)} for way, scores in found if scores is not None]

    def _evaluated(self, way: Mapping[str, str], scores: Mapping[str, Any]) -> dict[str, Any]:
        kept = ("split", "count", "sequence_accuracy", "token_accuracy", "parameters", "decode")
        provenance = ("device", "torch", "insertlm", "commit")
        return {
            "decoding": " ".join(f"{key} {value}" for key, value in way.items()),
            **{key: scores[key] for key in (*kept, *provenance)},
            "evaluation_seconds": round(scores["seconds"], 2),
            "commands": [shlex.join(["insertlm", *self.training()]), scores["command"]],
        }

    def _trained(self) -> bool:
        """Whether all steps of exactly this recipe are done."""
        last = f"step-{self.recipe.train.steps:08d}"
        newest = checkpoints.latest(self.run / "checkpoints")
        if newest is None or newest.name != last:
            return False
        return not differences(self.recipe, load_recipe(self.run / "recipe.yaml"))

    def _scores_path(self, way: Mapping[str, str]) -> Path:
        words = ["evaluation", self.split, *(word for pair in way.items() for word in pair)]
        return self.run / f"{'-'.join(words)}.json"

    def _scores(self, way: Mapping[str, str]) -> dict[str, Any] | None:
        """The result of `insertlm evaluate`, if it is of the last step."""
        path = self._scores_path(way)
        scores: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        return scores if scores.get("step") == self.recipe.train.steps else None
