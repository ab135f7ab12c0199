"""The commands `models`, `info` and `compare`: which models there are, what one of them is, and runs side by side.

No weights are read: a folder of many models is listed in a moment, and one whose weights are damaged is described.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

if TYPE_CHECKING:
    from insertlm.families.base import Family
    from insertlm.recipe import Recipe

__all__ = ["compare", "info", "models"]

_UNKNOWN = "–"
# Abilities (families/abilities.py) in words.
_ABLE = {
    "decides_length": "decide how long a text is",
    "appends": "continue texts",
    "left_to_right": "fill a blank from left to right, so with choices and patterns",
    "supports_constraints": "keep bounds on lengths, banned and required words",
    "takes_hints": "take hints of a length in words",
    "parallel": "write several tokens a step",
    "draws_places": "sample where to write",
    "stop_threshold": "be told how sure an end must be",
}


@dataclass(frozen=True)
class _Listed:
    """A line of `models`. steps: of training so far   about: what the model is for, or why it cannot be read"""

    name: str
    bundled: bool
    task: str | None
    family: str | None
    parameters: int | None
    steps: int | None
    about: str


def models(args: Namespace) -> None:
    from insertlm.cli.terminal import grid, standard_output
    from insertlm.storage.folders import bundled, find

    runs = sorted(place.parent for place in args.folder.glob("*/recipe.yaml"))
    found = [_listed(name, find(name), bundled=True) for name in bundled()]
    found += [_listed(str(run), run, bundled=False) for run in runs]
    if args.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    rows = [
        [
            each.name,
            each.task or _UNKNOWN,
            each.family or _UNKNOWN,
            _size(each.parameters),
            _number(each.steps),
            each.about,
        ]
        for each in found
    ]
    standard_output().print(grid(["model", "task", "family", "size", "steps", "for"], rows, texts=(0, 1, 2, 5)))
    if not runs:
        print(f"\nno runs in {args.folder}; insertlm train RECIPE makes one")


def _listed(name: str, folder: Path, *, bundled: bool) -> _Listed:
    try:
        recipe, family = _read(folder)
        steps = _steps(folder, recipe)
        about = _about(folder) or _purpose(recipe, family)
    except InsertlmError as error:  # one bad folder should not hide the others
        return _Listed(name, bundled, None, None, None, None, f"cannot be read: {error}")
    return _Listed(name, bundled, recipe.task.tag, recipe.family.tag, _parameters(family), steps, about)


def info(args: Namespace) -> None:
    from insertlm.cli.terminal import results_table, standard_output
    from insertlm.recipe import portable
    from insertlm.storage import checkpoints
    from insertlm.storage.folders import find

    folder = find(args.model)
    recipe, family = _read(folder)
    task, shape, steps = recipe.task, recipe.model, _steps(folder, recipe)
    newest = None if _released(folder) else checkpoints.latest(folder / "checkpoints")
    files = [folder / "model.safetensors"] if newest is None else [*newest.glob("ema*.safetensors")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    record: dict[str, Any] = {
        "name": args.model,
        "folder": str(folder.resolve()),
        "about": _about(folder) or _purpose(recipe, family),
        "task": task.tag,
        "family": recipe.family.tag,
        "parameters": _parameters(family),
        "weights_bytes": size,
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "hidden": shape.hidden,
        "vocabulary": task.tokenizer.size,
        "longest_text": family.longest_text,
        "abilities": asdict(family.abilities),
        "decode": msgspec.to_builtins(recipe.decode),
        "steps": steps,
        "batch_size": recipe.train.batch_size,
        "data": list(portable(recipe).task.sources),
    }
    if args.json:
        print(json.dumps(record, indent=2))
        return
    decode, usual = record["decode"], msgspec.to_builtins(type(recipe.decode)())
    able = [what for name, what in _ABLE.items() if getattr(family.abilities, name)]
    orders = ", ".join(family.abilities.orders)
    rows = [
        ("for", record["about"]),
        ("task", f"{task.tag}: {task.things}"),
        ("family", recipe.family.tag),
        ("weights", f"{record['parameters']:,}, {_bytes(size)}" if size else "none yet"),
        ("shape", f"{shape.layers} layers × width {shape.width}, {shape.heads} heads, feed-forward {shape.hidden}"),
        ("vocabulary", f"{record['vocabulary']:,} tokens"),
        ("longest text", f"{record['longest_text']:,} tokens"),
        ("can", ", ".join(able) or _UNKNOWN),
        *([("orders of writing", orders)] if orders else []),
        ("decode", ", ".join(f"{key} {value}" for key, value in decode.items() if value != usual[key]) or "as usual"),
        ("trained", f"{_number(steps)} steps of {recipe.train.batch_size:,}"),
        ("on", ", ".join(record["data"]) or f"{task.things} that the package makes"),
        ("folder", record["folder"]),
    ]
    standard_output().print(results_table([(name, "", value) for name, value in rows]))


# --- Runs side by side


@dataclass(frozen=True)
class _Evaluation:
    """A file of `insertlm evaluate` in a run's folder. name: split, checkpoint and settings   shown: its figures"""

    name: str
    shown: str
    record: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    """A line of `compare`. steps, minutes: of training so far   validation: the last one, an accuracy in percent or a
    loss   evaluations: the files of `insertlm evaluate` in its folder"""

    run: str
    task: str
    family: str
    parameters: int
    steps: int
    minutes: float
    validation: float | None
    measured: str
    evaluations: list[_Evaluation]


