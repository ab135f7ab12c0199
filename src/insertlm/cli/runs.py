"""The commands that train and run models on tasks: `train`, `evaluate RUN`, `generate`, `data`, `solve`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from insertlm.cli.loading import fresh_prompts, load_model, settings_of, solved_of, write
from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, reason, write_atomically
from insertlm.inference.trajectory import Trajectory
from insertlm.tasks.base import Example
from insertlm.tasks.registry import preset

if TYPE_CHECKING:
    from insertlm.core.processes import Processes
    from insertlm.evaluation.report import Scores
    from insertlm.inference.settings import DecodeConfig
    from insertlm.model import Model
    from insertlm.recipe import Recipe

__all__ = ["data", "evaluate", "generate", "solve", "train"]

_LISTED = 10  # results of `generate` that get a line each


def train(args: Namespace) -> None:
    from insertlm.cli.terminal import standard_output
    from insertlm.core.processes import RESUME, joined
    from insertlm.model import choose_device
    from insertlm.recipe import load_recipe
    from insertlm.training.loop import train as train_model

    with joined(choose_device(args.device)) as processes:
        recipe = load_recipe(args.recipe, args.overrides)
        run = args.run or Path("runs") / f"{args.recipe.resolve().parent.name}-{args.recipe.stem}"
        several = f", {processes.world} processes" if processes.world > 1 else ""
        if processes.first:
            print(f"run: {run} on {processes.device}{several}", flush=True)
        finished = train_model(recipe, run, processes, standard_output())
        if not finished:
            if processes.first:
                print(f"insertlm: asked to stop; run the same command again to go on in {run}", file=sys.stderr)
            raise SystemExit(RESUME)
        if processes.first:
            what = "evaluate" if recipe.task.has_answers else "generate"
            print(f"trained {recipe.train.steps:,} steps; {what} with: insertlm {what} {shlex.quote(str(run))}")


def evaluate(args: Namespace) -> None:
    with _sharing(args) as processes:
        _evaluate(args, processes)


def _evaluate(args: Namespace, processes: Processes) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.report import evaluate as evaluate_family

    model = load_model(args)
    if not model.recipe.task.has_answers:
        raise InsertlmError(f"{args.model} writes from nothing, so no text is the right one; expected a model of tasks")
    settings = settings_of(model, args)
    out = args.out or (None if model.bundled else model.folder / _evaluation_name(args.split, settings, model.recipe))
    if out:
        check_writable(out)
    task, size = model.recipe.task, args.batch_size
    examples = task.examples(args.split, args.count)
    with progress_bar("evaluating", len(examples)) if processes.first else nullcontext(_no_progress) as advance:
        scores = evaluate_family(model.family, task, examples, settings, size, advance, processes)
    if not processes.first:
        return
    if out:  # before anything is printed, for the reader may be gone
        record = _record(scores, model, settings, args)
        write_atomically(out, f"{json.dumps(record, indent=2)}\n".encode())
    _print_scores(scores, model, args)
    if out:
        print(f"wrote {out}")


def _evaluation_name(split: str, settings: DecodeConfig, recipe: Recipe) -> str:
    """With the settings that are not the recipe's, so that ways of writing have a file each."""
    chosen, usual = msgspec.to_builtins(settings), msgspec.to_builtins(recipe.decode)
    changed = [f"{key}-{value}".lower() for key, value in chosen.items() if value != usual[key]]
    return f"{'-'.join(['evaluation', split, *changed])}.json"


def generate(args: Namespace) -> None:
    if args.prompt is not None and args.count is not None:
        raise InsertlmError("--prompt and --count: expected one of them")
    with _sharing(args) as processes:
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
    if solved is not None:
        things = model.recipe.task.things
        print(f"solved {sum(solved)} of {len(solved)} fresh {things} (seed {args.seed}) in {seconds:.1f} s")
        _print_list(model, written, solved)
    for number, trajectory in enumerate(written if args.show or solved is None else written[:1]):
        if number or solved is not None:
            print()
        _print_sequence(model, trajectory, steps=args.show or solved is not None)


