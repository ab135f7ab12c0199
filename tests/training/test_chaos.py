"""A run of two processes that is killed again and again ends where an undisturbed one does. The long form is
benchmarks/chaos.py."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from chaos import KINDS, Chaos, Launch, differences, recipe_of, torchrun

from insertlm.cli.main import main
from insertlm.core import processes as distributed


def forked(launch: Callable[[int], list[dict[str, str]]]) -> Launch:
    """A launcher that need not import anything: it starts two workers, and ends all when one fails."""

    def start(recipe: Path, run: Path) -> int:
        variables = launch(2)
        launcher = os.fork()
        if launcher:
            return launcher
        with run.with_suffix(".log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        workers = [_worker(each, ["train", str(recipe), "--run", str(run), "--device", "cpu"]) for each in variables]
        for _ in workers:
            if os.wait()[1]:
                for worker in workers:
                    with suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGTERM)
        os._exit(0)

    return start


def _worker(variables: dict[str, str], arguments: list[str]) -> int:
    worker = os.fork()
    if worker:
        return worker
    os.environ.update(variables)
    sys.stderr = os.fdopen(2, "w")
    try:
        os._exit(main(arguments))
    except BaseException:
        os._exit(1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(recipe_of(240)))
    return place


@pytest.mark.usefixtures("warm")
def test_kills_of_every_kind(
    recipe: Path, launch: Callable[[int], list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_BEAT", 0.2)
    undisturbed = Chaos(forked(launch), recipe, recipe.parent / "undisturbed", random.Random(0))
    undisturbed.go(0)
    killed = Chaos(forked(launch), recipe, recipe.parent / "killed", random.Random(5))
    killed.go(len(KINDS) + 1)
    assert set(killed.landed) == set(KINDS)
    assert killed.lives >= 3
    assert not differences(undisturbed.run, killed.run)


@pytest.mark.slow
def test_torchrun_goes_on_by_itself(recipe: Path) -> None:
    recipe.write_text(yaml.safe_dump(recipe_of(60)))
    killed = Chaos(torchrun, recipe, recipe.parent / "killed", random.Random(5))
    killed.go(1)
    assert killed.lives == 1
