"""The commands `evaluate nll | judge | frontier`, which measure texts.

Each keeps its results in a journal beside its JSON file, so that a stopped command goes on where it was.
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
    is_run,
    journal_of,
    label_of,
    name_of,
    named,
    out_of,
    plain,
    print_summaries,
    score,
)
from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import read_texts
from insertlm.evaluation.journal import Journal

if TYPE_CHECKING:
    from insertlm.evaluation.frontier import Point
    from insertlm.evaluation.judge import Verdict
    from insertlm.evaluation.nll import Summary

__all__ = ["evaluate_frontier", "evaluate_judge", "evaluate_nll"]

_WRITTEN = 100  # texts that a run writes without --count
_SWEEP = ("temperature", ["0.6", "0.8", "1"])


def evaluate_nll(args: Namespace) -> None:
    from insertlm.evaluation.lengths import compare_lengths
    from insertlm.evaluation.nll import summarise

    # Names are checked before any text is read or written: a mistake should not cost minutes.
    evaluator = evaluator_of(args)
    out = out_of(args, f"{name_of(args.source)}-nll-{plain(evaluator.label)}.json")
    data = read_texts(args.data) if args.data else None
    with Journal(journal_of(out)) as journal:
        texts = _texts(args, journal)
        scores = score(texts, evaluator, journal)
        reference = score(data, evaluator, journal) if data else None
    columns = [(label_of(args), summarise(scores))]
    record: dict[str, Any] = {**named(evaluator), **asdict(columns[0][1])}
    if reference:
        columns.append(("data", summarise(reference)))
        difference = compare_lengths(_lengths(scores), _lengths(reference))
        record |= {"data": {"file": str(args.data), **asdict(columns[1][1])}, "length_difference": asdict(difference)}
    print(f"{args.source} under {evaluator.name}")
    print_summaries(columns)
    if reference:
        gap, p, shift = difference.distance, difference.p_value, difference.shift
        print(f"  lengths against the data's: distance {gap:.3f} (p {p:.2g}), {shift:+.1f} tokens")
    finish(out, record, args, evaluator.device)


def evaluate_judge(args: Namespace) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.judge import Judge, LocalJudge, judge_texts, summarise_verdicts
    from insertlm.evaluation.rubrics import RUBRICS
    from insertlm.model import choose_device

    device = choose_device(args.device)
    judge: Judge
    if args.endpoint:
        from insertlm.evaluation.endpoint import Endpoint

        judge = Endpoint(args.endpoint, args.judge)
    else:
        judge = LocalJudge(args.judge, device)
    out = out_of(args, f"{name_of(args.source)}-judge-{plain(Path(args.judge).name)}.json")
    rubrics = list(dict.fromkeys(args.rubrics or RUBRICS))
    with Journal(journal_of(out)) as journal:
        texts = _texts(args, journal)
        with progress_bar("judging", len(texts) * len(rubrics)) as advance:
            scores = judge_texts(texts, judge, rubrics, journal, advance)
    verdicts = summarise_verdicts(texts, scores)
    empty = [number for number, text in enumerate(texts, start=1) if not text.strip()]
    print(f"{args.source} judged by {args.judge}, 1 to 5")
    _print_verdicts(verdicts)
    print(f"  {len(texts):,} texts, {len(empty):,} empty and not judged")
    record = {
        "judge": args.judge,
        "endpoint": args.endpoint,
        "count": len(texts),
        "empty": empty,
        "rubrics": {name: asdict(verdict) for name, verdict in verdicts.items()},
    }
    finish(out, record, args, device)


def evaluate_frontier(args: Namespace) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.frontier import grid_of_settings, sweep
    from insertlm.evaluation.generation import unconditional
    from insertlm.evaluation.nll import summarise
    from insertlm.model import load

    evaluator = evaluator_of(args)
    out = out_of(args, f"{name_of(args.source)}-frontier-{plain(evaluator.label)}.json")
    data = read_texts(args.data) if args.data else None
    model = load(args.source, args.device)
    source = unconditional(model, args.seed)
    grid = grid_of_settings(model.settings(args.overrides), dict(args.sweeps or [_SWEEP]))
    with Journal(journal_of(out)) as journal:
        with progress_bar("points", len(grid)) as advance:
            points = sweep(source, grid, args.count, evaluator, journal, advance)
        reference = summarise(score(data, evaluator, journal)) if data else None
    print(f"{args.source} under {evaluator.name}, {args.count:,} texts a point")
    _print_points(points, reference)
    record: dict[str, Any] = {**named(evaluator), "count": args.count, "points": [asdict(point) for point in points]}
    if reference:
        record["data"] = {"file": str(args.data), **asdict(reference)}
    finish(out, record, args, evaluator.device)


def _texts(args: Namespace, journal: Journal) -> list[str]:
    """The texts of a file, or texts that a run writes."""
    if not is_run(args.source):
        if args.overrides:
            raise InsertlmError(f"--{args.overrides[0][0]}: expected a run, which can decode; {args.source} is a file")
        return read_texts(Path(args.source), args.field, args.count)
    from insertlm.evaluation.generation import generate_once, unconditional
    from insertlm.model import load

    model = load(args.source, args.device)
    settings = model.settings(args.overrides)
    return generate_once(unconditional(model, args.seed), settings, args.count or _WRITTEN, journal).texts


def _lengths(scores: list[Any]) -> list[int]:
    return [score.tokens for score in scores if score is not None]


def _print_verdicts(verdicts: Mapping[str, Verdict]) -> None:
    from insertlm.cli.terminal import grid, standard_output

    rows = [
        [
            name,
            "none" if verdict.score is None else f"{verdict.score:.2f} ± {verdict.error:.2f}",
            *(f"{share:.0f} %" for share in verdict.shares),
            f"{len(verdict.unparsable):,}",
        ]
        for name, verdict in verdicts.items()
    ]
    standard_output().print(grid(["", "score", "1", "2", "3", "4", "5", "unparsable"], rows))


def _print_points(points: Sequence[Point], data: Summary | None) -> None:
    from insertlm.cli.terminal import grid, standard_output

    rows = []
    for point in points:
        name = ", ".join(f"{key} {value}" for key, value in point.settings.items())
        if (found := point.summary) is None:
            rows.append([name, "–", "–", "–", f"{point.empty:,}", f"{point.seconds_per_text:.3f}"])
        else:
            cells = (f"{found.nll:.3f}", f"{found.entropy:.3f}", f"{found.length.mean:.1f}")
            rows.append([name, *cells, f"{point.empty:,}", f"{point.seconds_per_text:.3f}"])
    if data:
        rows.append(["data", f"{data.nll:.3f}", f"{data.entropy:.3f}", f"{data.length.mean:.1f}", "", ""])
    standard_output().print(grid(["", "NLL", "entropy", "length", "empty", "s/text"], rows))
