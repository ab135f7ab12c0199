"""The star-graph table: trains and evaluates every family on every task. It can be stopped at any time.

python benchmarks/star_table.py --seeds 1 2 3 --side-by-side 4                      # on a GPU, the whole table
python benchmarks/star_table.py --ahead 2                                           # large models, one at a time
python benchmarks/star_table.py --side-by-side 4 --deadline 550                     # a part: repeat until it is done
python benchmarks/star_table.py --preset mini --rates 1e-4 1e-3 --split validation  # compare learning rates
python benchmarks/star_table.py --preset mini --rates ilm=3e-3 arm=1e-3             # a rate for each family
python benchmarks/star_table.py --render runs/star-table/table.json                 # the results as Markdown

Each experiment is `insertlm train` and `insertlm evaluate` with a recipe. A model is evaluated while the next one
trains. With --ahead, experiments start early and are paused once they have compiled, so that the GPU hardly waits.
Nothing is done twice: an interrupted experiment resumes from its last checkpoint. The results, one record per row of
the table, are written whenever an experiment is done.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from side_by_side import Job
    from star_experiments import Experiment

TASKS = ("easy", "medium", "hard")
FAMILIES = ("ilm", "arm", "mdm", "it", "armo")
MARGIN = 15.0  # seconds before the deadline at which child processes are asked to stop


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; 0 if the table is complete."""
    started = time.monotonic()  # before torch is imported, which takes seconds
    chosen = _arguments(arguments)
    from insertlm.core.errors import InsertlmError
    from insertlm.core.files import place_and_reason

    try:
        return _carry_out(chosen, started)
    except InsertlmError as error:
        _refuse(str(error))
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)  # nobody reads the output any more
    except OSError as error:
        _refuse(place_and_reason(error))


def _carry_out(chosen: argparse.Namespace, started: float) -> int:
    if chosen.render:
        from render_table import markdown

        print(markdown([record for path in chosen.render for record in _records(path)]))
        return 0
    experiments = _experiments(chosen)
    if not experiments:
        _refuse("no recipe for this task and family")
    if chosen.side_by_side < 1 or chosen.ahead < 0:
        _refuse("expected --side-by-side 1 or more, --ahead 0 or more")
    table = _Table(experiments, chosen.folder, chosen.out or chosen.folder / "table.json")
    return table.fill(chosen.side_by_side, chosen.ahead, started + chosen.deadline - MARGIN)


def _refuse(what: str) -> NoReturn:
    print(f"star_table: {what}", file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(message)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="armo exists for star-easy only"
    )
    parser.add_argument("--preset", choices=("mini", "paper"), default="paper", help="of the model (default: paper)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="N", help="of training (default: 1)")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=_rate,
        default=[],
        metavar="R",
        help="learning rates, or FAMILY=R (default: the recipe's)",
    )
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="to evaluate (default: test)")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), dest="changes")
    parser.add_argument("--folder", type=Path, default=Path("runs/star-table"), help="of the runs and their logs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: FOLDER/table.json)")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="trainings at a time (default: 1)")
    parser.add_argument(
        "--ahead", type=int, default=0, metavar="N", help="experiments that wait, compiled (default: 0)"
    )
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="stop after this time")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--render", nargs="+", type=Path, metavar="FILE", help="print the Markdown of such JSON files")
    return parser.parse_args(arguments)


def _experiments(chosen: argparse.Namespace) -> list[Experiment]:
    """All experiments. The first seed of all of them comes before the second seed of any."""
    from star_experiments import RECIPES, Experiment

    changes = tuple((key, value) for key, value in chosen.changes)
    options = ("--device", chosen.device) if chosen.device else ()
    experiments = [
        Experiment(chosen.folder, task, family, chosen.preset, seed, rate, chosen.split, changes, options)
        for seed, task, family in product(chosen.seeds, chosen.tasks, chosen.families)
        if (RECIPES / f"star_{task}" / f"{family}.yaml").is_file()
        for rate in _rates(chosen.rates, family)
    ]
    for experiment in experiments:
        _ = experiment.recipe  # a wrong recipe is refused before anything is written
    return experiments


