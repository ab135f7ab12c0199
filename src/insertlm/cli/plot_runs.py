"""The plots of runs and of what their models write: `plot trajectory | graph | puzzle | training`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins
from msgspec.structs import replace

from insertlm.cli.common import fresh_prompts, labels_of, load_model, prompts_of, solved_of, write
from insertlm.core.errors import InsertlmError
from insertlm.tasks.base import expect_task
from insertlm.tasks.registry import name_and_things, preset
from insertlm.tasks.star import Star, edges_of
from insertlm.tasks.zebra.clues import read
from insertlm.tasks.zebra.task import Zebra, in_threes

if TYPE_CHECKING:
    from insertlm.plots import Stage
    from insertlm.recipe import Recipe
    from insertlm.training.metrics import Measure

__all__ = ["plot_graph", "plot_puzzle", "plot_training", "plot_trajectory"]


def plot_trajectory(args: Namespace) -> None:
    from insertlm.model import GRAPHS, load
    from insertlm.plots import Panel, check_place, comparison_figure, save

    check_place(args.out)
    places = args.models or [GRAPHS]
    models = [load(place, args.device) for place in places]
    titles = labels_of([model.recipe for model in models], places) if len(models) > 1 else [""]
    asked = [fresh_prompts(model.recipe.task, args.count, args.seed) for model in models]
    sizes = [model.recipe.task.tokenizer.size for model in models]
    # Panels compare the same prompts, so all models must have the same task and vocabulary.
    for place, (prompts, _), size in zip(places, asked, sizes, strict=True):
        if (prompts, size) != (asked[0][0], sizes[0]):
            raise InsertlmError(f"{place} has another task than {places[0]}; expected models of one task")
    panels = []
    for model, (prompts, examples), title in zip(models, asked, titles, strict=True):
        written = write(model, prompts, args)
        solved = None if examples is None else solved_of(model, written, examples)
        result = "" if solved is None else f"{sum(solved)} of {len(solved)} solved"
        panels.append(Panel(written, solved, ": ".join(filter(None, (title, result)))))
    name, things = _about(models[0].recipe)
    what = "texts from nothing" if asked[0][1] is None else f"fresh {name} {things}"
    title = f"{args.count:,} {what}, seed {args.seed}"
    save(comparison_figure(panels, lambda token: models[0].decode([token]), title), args.out)
    print(f"wrote {args.out}")


def plot_training(args: Namespace) -> None:
    from insertlm.plots import Curve, LossCurve, check_place, loss_figure, save, sized, training_figure
    from insertlm.recipe import load_recipe
    from insertlm.training.metrics import accuracies, losses, read_metrics, validation_losses

    check_place(args.out)
    logs = {run: read_metrics(run / "metrics.jsonl") for run in args.runs}
    recipes = {
        run: load_recipe(run / "recipe.yaml", [("train.seed", "0")]) for run in args.runs
    }  # runs that differ only in their seed share a label
    answers = {run: recipe.task.has_answers for run, recipe in recipes.items()}
    if len({*answers.values()}) > 1:
        texts, tasks = (next(run for run in args.runs if answers[run] is kind) for kind in (False, True))
        raise InsertlmError(f"{tasks} has accuracies and {texts}, a run of text, losses; expected runs of one kind")
    solves = all(answers.values())
    if silent := [str(run) for run, log in logs.items() if not (accuracies if solves else losses)(log)]:
        hint = "validation accuracy in {}; expected runs with train.validate_every above 0"
        wanted = hint if solves else "loss in {}; expected runs that have begun"
        raise InsertlmError(f"no {wanted.format(', '.join(silent))}")
    stages = _stages(recipes)
    lasts = [last for *_, last in stages]  # if an ILM began with the weights of an ARM, the line is labelled ILM
    labels = labels_of([_alone(recipes[run]) for run in lasts], lasts)
    over_steps = args.over == "steps"
    abouts = {_about(recipe) for recipe in recipes.values()}
    name, things = abouts.pop() if len(abouts) == 1 else ("several tasks", "examples")
    chains = [(label, {run: logs[run] for run in runs}) for label, runs in zip(labels, stages, strict=True)]
    if solves:
        curves = [Curve(label, _joined(chain, accuracies, over_steps=over_steps)) for label, chain in chains]
        counts = [to_builtins(recipe.task)["validation"] for recipe in recipes.values()]
        title = f"{name}: {sized(counts, f'validation {things}')}"
        save(training_figure(curves, title, over_steps=over_steps), args.out)
    else:
        every = [
            LossCurve(label, _joined(chain, of, over_steps=over_steps), learning=of is losses)
            for label, chain in chains
            for of in (losses, validation_losses)
        ]
        # A training without validations has losses all the same.
        drawn = [curve for curve in every if any(stage.x for stage in curve.stages)]
        save(loss_figure(drawn, f"{name}: losses", over_steps=over_steps), args.out)
    print(f"wrote {args.out}")


def _about(recipe: Recipe) -> tuple[str, str]:
    return name_and_things(to_builtins(recipe.task))


def _alone(recipe: Recipe) -> Recipe:
    """The recipe without what it began with."""
    return replace(recipe, train=replace(recipe.train, start=""))


def _stages(recipes: Mapping[Path, Recipe]) -> list[list[Path]]:
    """Chains of runs trained in stages, each from the first run to the last, from which no other run began."""
    before = {run: _begun_with(recipe.train.start, recipes.keys() - {run}) for run, recipe in recipes.items()}
    chains = []
    for run in recipes:
        chain = [run]
        while (earlier := before[chain[0]]) is not None and earlier not in chain:
            chain.insert(0, earlier)
        chains.append(chain)
    return [chain for chain in chains if not any(chain[-1] in other[:-1] for other in chains)]


def _begun_with(start: str, runs: Collection[Path]) -> Path | None:
    """The run that `start` names: the folder itself or, if it has moved since, the only run of that name."""
    place = Path(start)
    if start and place.exists():
        return next((run for run in runs if run.resolve() == place.resolve()), None)
    namesakes = [run for run in runs if run.resolve().name == place.name]
    return namesakes[0] if len(namesakes) == 1 else None


def _joined(
    logs: Mapping[Path, Sequence[Measure]],
    of: Callable[[Sequence[Measure]], list[tuple[int, float]]],
    *,
    over_steps: bool,
) -> list[Stage]:
    """What all stages measured, each after the end of the stage before. of: steps and values of a log"""
    from insertlm.plots import Stage
    from insertlm.training.metrics import training_seconds

    stages, end = list[Stage](), 0.0
    for run, log in logs.items():
        found = of(log)
        steps = [step for step, _ in found]
        last = max(measure.step for measure in log)
        own: list[float] = [*steps, last] if over_steps else training_seconds(log, [*steps, last])
        stages.append(Stage(run.resolve().name, [end + place for place in own[:-1]], [value for _, value in found]))
        end += own[-1]  # training went on after the last validation
    return stages


def plot_graph(args: Namespace) -> None:
    from insertlm.plots import check_place, graph_figure, save

    check_place(args.out)
    if args.name and args.model:
        raise InsertlmError("NAME and --model: expected one of them; a model draws graphs of its own task")
    model = load_model(args) if args.model else None
    name = args.name or "star-hard"
    task = expect_task(model.recipe.task if model else preset(name), Star, args.model or name)
    examples = task.examples("test", 1, args.seed)
    target = write(model, prompts_of(examples, args.seed), args)[0].ids if model else examples[0].target
    *flat, source, goal = examples[0].prefix
    about, _ = name_and_things(to_builtins(task))
    title = f"A graph of {about}, seed {args.seed}"
    save(graph_figure(edges_of(flat), source, goal, task.path(target), title), args.out)
    print(f"wrote {args.out}")


def plot_puzzle(args: Namespace) -> None:
    from insertlm.plots import Written, check_place, puzzle_figure, save

    check_place(args.out)
    model = load_model(args)
    task = expect_task(model.recipe.task, Zebra, args.model)
    examples = task.examples("test", 1, args.seed)
    [trajectory] = write(model, prompts_of(examples, args.seed), args)
    [(prefix, target)] = examples
    ids, spell = trajectory.ids, task.tokenizer.decode
    found = zip(task.triples(ids), in_threes(trajectory.turns), in_threes(ids), strict=True)
    written = [Written(triple, max(turns), spell(words)) for triple, turns, words in found]
    street = read(spell(prefix))
    title = f"A zebra puzzle of {street.size} houses and {street.attributes} attributes, seed {args.seed}"
    save(puzzle_figure(street, written, task.triples(target), title), args.out)
    print(f"wrote {args.out}")
