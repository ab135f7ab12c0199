"""The command `evaluate infilling`: texts that were filled in, or that a model fills in now, beside the originals.

What is done is kept in three journals beside the JSON file. One is of the result alone. What a model writes into a set
is in another, whoever judges it; and the scores of the originals, which are the same for every model, are in a third.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.cli.measuring import (
    evaluator_of,
    finish,
    journal_of,
    model_of,
    name_of,
    named,
    out_of,
    plain,
    print_summaries,
    score,
)
from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal, key_of

if TYPE_CHECKING:
    from insertlm.evaluation.evaluator import Evaluator
    from insertlm.evaluation.fills import FillFigures
    from insertlm.evaluation.infills import Comparison, Infilled
    from insertlm.evaluation.intervals import Estimate
    from insertlm.evaluation.oracle import Gap

__all__ = ["evaluate_infilling", "print_fills"]

_NO_EVALUATOR = "none"


def evaluate_infilling(args: Namespace) -> None:
    from insertlm.evaluation.fills import measure_fills
    from insertlm.evaluation.infills import read_infilled
    from insertlm.model import choose_device

    device = choose_device(args.device)
    evaluator = None if args.evaluator == _NO_EVALUATOR else evaluator_of(args)
    who = [plain(Path(args.model).resolve().name)] if args.model else []
    judge = [plain(evaluator.label)] if evaluator else []
    out = out_of(args, "-".join([name_of(str(args.source)), *who, "infilling", *judge]) + ".json")
    _check(args)
    lines, filling = _fill_in(args, out.parent) if args.model else (read_infilled(args.source, args.count), {})
    key = key_of([[line.text, line.removed] for line in lines])
    told, guessed = (_read(path, key, evaluator) for path in (args.told_lengths, args.guessed_lengths))
    fills = measure_fills(lines)
    print(f"{args.source}" + (f" under {evaluator.name}" if evaluator else ""))
    record = {"texts": key, **filling}
    if evaluator is not None:
        record |= {**named(evaluator), **_likelihoods(lines, evaluator, out)}
    if fills is None:
        if evaluator is None:
            raise InsertlmError(f"{args.source}: nothing to measure without an evaluator: its lines have no fills")
    else:
        print_fills(fills)
        record["fills"] = asdict(fills)
    if told is not None:
        from insertlm.evaluation.oracle import gaps

        found = gaps(record, told, guessed)
        _print_gaps(found)
        record["gaps"] = [asdict(gap) for gap in found]
    if refused := record.get("refused"):
        print(f"  {len(refused):,} texts that the model cannot take are left out: {refused[0]}")
    finish(out, record, args, device)


def _check(args: Namespace) -> None:
    options = {"--true-lengths": args.true_lengths, "--guess-lengths": args.guess_lengths, "--tries": args.tries > 1}
    given = [*(f"--{key}" for key, _ in args.overrides), *(name for name, value in options.items() if value)]
    if given and not args.model:
        raise InsertlmError(f"{given[0]}: expected --model, which fills in the texts anew")
    if args.true_lengths and args.guess_lengths:
        raise InsertlmError("--true-lengths and --guess-lengths: expected one of the two")
    if args.tries > 1 and not args.guess_lengths:
        raise InsertlmError("--tries: expected --guess-lengths, which they are tries of")
    if args.guessed_lengths and not args.told_lengths:
        raise InsertlmError("--guessed-lengths: expected --told-lengths, too; the share closed lies between both")


def _read(path: Path | None, key: str, evaluator: Evaluator | None) -> dict[str, Any] | None:
    from insertlm.evaluation.oracle import read_result

    return None if path is None else read_result(path, key, evaluator.name if evaluator else None)


def _fill_in(args: Namespace, folder: Path) -> tuple[list[Infilled], dict[str, Any]]:
    """The lines as the model fills them in, and what is to be kept of how it did."""
    import msgspec

    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.generation import fill_once
    from insertlm.evaluation.guesses import guessed, likeliest
    from insertlm.evaluation.infills import Infilled
    from insertlm.infill.requests import Request
    from insertlm.tasks.infill_sets import read_set

    examples = read_set(args.source, args.count)
    if args.guess_lengths:
        requests = guessed(examples, read_set(args.guess_lengths), args.tries, args.seed)
    else:
        requests = [
            Request(example.text, example.blanks, lengths_of=example.removed if args.true_lengths else None)
            for example in examples
        ]
    model = model_of(args.model, args.device)
    settings = model.settings(args.overrides)
    kept = folder / f"{name_of(str(args.source))}-{plain(model.name)}-fills.journal.jsonl"
    with Journal(kept) as journal, progress_bar("infilling", len(requests)) as advance:
        written = fill_once(model, requests, settings, args.seed, journal, advance, args.batch_size)
    if args.tries > 1:
        written = likeliest(written, len(examples))
    lines = [
        msgspec.convert({**example._asdict(), **fields}, Infilled)
        for example, fields in zip(examples, written, strict=True)
        if "refused" not in fields
    ]
    refused = [
        f"text {number}: {fields['refused']}" for number, fields in enumerate(written, start=1) if "refused" in fields
    ]
    if not lines:
        raise InsertlmError(f"{args.model}: can take none of {len(examples):,} texts: {refused[0]}")
    how = {
        "model": args.model,
        "settings": msgspec.to_builtins(settings),
        "seed": args.seed,
        "true_lengths": args.true_lengths,
        "guess_lengths": args.guess_lengths and str(args.guess_lengths),
        "tries": args.tries,
        "refused": refused,
    }
    return lines, how


def _likelihoods(lines: Sequence[Infilled], evaluator: Evaluator, out: Path) -> dict[str, Any]:
    from insertlm.evaluation.infills import compare
    from insertlm.evaluation.nll import summarise

    with Journal(journal_of(out)) as journal:
        scores = {"output": score([line.output for line in lines], evaluator, journal)}
    with Journal(out.parent / f"originals-{plain(evaluator.label)}.journal.jsonl") as shared:
        scores["truth"] = score([line.text for line in lines], evaluator, shared)
        scores["input"] = score([line.input for line in lines], evaluator, shared)
    changes = {f"against the {side}": compare(scores["output"], scores[side]) for side in ("truth", "input")}
    summaries = [(side, summarise(found)) for side, found in scores.items()]
    _print_changes(changes)
    print_summaries(summaries)
    return {
        **{name.replace(" ", "_"): asdict(change) for name, change in changes.items()},
        **{side: asdict(found) for side, found in summaries},
    }


def _print_changes(changes: Mapping[str, Comparison]) -> None:
    from insertlm.cli.terminal import grid, standard_output

    rows = [
        [
            name,
            f"{(change := found.change).nll:+.2f} ± {change.nll_error:.2f} %",
            f"{change.nll_low:+.2f} … {change.nll_high:+.2f}",
            f"{change.entropy:+.2f} ± {change.entropy_error:.2f} %",
            f"{found.count:,}",
            f"{len(found.left_out):,}",
        ]
        for name, found in changes.items()
    ]
    standard_output().print(grid(["", "ΔNLL", "95 %", "ΔEntropy", "texts", "left out"], rows))


def print_fills(found: FillFigures) -> None:
    from insertlm.cli.terminal import grid, standard_output

    lengths, overlap, speed = found.lengths, found.overlap, found.speed
    rows = [
        ["words of a blank: written, removed", f"{lengths.written:.2f}, {lengths.removed:.2f}", ""],
        ["words written over words removed", *_cells(lengths.ratio)],
        ["  mean of the texts' ratios", *_cells(lengths.mean_ratio)],
        ["total variation of the lengths", f"{lengths.variation:.3f}", f"{lengths.by_chance:.3f} by chance"],
        ["ROUGE-1", *_cells(overlap.rouge1)],
        ["ROUGE-2", *_cells(overlap.rouge2)],
        ["ROUGE-L", *_cells(overlap.rougeL)],
        ["BLEU", f"{overlap.bleu:.2f}", ""],
    ]
    if found.complete is not None:
        rows.append(["ended by the model itself", f"{100 * found.complete:.1f} %", ""])
    if speed is not None:
        rows.append(["tokens a second", f"{speed.per_second:.1f}", f"{speed.tokens:,} in {speed.seconds:.1f} s"])
        if speed.per_step is not None:
            rows.append(["tokens a step", f"{speed.per_step:.2f}", ""])
    standard_output().print(grid([f"{found.blanks:,} blanks of {found.texts:,} texts", "", "95 %"], rows))


def _cells(found: Estimate) -> tuple[str, str]:
    return f"{found.value:.2f}", f"{found.low:.2f} … {found.high:.2f}"


def _print_gaps(found: Sequence[Gap]) -> None:
    from insertlm.cli.terminal import grid, standard_output

    rows = [
        [gap.figure, f"{gap.gap:+.2f}", "–" if gap.share_closed is None else f"{100 * gap.share_closed:.0f} %"]
        for gap in found
    ]
    standard_output().print(grid(["", "gap to told lengths", "closed"], rows))