def compare(args: Namespace) -> None:
    from insertlm.cli.terminal import grid, standard_output

    found = [_run(Path(run)) for run in args.runs]
    if args.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    rows = [
        [
            each.run,
            each.task,
            each.family,
            _size(each.parameters),
            f"{each.steps:,}",
            _minutes(each.minutes),
            _validation(each),
            "\n".join(f"{one.name}: {one.shown}" for one in each.evaluations) or _UNKNOWN,
        ]
        for each in found
    ]
    head = ["run", "task", "family", "size", "steps", "time", "last validation", "evaluations"]
    standard_output().print(grid(head, rows, texts=(0, 1, 2, 7)))


def _run(run: Path) -> _Run:
    from insertlm.training.metrics import accuracies, read_metrics, training_seconds, validation_losses

    if not (run / "recipe.yaml").is_file():
        raise InsertlmError(f"{run}: no run there; expected a run folder with recipe.yaml")
    recipe, family = _read(run)
    log = read_metrics(run / "metrics.jsonl")
    steps = max((measure.step for measure in log), default=0)
    [seconds] = training_seconds(log, [steps])
    shares, losses = accuracies(log), validation_losses(log)
    values = shares or losses
    return _Run(
        run=str(run),
        task=recipe.task.tag,
        family=recipe.family.tag,
        parameters=_parameters(family),
        steps=steps,
        minutes=seconds / 60,
        validation=values[-1][1] if values else None,
        measured="accuracy" if shares else "loss" if losses else "",
        evaluations=[_evaluation(file) for file in sorted(run.glob("evaluation-*.json"), key=_stem)],
    )


def _stem(file: Path) -> str:
    return file.stem  # so that a plain evaluation comes before those with other settings


def _evaluation(file: Path) -> _Evaluation:
    try:
        record = json.loads(file.read_bytes())
        shown = _figures(record)
    except OSError as error:
        raise InsertlmError(f"{file}: cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InsertlmError(f"{file}: expected a result of insertlm evaluate RUN") from error
    return _Evaluation(file.stem.removeprefix("evaluation-"), shown, record)


def _figures(record: dict[str, Any]) -> str:
    if "sequence_accuracy" in record:
        return f"{record['sequence_accuracy']:.2f} % of {record['count']:,}"
    likelihood, filled = record["likelihood"], record["infilling"]
    figures = [] if likelihood is None else [f"NLL per word {likelihood['nll_per_word']:.3f}"]
    figures += [] if filled is None else [f"ROUGE-L {filled['overlap']['rougeL']['value']:.1f}"]
    return ", ".join(figures) or _UNKNOWN


# --- What is read of a folder


def _read(folder: Path) -> tuple[Recipe, Family]:
    """The recipe of a model, and the model without its weights."""
    from insertlm.recipe import build_family, load_recipe

    recipe = load_recipe(folder / "recipe.yaml")
    recipe = msgspec.structs.replace(recipe, task=recipe.task.with_files(folder))
    return recipe, build_family(recipe, hollow=True)


def _released(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def _steps(folder: Path, recipe: Recipe) -> int:
    """Of the newest checkpoint; of a released model, those of its recipe."""
    from insertlm.storage import checkpoints

    if _released(folder):
        return recipe.train.steps
    newest = checkpoints.latest(folder / "checkpoints")
    return 0 if newest is None else checkpoints.step_of(newest)


def _parameters(family: Family) -> int:
    return sum(parameter.numel() for parameter in family.parameters())


class _Told(msgspec.Struct):
    """The one field that is read of a model's examples.json; see server/examples.py."""

    about: str | None = None


def _about(folder: Path) -> str | None:
    file = folder / "examples.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Told).about
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InsertlmError(f"{file}: cannot be read: {reason(error)}") from error
    except msgspec.DecodeError as error:
        raise InsertlmError(f"{file}: {error}") from error


def _purpose(recipe: Recipe, family: Family) -> str:
    """What a model that says nothing of itself is for, from its task and its family."""
    from insertlm.recipe import portable

    if recipe.task.has_answers:
        return f"solves {recipe.task.things}"
    able = family.abilities
    what = "continues" if able.appends else "fills in" if able.decides_length else "fills in blanks of told lengths in"
    first, *others = portable(recipe).task.sources or ("its corpus",)
    more = f" and {len(others)} more" if others else ""
    return f"{what} texts like those of {first}{more}"


# --- Units


def _size(parameters: int | None) -> str:
    if parameters is None:
        return _UNKNOWN
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


def _bytes(size: int) -> str:
    for unit, name in ((10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _number(number: int | None) -> str:
    return _UNKNOWN if number is None else f"{number:,}"


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.0f} s" if minutes < 2 else f"{minutes:.1f} min"


def _validation(run: _Run) -> str:
    if run.validation is None:
        return _UNKNOWN
    return f"{run.validation:.2f} %" if run.measured == "accuracy" else f"loss {run.validation:.4f}"