def data(args: Namespace) -> None:
    if args.name == "tokenizer":
        _make_tokenizer(args.files, args.size, args.out or Path("tokenizer.json"))
        return
    if args.files:
        raise InsertlmError(f"unknown argument {args.files[0]}; see insertlm data --help")
    task = preset(args.name)
    if args.out is not None:
        check_writable(args.out)
    examples = task.examples(args.split, args.count, args.seed)
    if args.out is None:
        print("\n\n".join(task.render(example) for example in examples))
        return
    text = task.tokenizer.decode
    lines = [json.dumps({"prefix": text(prefix), "target": text(target)}) for prefix, target in examples]
    write_atomically(args.out, "".join(f"{line}\n" for line in lines).encode())
    print(f"wrote {len(lines):,} examples to {args.out}")


def solve(args: Namespace) -> None:
    from insertlm.tasks.zebra.clues import SIDE, name, read
    from insertlm.tasks.zebra.solver import solve as solve_street
    from insertlm.tasks.zebra.task import table

    try:
        text = (sys.stdin.buffer.read() if str(args.file) == "-" else args.file.read_bytes()).decode()
    except OSError as error:
        raise InsertlmError(f"{args.file}: cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise InsertlmError(f"{args.file}: is not text; expected clues") from error
    street = read(text)
    found = solve_street(street)
    triples = [(cell // SIDE, house, cell % SIDE) for cell, house in found]
    print(f"{table(street, triples)}\n")
    print("order ", ", ".join(f"{name(cell)} in {house}" for cell, house in found))
    print("target", " ".join(str(number) for triple in triples for number in triple))


def _make_tokenizer(files: Sequence[str], size: int, out: Path) -> None:
    from insertlm.data.sources import source_of, texts
    from insertlm.text.subwords import train_bpe

    if not files:
        raise InsertlmError("data tokenizer: expected one or more files of text")
    check_writable(out)
    found = texts(map(source_of, files))
    first = next(found, None)
    if first is None:
        line = 'expected a text a line, in .jsonl as {"text": …}'
        raise InsertlmError(f"no usable document in {', '.join(files)}; {line}")
    tokenizer = train_bpe(chain([first], found), size)
    tokenizer.save(out)
    print(f"wrote {out}: {tokenizer.size:,} tokens")


# --- Several processes


@contextmanager
def _sharing(args: Namespace) -> Iterator[Processes]:
    """The processes that share the work of a command; this one's device becomes the command's."""
    from insertlm.core.processes import joined
    from insertlm.model import choose_device

    with joined(choose_device(args.device)) as processes:
        args.device = str(processes.device)
        yield processes


def _no_progress(done: int) -> None:
    """For processes that have nothing to show."""


# --- Printing and recording


def _print_scores(scores: Scores, model: Model, args: Namespace) -> None:
    from insertlm.cli.terminal import results_table, standard_output

    print(args.model, *([] if model.step is None else [f"step {model.step:,}"]), f"{args.split} split", sep=", ")
    rows = [
        ("sequence accuracy", f"{scores.sequence_accuracy:.2f} %", "of examples solved"),
        ("token accuracy", f"{scores.token_accuracy:.2f} %", "of what is to be written"),
        *((name.replace("_", " "), f"{share:.2f} %", "") for name, share in scores.others.items()),
        ("examples", f"{scores.count:,}", ""),
        ("time", f"{scores.seconds:.1f} s", f"{scores.tokens_per_second:,.0f} tokens/s"),
    ]
    standard_output().print(results_table(rows))


def _record(scores: Scores, model: Model, settings: DecodeConfig, args: Namespace) -> dict[str, Any]:
    from insertlm.evaluation.report import provenance

    return {
        "command": args.line,
        "model": args.model,
        "family": model.recipe.family.tag,
        "step": model.step,
        "parameters": sum(parameter.numel() for parameter in model.family.parameters()),
        "task": msgspec.to_builtins(model.recipe.task),
        "split": args.split,
        **scores.record(),
        "tokens_per_second": scores.tokens_per_second,
        "batch_size": args.batch_size,
        "decode": msgspec.to_builtins(settings),
        **provenance(model.family.device),
    }


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
