"""The tutorial, shortened: a model trained from nothing by the command line learns its task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from insertlm.cli.main import main; sys.exit(main())"]


def insertlm(*arguments: str | Path) -> None:
    """In a process of its own, with as many threads as there are cores: this is real training."""
    subprocess.run([*COMMAND, *map(str, arguments), "--device", "cpu"], check=True, stdout=subprocess.DEVNULL)


def test_the_tutorial_learns(tmp_path: Path) -> None:
    run, scores = tmp_path / "run", tmp_path / "scores.json"
    recipe = ROOT / "recipes" / "star_cpu" / "ilm.yaml"
    shorter = ("--train.steps", "2200", "--train.validate_every", "0", "--task.train", "60000")
    insertlm("train", recipe, "--run", run, *shorter)
    insertlm("evaluate", run, "--count", "500", "--out", scores)
    # Guessing the arm would solve half of the graphs; a model that has not understood edges solves next to none.
    assert json.loads(scores.read_text())["sequence_accuracy"] >= 80
