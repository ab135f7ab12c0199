"""What the commands that measure texts share: their evaluator, names of files, tables of NLL, and the JSON file.

Each keeps its results in a journal beside its JSON file, so that a stopped command goes on where it was.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically
from insertlm.data.textfiles import stem
from insertlm.evaluation.journal import Journal

if TYPE_CHECKING:
    import torch

    from insertlm.evaluation.evaluator import Evaluator
    from insertlm.evaluation.nll import Summary
    from insertlm.model import Model

__all__ = [
    "evaluator_of",
    "finish",
    "is_run",
    "journal_of",
    "label_of",
    "model_of",
    "name_of",
    "named",
    "out_of",
    "plain",
    "print_numbers",
    "print_summaries",
    "score",
]

_NAMED = 10  # most numbers of empty texts that are printed


def evaluator_of(args: Namespace) -> Evaluator:
    from insertlm.evaluation.evaluator import find_model, model_identity
    from insertlm.model import choose_device

    identity = model_identity(args.evaluator, find_model(args.evaluator))
    return _evaluator(args.evaluator, choose_device(args.device), args.bos, args.bf16, identity)


# A script may carry out many commands in one process: an evaluator, which takes seconds to load, then stays, and so
# does the last model. Both are known by their files, so that those that have changed are read again.
@lru_cache(maxsize=4)
def _evaluator(name: str, device: torch.device, bos: str | None, bf16: bool, identity: str) -> Evaluator:
    from insertlm.evaluation.evaluator import Evaluator

    return Evaluator(name, device, bos, bf16)


def model_of(name: str, device: str | None) -> Model:
    from insertlm.storage.folders import find

    files = sorted(find(name).rglob("*.safetensors"))
    return _model(name, device, tuple((file, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=1)
def _model(name: str, device: str | None, files: tuple[tuple[Path, int], ...]) -> Model:
    from insertlm.model import load

    return load(name, device)


def named(evaluator: Evaluator) -> dict[str, str | bool | None]:
    # bos None: the evaluator's own
    return {"evaluator": evaluator.name, "bos": evaluator.bos, **({"bf16": True} if evaluator.bf16 else {})}


def score(texts: list[str], evaluator: Evaluator, journal: Journal) -> list[Any]:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.nll import score_texts

    with progress_bar("scoring", len(texts)) as advance:
        return score_texts(texts, evaluator, journal, advance)


def is_run(source: str) -> bool:
    """Whether it is a folder, or the name of a model rather than of a file. A suffix that is no number, as in `a.txt`,
    makes it a file; `org/model-1.5` is a model."""
    path = Path(source)
    return path.is_dir() or not (path.is_file() or re.match(r"\.[^\d]", path.suffix))


def name_of(source: str) -> str:
    return plain(Path(source).resolve().name if is_run(source) else stem(Path(source)))


def plain(name: str) -> str:
    """A name with the characters that a file name may have."""
    return re.sub(r"[^\w.-]+", "-", name)


def label_of(args: Namespace) -> str:
    return args.label or name_of(args.source)


def out_of(args: Namespace, default: str) -> Path:
    out: Path = args.out or Path(default)
    if out.suffix != ".json":  # the journal's name is derived from it
        raise InsertlmError(f"--out {out}: expected a .json file")
    check_writable(out)
    return out


def journal_of(out: Path) -> Path:
    """Beside the result, with a suffix that no file of texts is likely to have."""
    return out.with_suffix(".journal.jsonl")


def print_summaries(columns: Sequence[tuple[str, Summary]]) -> None:
    from insertlm.cli.terminal import grid, standard_output

    names, found = zip(*columns, strict=True)
    quantiles = found[0].length.quantiles
    rows = [
        ["NLL", *(f"{s.nll:.3f} ± {s.nll_error:.3f}" for s in found)],
        ["NLL by token", *(f"{s.nll_by_token:.3f}" for s in found)],
        ["entropy", *(f"{s.entropy:.3f} ± {s.entropy_error:.3f}" for s in found)],
        ["length", *(f"{s.length.mean:.1f}" for s in found)],
        *([f"  {q} %", *(f"{s.length.quantiles[q]:g}" for s in found)] for q in quantiles),
        ["texts", *(f"{s.count:,}" for s in found)],
    ]
    standard_output().print(grid(["", *names], rows))
    for name, summary in columns:
        _print_left_out(name, summary)


def _print_left_out(name: str, summary: Summary) -> None:
    print_numbers(f"{name}: ", "empty", summary.empty)
    if summary.cut:
        print(f"  {name}: {summary.cut:,} longer than the evaluator's context, scored up to it")


def print_numbers(whose: str, what: str, numbers: Sequence[int]) -> None:
    """Which texts are in no mean, if there are any."""
    if numbers:
        more = ", …" if len(numbers) > _NAMED else ""
        print(f"  {whose}{len(numbers):,} {what}, in no mean: number {', '.join(map(str, numbers[:_NAMED]))}{more}")


def finish(out: Path, record: Mapping[str, Any], args: Namespace, device: torch.device) -> None:
    from insertlm.evaluation.provenance import provenance

    whole = {"command": args.line, "label": label_of(args), "source": str(args.source), **record, **provenance(device)}
    write_atomically(out, f"{json.dumps(whole, indent=2)}\n".encode())
    print(f"wrote {out}")
