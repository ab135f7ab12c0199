"""The command `evaluate RUN`: the accuracy of a model on its task."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from insertlm.cli.common import load_model, settings_of, shared_work, split_of
from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically

if TYPE_CHECKING:
    from insertlm.core.processes import Processes
    from insertlm.evaluation.accuracy import Scores
    from insertlm.inference.settings import DecodeConfig
    from insertlm.model import Model
    from insertlm.recipe import Recipe

__all__ = ["evaluate"]


def evaluate(args: Namespace) -> None:
    with shared_work(args) as processes:
        _evaluate(args, processes)


def _evaluate(args: Namespace, processes: Processes) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.accuracy import evaluate as evaluate_family

    model = load_model(args)
    if not model.recipe.task.has_answers:
        raise InsertlmError(f"{args.model} writes from nothing, so no text is the right one; expected a model of tasks")
    settings = settings_of(model, args)
    name = _evaluation_name(args, settings, model.recipe)
    out = args.out or (None if model.bundled else model.folder / name)
    if out:
        check_writable(out)
    task, size = model.recipe.task, args.batch_size
    examples = split_of(task, args)
    with progress_bar("evaluating", len(examples)) if processes.first else nullcontext(lambda done: None) as advance:
        scores = evaluate_family(model.family, task, examples, settings, size, advance, processes)
    if not processes.first:  # all have the result, one reports it
        return
    if out:  # before printing, which fails if the reader has closed the pipe
        record = _record(scores, model, settings, args)
        write_atomically(out, f"{json.dumps(record, indent=2)}\n".encode())
    _print_scores(scores, model, args)
    if out:
        print(f"wrote {out}")


def _evaluation_name(args: Namespace, settings: DecodeConfig, recipe: Recipe) -> str:
    """With the settings that are not the recipe's, so that checkpoints and ways of writing have a file each."""
    # Otherwise a second evaluation with other settings would replace the file of the first.
    chosen, usual = msgspec.to_builtins(settings), msgspec.to_builtins(recipe.decode)
    changed = [f"{key}-{value}".lower() for key, value in chosen.items() if value != usual[key]]
    which = [] if args.checkpoint == "last" else [args.checkpoint]
    return f"{'-'.join(['evaluation', args.split, *which, *changed])}.json"


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
    from insertlm.evaluation.provenance import provenance

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
