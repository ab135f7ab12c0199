"""The command `evaluate RUN`: the accuracy of a model on its task; for a model of text see evaluate_text_run.py."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from insertlm.cli.common import load_model, settings_of, shared_work, split_of
from insertlm.cli.measuring import journal_of
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
    settings = settings_of(model, args)
    name = _evaluation_name(args, settings, model.recipe)
    out = args.out or (None if model.bundled else model.folder / name)
    if out:
        check_writable(out)
    task, size = model.recipe.task, args.batch_size
    if not task.has_answers:
        _evaluate_text(model, settings, args, out, processes)
        return
    examples = split_of(task, args)
    with progress_bar("evaluating", len(examples)) if processes.first else nullcontext(lambda done: None) as advance:
        scores = evaluate_family(model.family, task, examples, settings, size, advance, processes)
    if not processes.first:  # all have the result, one reports it
        return
    if out:  # before printing, which fails if the reader has closed the pipe
        figures = {**scores.record(), "tokens_per_second": scores.tokens_per_second}
        _write(out, figures, model, settings, args)
    _print_head(model, args)
    _print_scores(scores)
    if out:
        print(f"wrote {out}")


def _evaluate_text(
    model: Model, settings: DecodeConfig, args: Namespace, out: Path | None, processes: Processes
) -> None:
    from insertlm.cli.evaluate_text_run import MOST, measure_text

    if processes.world > 1:
        raise InsertlmError(f"{args.model}: a model of text is evaluated by one process, got {processes.world}")
    if args.count is None:
        args.count = min(MOST, model.recipe.task.split_size(args.split))
    examples = split_of(model.recipe.task, args)
    journal = None if out is None else journal_of(out)
    found = measure_text(model, examples, settings, args.batch_size, journal)
    if out:  # before printing, as above
        _write(out, {"count": len(examples), **found.record()}, model, settings, args)
    _print_head(model, args)
    found.print()
    if out:
        print(f"wrote {out}")


def _evaluation_name(args: Namespace, settings: DecodeConfig, recipe: Recipe) -> str:
    """With the settings that are not the recipe's, so that checkpoints and ways of writing have a file each."""
    # Otherwise a second evaluation with other settings would replace the file of the first.
    chosen, usual = msgspec.to_builtins(settings), msgspec.to_builtins(recipe.decode)
    changed = [f"{key}-{value}".lower() for key, value in chosen.items() if value != usual[key]]
    which = [] if args.checkpoint == "last" else [args.checkpoint]
    return f"{'-'.join(['evaluation', args.split, *which, *changed])}.json"


def _print_head(model: Model, args: Namespace) -> None:
    print(args.model, *([] if model.step is None else [f"step {model.step:,}"]), f"{args.split} split", sep=", ")


def _print_scores(scores: Scores) -> None:
    from insertlm.cli.terminal import results_table, standard_output

    rows = [
        ("sequence accuracy", f"{scores.sequence_accuracy:.2f} %", "of examples solved"),
        ("token accuracy", f"{scores.token_accuracy:.2f} %", "of what is to be written"),
        *((name.replace("_", " "), f"{share:.2f} %", "") for name, share in scores.others.items()),
        ("examples", f"{scores.count:,}", ""),
        ("time", f"{scores.seconds:.1f} s", f"{scores.tokens_per_second:,.0f} tokens/s"),
    ]
    standard_output().print(results_table(rows))


def _write(out: Path, figures: dict[str, Any], model: Model, settings: DecodeConfig, args: Namespace) -> None:
    from insertlm.evaluation.provenance import provenance

    record = {
        "command": args.line,
        "model": args.model,
        "family": model.recipe.family.tag,
        "step": model.step,
        "parameters": sum(parameter.numel() for parameter in model.family.parameters()),
        "task": msgspec.to_builtins(model.recipe.task),
        "split": args.split,
        **figures,
        "batch_size": args.batch_size,
        "decode": msgspec.to_builtins(settings),
        **provenance(model.family.device),
    }
    write_atomically(out, f"{json.dumps(record, indent=2)}\n".encode())
