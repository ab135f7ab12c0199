"""What several commands do: load the model that the arguments name, let it write, tell models apart, share work."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, write_atomically
from insertlm.inference.trajectory import Trajectory
from insertlm.tasks.base import Examples, Task

if TYPE_CHECKING:
    from insertlm.core.processes import Processes
    from insertlm.inference.settings import DecodeConfig, Prompt
    from insertlm.model import Model
    from insertlm.recipe import Recipe

__all__ = [
    "fresh_prompts",
    "labels_of",
    "load_model",
    "prompts_of",
    "settings_of",
    "shared_work",
    "short_names",
    "solved_of",
    "split_of",
    "standard_input",
    "write",
    "write_json_lines",
]

_BATCH = 64  # sequences written at once


def load_model(args: Namespace) -> Model:
    from insertlm.model import GRAPHS, load

    return load(
        GRAPHS if args.model is None else args.model, args.device, checkpoint=getattr(args, "checkpoint", "last")
    )


def settings_of(model: Model, args: Namespace) -> DecodeConfig:
    return model.settings(args.overrides)


def labels_of(recipes: Sequence[Recipe], places: Sequence[str | Path]) -> list[str]:
    """A label for each recipe: the name of its family, and where several recipes share it, that of the model."""
    # By recipe, because runs of equal recipes share a label.
    names = {recipe: recipe.family.tag.upper() for recipe in recipes}
    shared = Counter(names.values())
    labels: dict[Recipe, str] = {}
    for recipe, place in zip(recipes, short_names(places), strict=True):
        name = names[recipe]
        labels.setdefault(recipe, name if shared[name] == 1 else f"{name} ({place})")
    return [labels[recipe] for recipe in recipes]


def short_names(places: Sequence[str | Path]) -> list[str]:
    """The last part of each path; all of it where that would be the name of another one, too."""
    names = {str(place): Path(place).name or str(place) for place in places}
    shared = Counter(names.values())
    return [names[path] if shared[names[path]] == 1 else path for path in map(str, places)]


def split_of(task: Task, args: Namespace) -> Examples:
    """The examples of `--split`, all or the first `--count`."""
    if args.count is not None and args.count > (size := task.split_size(args.split)):
        raise InsertlmError(f"--count {args.count:,}: the {args.split} split has {size:,} {task.things}")
    return task.examples(args.split, args.count)


def prompts_of(examples: Examples, seed: int) -> list[Prompt]:
    from insertlm.inference.settings import Prompt

    return [Prompt(example.prefix, seed + number) for number, example in enumerate(examples)]


def fresh_prompts(task: Task, count: int, seed: int) -> tuple[list[Prompt], Examples | None]:
    """Prompts of examples that are in no split, with the examples. A task without answers has empty prompts and no
    examples."""
    from insertlm.inference.settings import Prompt

    if not task.has_answers:
        return [Prompt([], seed + number) for number in range(count)], None
    examples = task.examples("test", count, seed)
    return prompts_of(examples, seed), examples


def write(
    model: Model, prompts: Sequence[Prompt], args: Namespace, processes: Processes | None = None
) -> list[Trajectory]:
    return list(model.write(prompts, settings_of(model, args), _BATCH, processes=processes))


def solved_of(model: Model, written: Sequence[Trajectory], examples: Examples) -> list[bool]:
    scores = (
        model.recipe.task.scores(example, trajectory.ids) for trajectory, example in zip(written, examples, strict=True)
    )
    return [score["sequence_accuracy"] == 1 for score in scores]


def standard_input() -> bytes:
    """All of it."""
    if sys.stdin is None:
        raise InsertlmError("standard input is closed; expected a text on it")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:  # such as a folder
        raise InsertlmError(f"standard input cannot be read: {reason(error)}") from error


@contextmanager
def shared_work(args: Namespace) -> Iterator[Processes]:
    """The processes that share the work of a command. `--device` becomes the device of this process."""
    from insertlm.core.processes import joined
    from insertlm.model import choose_device

    with joined(choose_device(args.device)) as processes:
        args.device = str(processes.device)
        yield processes


def write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    # Texts stay readable in an editor; the file is UTF-8.
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
