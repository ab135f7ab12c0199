"""The folder of a run: one recipe's, one process group's at a time, and gone again if the recipe was a mistake.

RUN/recipe.yaml, metrics.jsonl, checkpoints/   and, for a corpus, corpus.sha256 and the files of the tokenizer
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, write_atomically, writing
from insertlm.recipe import Recipe, differences, load_recipe, to_yaml
from insertlm.storage import checkpoints

__all__ = ["claimed", "locked", "recognise"]

# What may change from one start of a run to the next: how far it goes, who computes it, what it reports and keeps.
_MAY_CHANGE = {
    f"train.{key}"
    for key in (
        *("steps", "minutes", "accumulate", "parallel", "recompute", "tracker"),
        *("log_every", "save_every", "validate_every", "keep", "keep_best"),
    )
}
_LOCK_PATIENCE = 20.0  # seconds until what is left of a killed run has noticed


@contextmanager
def claimed(run: Path, recipe: Recipe) -> Iterator[str]:
    """Make the folder this recipe's and this process's as long as the block lasts. Refuses a folder with checkpoints of
    another recipe. Yields what a user should know about changes, or nothing."""
    new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InsertlmError(f"cannot make the run folder {run}: {reason(error)}") from error
    # The first process holds the lock for all of its run.
    with locked(run), _removed_unless_begun(run, new):
        newest = checkpoints.latest(run / "checkpoints")
        if newest is None:
            note = ""
            recipe.task.save_files(run)
        else:
            note = _check_goes_on(run, recipe, newest)
        write_atomically(run / "recipe.yaml", to_yaml(recipe).encode())
        # Nobody else writes here now, so what has a temporary name is a killed run's.
        checkpoints.sweep(run / "checkpoints")
        yield note


def _check_goes_on(run: Path, recipe: Recipe, newest: Path) -> str:
    """Whether the run can go on with this recipe; what a change of its length does to the learning rate."""
    before = load_recipe(run / "recipe.yaml")
    different = [what for what in differences(recipe, before) if what.split(" ")[0] not in _MAY_CHANGE]
    if not recipe.task.fits_files(run):
        different.append("task.tokenizer has changed since")
    if different:
        raise InsertlmError(f"{run} holds a run of another recipe ({'; '.join(different)}); choose another --run")
    spent = checkpoints.seconds_of(newest) / 60
    notes = [
        _check_length(run, recipe, "step", before.train.steps, recipe.train.steps, checkpoints.step_of(newest)),
        _check_length(run, recipe, "minute", before.train.minutes, recipe.train.minutes, spent),
    ]
    return "; ".join(filter(None, notes))


def _check_length(run: Path, recipe: Recipe, unit: str, before: float, now: float, done: float) -> str:
    """unit: in which the length of a run is measured; 0 of it = no limit"""
    if now == before:
        return ""
    if now and now < done:
        raise InsertlmError(
            f"train.{unit}s is {_short(now)}, but {run} has {_short(done)} {unit}s already; choose another --run"
        )
    constant = 1.0 - recipe.optim.cooldown
    if not recipe.optim.cooldown or not now:
        return ""
    rising = " had begun to fall, rises again and" if before and done > constant * before else ""
    return f"train.{unit}s was {_short(before)}: the rate{rising} falls from {unit} {_short(constant * now)} on"


def _short(number: float) -> str:
    return f"{round(number, 2):.10g}"


def recognise(run: Path, fingerprint: str, *, first: bool) -> None:
    """A run learns from the same texts whenever it is started, or it would be the run of no recipe. first: of the
    processes, the one that writes"""
    place = run / "corpus.sha256"
    if place.is_file() and checkpoints.latest(run / "checkpoints") is not None:
        if place.read_text() != fingerprint:
            raise InsertlmError(f"{run}: its training texts have changed since it began; choose another --run")
    elif first:
        write_atomically(place, fingerprint.encode())


@contextmanager
def _removed_unless_begun(run: Path, new: bool) -> Iterator[None]:
    """A new folder goes again if a mistake in the recipe is found before the first step."""
    try:
        yield
    except InsertlmError:
        if new and not (run / "metrics.jsonl").exists():
            shutil.rmtree(run)
        raise


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """While this process trains in the folder, no other does. The system takes the lock back from a killed one."""
    place = run / ".lock"
    # A lock of the system goes with its process, however that ends; a file that says "locked" would stay.
    with writing(place):
        file: Any = place.open("wb")
    with file:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() - started > _LOCK_PATIENCE:
                    raise InsertlmError(f"another process trains in {run}; choose another --run") from error
                time.sleep(0.2)
        yield
