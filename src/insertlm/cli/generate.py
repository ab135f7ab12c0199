"""The command `generate`: sequences, and how each was written."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.cli.common import fresh_prompts, load_model, shared_work, solved_of, write
from insertlm.core.errors import InsertlmError
from insertlm.inference.trajectory import Trajectory
from insertlm.tasks.base import Example

if TYPE_CHECKING:
    from insertlm.core.processes import Processes
    from insertlm.model import Model

__all__ = ["generate"]

_LISTED = 10  # most results that are listed


def generate(args: Namespace) -> None:
    if args.prompt is not None and args.count is not None:
        raise InsertlmError("--prompt and --count: expected one of them")
    with shared_work(args) as processes:
        _generate(args, processes)


def _generate(args: Namespace, processes: Processes) -> None:
    from insertlm.inference.settings import Prompt

    model = load_model(args)
    task, count = model.recipe.task, args.count or 5
    examples = None
    if args.prompt is not None:
        prompts = [Prompt(task.parse_prompt(args.prompt), args.seed)]
    else:
        prompts, examples = fresh_prompts(task, count, args.seed)
    start = time.perf_counter()
    written = write(model, prompts, args, processes)
    seconds = time.perf_counter() - start
    if not processes.first:
        return
    solved = None if examples is None else solved_of(model, written, examples)
    if args.json:
        _print_json(model, written, solved)
        return
    # Without --prompt the answers are known: the list of results comes first, then one sequence in full.
    if solved is not None:
        things = model.recipe.task.things
        print(f"solved {sum(solved)} of {len(solved)} fresh {things} (seed {args.seed}) in {seconds:.1f} s")
        _print_list(model, written, solved)
    for number, trajectory in enumerate(written if args.show or solved is None else written[:1]):
        if number or solved is not None:
            print()
        _print_sequence(model, trajectory, steps=args.show or solved is not None)


def _print_json(model: Model, written: Sequence[Trajectory], solved: Sequence[bool] | None) -> None:
    for number, trajectory in enumerate(written):
        record = {
            "prompt": model.decode(trajectory.prefix),
            "text": model.decode(trajectory.ids),
            "solved": solved[number] if solved else None,
            "complete": trajectory.complete,
            "stop_probability": trajectory.stop_probability,
            "events": [{**event._asdict(), "token": model.decode([event.token])} for event in trajectory.events],
        }
        print(json.dumps(record))


def _print_list(model: Model, written: Sequence[Trajectory], solved: Sequence[bool]) -> None:
    from insertlm.cli.terminal import standard_output, verdict

    console = standard_output()
    for trajectory, good in zip(written[:_LISTED], solved, strict=False):
        console.print(verdict(good, model.decode(trajectory.ids)), soft_wrap=True)
    if len(written) > _LISTED:
        print(f"  … and {len(written) - _LISTED:,} more")


def _print_sequence(model: Model, trajectory: Trajectory, *, steps: bool) -> None:
    from insertlm.cli.terminal import show_trajectory, standard_output

    print(model.recipe.task.render(Example(trajectory.prefix, trajectory.ids)))
    if steps:
        print()
        console = standard_output()
        console.print(show_trajectory(trajectory, lambda token: model.decode([token]), console.width))