def _records(path: Path) -> list[dict[str, Any]]:
    from render_table import markdown

    try:
        records: list[dict[str, Any]] = json.loads(path.read_bytes())
        markdown(records)
    except (ValueError, TypeError, KeyError) as error:
        _refuse(f"{path}: expected a table that this script wrote ({type(error).__name__}: {error})")
    return records


def _rate(word: str) -> str:
    family = word.rpartition("=")[0]
    if family and family not in FAMILIES:
        raise argparse.ArgumentTypeError(f"unknown family {family!r}; expected one of {', '.join(FAMILIES)}")
    return word


def _rates(words: Sequence[str], family: str) -> Sequence[str | None]:
    """The rates given for this family, else those given for all, else the recipe's."""
    own = [word.removeprefix(f"{family}=") for word in words if word.startswith(f"{family}=")]
    return own or [word for word in words if "=" not in word] or [None]


class _Table:
    """The experiments with the records of those that are done and the problems of those that failed."""

    def __init__(self, experiments: Sequence[Experiment], folder: Path, out: Path) -> None:
        self.experiments = {experiment.name: experiment for experiment in experiments}
        self.folder, self.out = folder, out
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.problems: dict[str, str] = {}

    def fill(self, at_once: int, ahead: int, until: float) -> int:
        from side_by_side import run

        self.folder.mkdir(parents=True, exist_ok=True)
        jobs = [job for experiment in self.experiments.values() if (job := self._job(experiment))]
        self._write()  # an unwritable file should be noticed before hours of training
        run(jobs, at_once, lambda job, problem: self._ended(job.name, problem), until, ahead=ahead)
        cut_off = [name for name in self.experiments if name not in self.records and name not in self.problems]
        for name in cut_off:  # some of their evaluations may be done
            self.records[name] = self.experiments[name].records()
        self._write()
        self._print()
        if cut_off:
            print(f"stopped with {len(cut_off)} to go; the same command goes on")
        return 1 if cut_off or self.problems else 0

    def _job(self, experiment: Experiment) -> Job | None:
        """The commands that are left, if there are any."""
        from side_by_side import Job

        from insertlm.core.errors import InsertlmError

        try:
            missing = experiment.missing()
        except InsertlmError as error:
            self._ended(experiment.name, str(error))
            return None
        if not missing:
            self._ended(experiment.name, None)
            return None
        commands = [[sys.executable, "-m", "insertlm", *words] for words in missing]
        return Job(experiment.name, commands, self._log(experiment.name), experiment.warm)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _ended(self, name: str, problem: str | None) -> None:
        records = [] if problem else self.experiments[name].records()
        if records:
            self.records[name] = records
            self._write()
            parts = [f"{record['decoding']} {record['sequence_accuracy']:.1f} %".strip() for record in records]
            word = f"{', '.join(parts)} exact, {records[0]['training_minutes']:.1f} min of training"
        else:
            self.problems[name] = problem or "it left no results"
            word = f"FAILED: {self.problems[name]}" + (f" (log: {log})" if (log := self._log(name)).is_file() else "")
        print(f"{len(self.records) + len(self.problems)} of {len(self.experiments)}  {name}: {word}", flush=True)

    def _write(self) -> None:
        from insertlm.core.files import write_atomically

        records = [record for name in self.experiments for record in self.records.get(name, [])]
        write_atomically(self.out, f"{json.dumps(records, indent=2)}\n".encode())

    def _print(self) -> None:
        from rich.table import Table

        from insertlm.cli.terminal import standard_output

        table = Table("experiment", "decoding", box=None)
        for name in ("exact %", "token %", "minutes"):
            table.add_column(name, justify="right")
        for name in self.experiments:
            for each in self.records.get(name, []):
                numbers = (each["sequence_accuracy"], each["token_accuracy"], each["training_minutes"])
                table.add_row(name, each["decoding"], *(f"{number:.1f}" for number in numbers))
            if name in self.problems:
                table.add_row(name, "failed")
        console = standard_output()
        console.print(table)
        console.print(f"wrote {self.out}")


if __name__ == "__main__":
    sys.exit(main())
