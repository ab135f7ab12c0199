"""The commands that measure texts: `evaluate nll | infilling | judge | frontier`.

Each keeps what it has done in a journal beside its JSON file and goes on from there when it is called again. Modules
that import torch are imported where they are needed.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.errors import InsertlmError
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.texts import read_texts, stem
from insertlm.files import check_writable, write_atomically

if TYPE_CHECKING:
    import torch

    from insertlm.evaluation.evaluator import Evaluator
    from insertlm.evaluation.nll import Summary

__all__ = ["evaluate_nll"]

_WRITTEN = 100  # texts that a run writes if no count is given
_NAMED = 10  # empty texts whose numbers are printed


def evaluate_nll(args: Namespace) -> None:
    from insertlm.evaluation.lengths import compare_lengths
    from insertlm.evaluation.nll import summarise

    evaluator = _evaluator(args)
    out = _out(args, f"{_name(args.source)}-nll-{_plain(evaluator.label)}.json")
    data = read_texts(args.data) if args.data else None
    with Journal(out.with_suffix(".jsonl")) as journal:
        texts = _texts(args, journal)
        scores = _score(texts, evaluator, journal)
        reference = _score(data, evaluator, journal) if data else None
    columns = {_label(args): summarise(scores)}
    record: dict[str, Any] = {"evaluator": evaluator.name, **asdict(columns[_label(args)])}
    if reference:
        columns["data"] = summarise(reference)
        difference = compare_lengths(_lengths(scores), _lengths(reference))
        record |= {"data": {"file": str(args.data), **asdict(columns["data"])}, "length_difference": asdict(difference)}
    print(f"{args.source} under {evaluator.name}")
    _print_summaries(columns)
    if reference:
        gap, p, shift = difference.distance, difference.p_value, difference.shift
        print(f"  lengths against the data's: distance {gap:.3f} (p {p:.2g}), {shift:+.1f} tokens")
    _finish(out, record, args, evaluator.device)


# --- What the commands share


def _evaluator(args: Namespace) -> Evaluator:
    from insertlm.api import choose_device
    from insertlm.evaluation.evaluator import Evaluator

    return Evaluator(args.evaluator, choose_device(args.device))


def _score(texts: list[str], evaluator: Evaluator, journal: Journal) -> list[Any]:
    from insertlm.evaluation.nll import score_texts
    from insertlm.terminal import progress_bar

    with progress_bar("scoring", len(texts)) as advance:
        return score_texts(texts, evaluator, journal, advance)


def _lengths(scores: list[Any]) -> list[int]:
    return [score.tokens for score in scores if score is not None]


def _texts(args: Namespace, journal: Journal) -> list[str]:
    """From a file, or written by a run."""
    if not _is_run(args.source):
        if args.overrides:
            raise InsertlmError(f"--{args.overrides[0][0]}: expected a run, which can decode; {args.source} is a file")
        return read_texts(Path(args.source), args.field, args.count)
    from insertlm.api import load
    from insertlm.config import override_decode
    from insertlm.evaluation.writing import unconditional, write_once

    model = load(args.source, args.device)
    settings = override_decode(model.recipe.decode, args.overrides)
    return write_once(unconditional(model, args.seed), settings, args.count or _WRITTEN, journal).texts


def _is_run(source: str) -> bool:
    """A folder, or a word without a suffix, which can only be a bundled model."""
    return Path(source).is_dir() or not Path(source).suffix


def _name(source: str) -> str:
    return _plain(Path(source).resolve().name if _is_run(source) else stem(Path(source)))


def _plain(name: str) -> str:
    """Fit for a file's name."""
    return re.sub(r"[^\w.-]+", "-", name)


def _label(args: Namespace) -> str:
    return args.label or _name(args.source)


def _out(args: Namespace, default: str) -> Path:
    out: Path = args.out or Path(default)
    if out.suffix != ".json":
        raise InsertlmError(f"--out {out}: expected a .json file")
    check_writable(out)
    return out


def _print_summaries(columns: Mapping[str, Summary]) -> None:
    from insertlm.terminal import grid, standard_output

    found = columns.values()
    quantiles = next(iter(found)).length.quantiles
    rows = [
        ["NLL", *(f"{s.nll:.3f} ± {s.nll_error:.3f}" for s in found)],
        ["NLL by token", *(f"{s.nll_by_token:.3f}" for s in found)],
        ["entropy", *(f"{s.entropy:.3f} ± {s.entropy_error:.3f}" for s in found)],
        ["length", *(f"{s.length.mean:.1f}" for s in found)],
        *([f"  {q} %", *(f"{s.length.quantiles[q]:g}" for s in found)] for q in quantiles),
        ["texts", *(f"{s.count:,}" for s in found)],
    ]
    standard_output().print(grid(["", *columns], rows))
    for name, summary in columns.items():
        _print_left_out(name, summary)


def _print_left_out(name: str, summary: Summary) -> None:
    if summary.empty:
        more = ", …" if len(summary.empty) > _NAMED else ""
        numbers = ", ".join(map(str, summary.empty[:_NAMED])) + more
        print(f"  {name}: {len(summary.empty):,} empty, in no mean: number {numbers}")
    if summary.cut:
        print(f"  {name}: {summary.cut:,} longer than the evaluator's context, scored up to it")


def _finish(out: Path, record: Mapping[str, Any], args: Namespace, device: torch.device) -> None:
    from insertlm.evaluation.report import provenance

    whole = {"command": args.line, "label": _label(args), "source": str(args.source), **record, **provenance(device)}
    write_atomically(out, f"{json.dumps(whole, indent=2)}\n".encode())
    print(f"wrote {out}")
