"""Does a run of two processes that is killed again and again end exactly as an undisturbed run?

python benchmarks/chaos.py --kills 32

It kills a worker, the launcher, a worker while a checkpoint is written and a worker during a validation, in this
order again and again. torchrun restarts workers (--max-restarts). If torchrun is killed, its workers must notice and
end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import yaml
from common import report

from insertlm.storage import checkpoints

KINDS = ("worker", "launcher", "save", "validation")
SAVE, VALIDATE = 10, 25
_LONGEST = 120.0  # seconds to wait for anything before it counts as failed
_TIMES = ("steps_per_second", "data_wait")  # in which runs that are the same may differ

Launch = Callable[[Path, Path], int]  # from recipe and run folder to the process id of the launcher


@dataclass
class Chaos:
    """Starts a run and kills its processes. torn: kills that left an unfinished checkpoint
    slowest: longest time in seconds from a kill until all processes from before it have ended
    """

    launch: Launch
    recipe: Path
    run: Path
    chance: random.Random
    landed: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    lives: int = 0
    slowest: float = 0.0

    def go(self, kills: int) -> None:
        """Kill so many times, then wait for the end of the run."""
        launcher = self._start()
        for kind in islice(cycle(KINDS), kills):
            launcher = self._wait_for(kind, launcher)
            workers = _children(launcher)
            _kill(launcher if kind == "launcher" else self.chance.choice(workers))
            self.landed[kind] += 1
            self.torn += any((self.run / "checkpoints").glob(".step-*"))
            self._wait_for_end(workers)
        while not self._at_the_end() or _lives(launcher):
            launcher = self._still(launcher)
            time.sleep(0.05)

    def _start(self) -> int:
        self.lives += 1
        return self.launch(self.recipe, self.run)

    def _still(self, launcher: int) -> int:
        """The launcher, or a new one if it has ended before the run was complete."""
        return launcher if _lives(launcher) or self._at_the_end() else self._start()

    def _at_the_end(self) -> bool:
        return checkpoints.latest(self.run / "checkpoints") == _end(self.run, self.recipe)

    def _wait_for(self, kind: str, launcher: int) -> int:
        """Wait for the moment for a kill of this kind, some steps after the last kill. Returns the launcher."""
        before, end = _newest(self.run), time.monotonic() + _LONGEST
        moments = {"save": self._saving, "validation": self._validating}
        now = moments.get(kind, lambda: True)
        while _newest(self.run)[0] <= before[0] or not now() or len(_children(launcher)) < 2:
            if self._at_the_end() or time.monotonic() > end:
                raise RuntimeError(f"no moment for a kill ({kind}) came; the run is at step {_newest(self.run)[0]}")
            launcher = self._still(launcher)
            time.sleep(0.001)
        if kind not in moments:
            time.sleep(self.chance.uniform(0, 0.3))
        return launcher

    def _saving(self) -> bool:
        """The line of a step is written just before its checkpoint."""
        return _newest(self.run)[0] % SAVE == 0

    def _validating(self) -> bool:
        step, validated = _newest(self.run)
        return step % VALIDATE == 0 and not validated

    def _wait_for_end(self, processes: list[int]) -> None:
        started = time.monotonic()
        while any(map(_lives, processes)):
            if time.monotonic() - started > _LONGEST:
                raise RuntimeError("a process outlives the others")
            time.sleep(0.01)
        self.slowest = max(self.slowest, time.monotonic() - started)


def recipe_of(steps: int) -> dict[str, Any]:
    star = {"degree": 2, "min_nodes": 3, "max_nodes": 4, "min_plan": 2, "nodes": 10, "train": 50, "validation": 300}
    return {
        "task": {"name": "star", **star},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "dropout": 0.1, "prefix_lm": True},
        "optim": {"learning_rate": 3e-3, "warmup": 10, "ema": 0.9, "ema_every": 4},
        "train": {
            "steps": steps,
            "batch_size": 8,
            "log_every": 5,
            "save_every": SAVE,
            "validate_every": VALIDATE,
            "keep_best": True,
        },
        "decode": {"max_steps": 6},
    }


def differences(a: Path, b: Path) -> list[str]:
    """Where the last checkpoints and the logs of two finished runs differ."""
    found = []
    states = [checkpoints.load(end).tensors for end in (_last(a), _last(b))]
    for part, named in states[0].items():
        found += [f"{part}: {name}" for name, x in named.items() if not torch.equal(x, states[1][part][name])]
    logs = [
        [{key: value for key, value in line.items() if key not in _TIMES} for line in _lines(run)] for run in (a, b)
    ]
    return found + [f"line {n} of the log" for n, (x, y) in enumerate(zip_longest(*logs), start=1) if x != y]


def _last(run: Path) -> Path:
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    return newest


def _end(run: Path, recipe: Path) -> Path:
    steps = yaml.safe_load(recipe.read_text())["train"]["steps"]
    return run / "checkpoints" / f"step-{steps:08d}"


def _lines(run: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError):
        yield from (json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines() if x.endswith("}"))


def _newest(run: Path) -> tuple[int, bool]:
    """The step of the newest line of the log, and whether the line is of a validation."""
    line = deque([{"step": -1}, *_lines(run)], 1)[0]
    return line["step"], "validation_token_accuracy" in line


# --- Processes


def torchrun(recipe: Path, run: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1000", "--monitor-interval", "0.1", "-m", "--", "insertlm", "train", str(recipe)]
    command += ["--run", str(run), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log).pid


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(x) for x in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _lives(process: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        recipe = folder / "recipe.yaml"
        steps = 40 * arguments.kills + 100
        recipe.write_text(yaml.safe_dump(recipe_of(steps)))
        undisturbed = Chaos(torchrun, recipe, folder / "undisturbed", random.Random(0))
        undisturbed.go(0)
        chaos = Chaos(torchrun, recipe, folder / "killed", random.Random(arguments.seed))
        chaos.go(arguments.kills)
        found = differences(undisturbed.run, chaos.run)
        report(
            "chaos",
            torch.device("cpu"),
            processes=2,
            steps=steps,
            kills=dict(chaos.landed),
            unfinished_checkpoints=chaos.torn,
            launchers_started=chaos.lives,
            slowest_end_seconds=round(chaos.slowest, 1),
            seconds=round(time.monotonic() - started),
            same_end=not found,
            differences=found[:5],
        )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
