"""The commands `evaluate nll | likelihood | infilling | judge | frontier`, which measure texts.

Each keeps its results in a journal beside its JSON file, so that a stopped command goes on where it was.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically
from insertlm.data.textfiles import read_texts, stem
from insertlm.evaluation.journal import Journal

if TYPE_CHECKING:
    import torch

    from insertlm.evaluation.evaluator import Evaluator
    from insertlm.evaluation.frontier import Point
    from insertlm.evaluation.infills import Comparison
    from insertlm.evaluation.judge import Verdict
    from insertlm.evaluation.likelihoods import Passage
    from insertlm.evaluation.likelihoods import Summary as LikelihoodSummary
    from insertlm.evaluation.nll import Summary
    from insertlm.model import Model

__all__ = ["evaluate_frontier", "evaluate_infilling", "evaluate_judge", "evaluate_likelihood", "evaluate_nll"]

_WRITTEN = 100  # texts that a run writes without --count
_SWEEP = ("temperature", ["0.6", "0.8", "1"])
_NAMED = 10  # most numbers of empty texts that are printed


def evaluate_nll(args: Namespace) -> None:
    from insertlm.evaluation.lengths import compare_lengths
    from insertlm.evaluation.nll import summarise

    # Names are checked before any text is read or written: a mistake should not cost minutes.
    evaluator = _evaluator(args)
    out = _out(args, f"{_name(args.source)}-nll-{_plain(evaluator.label)}.json")
    data = read_texts(args.data) if args.data else None
    with Journal(_journal(out)) as journal:
        texts = _texts(args, journal)
        scores = _score(texts, evaluator, journal)
        reference = _score(data, evaluator, journal) if data else None
    columns = [(_label(args), summarise(scores))]
    record: dict[str, Any] = {**_named(evaluator), **asdict(columns[0][1])}
    if reference:
        columns.append(("data", summarise(reference)))
        difference = compare_lengths(_lengths(scores), _lengths(reference))
        record |= {"data": {"file": str(args.data), **asdict(columns[1][1])}, "length_difference": asdict(difference)}
    print(f"{args.source} under {evaluator.name}")
    _print_summaries(columns)
    if reference:
        gap, p, shift = difference.distance, difference.p_value, difference.shift
        print(f"  lengths against the data's: distance {gap:.3f} (p {p:.2g}), {shift:+.1f} tokens")
    _finish(out, record, args, evaluator.device)


def evaluate_likelihood(args: Namespace) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.likelihoods import measure, summarise
    from insertlm.families.likelihood.measure import Effort
    from insertlm.model import load

    effort = Effort(exact=args.exact, orders=args.orders)
    effort.check()
    of = "" if args.data is None else f"-{_plain(stem(args.data))}"
    out = _out(args, f"{_name(args.source)}-likelihood{of}.json")
    model = load(args.source, args.device, checkpoint=args.checkpoint)
    passages = _passages(model, args)
    with Journal(_journal(out)) as journal, progress_bar("measuring", len(passages)) as advance:
        summary = summarise(measure(model, passages, effort, journal, advance))
    data = {"split": args.split} if args.data is None else {"file": str(args.data)}
    print(f"{args.source}, {'its own ' + args.split + ' split' if args.data is None else args.data}")
    _print_likelihood(summary)
    record = {
        "family": model.recipe.family.tag,
        "step": model.step,
        "data": data,
        "effort": {name: getattr(effort, name) for name in ("exact", "orders", "states", "seed")},
        **asdict(summary),
    }
    _finish(out, record, args, model.family.device)


def _passages(model: Model, args: Namespace) -> list[Passage]:
    """The texts of a file, or the examples of a split of the model's own task."""
    from insertlm.evaluation.likelihoods import Passage, passages_of

    if args.data is not None:
        return passages_of(model, read_texts(args.data, args.field, args.count))
    examples = model.recipe.task.examples(args.split, args.count)
    return [Passage(example.prefix, example.target, model.decode(example.target)) for example in examples]


def evaluate_infilling(args: Namespace) -> None:
    from insertlm.evaluation.infills import compare, read_infilled
    from insertlm.evaluation.nll import summarise

    evaluator = _evaluator(args)
    out = _out(args, f"{_name(args.source)}-infilling-{_plain(evaluator.label)}.json")
    lines = read_infilled(Path(args.source), args.count)
    sides = {
        "output": [line.output for line in lines],
        "truth": [line.text for line in lines],
        "input": [line.input for line in lines],
    }
    with Journal(_journal(out)) as journal:
        scores = {side: _score(texts, evaluator, journal) for side, texts in sides.items()}
    changes = {f"against the {side}": compare(scores["output"], scores[side]) for side in ("truth", "input")}
    summaries = [(side, summarise(found)) for side, found in scores.items()]
    print(f"{args.source} under {evaluator.name}")
    _print_changes(changes)
    _print_summaries(summaries)
    record = {name.replace(" ", "_"): asdict(change) for name, change in changes.items()}
    _finish(
        out,
        {**_named(evaluator), **record, **{side: asdict(found) for side, found in summaries}},
        args,
        evaluator.device,
    )


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
    out = _out(args, f"{_name(args.source)}-judge-{_plain(Path(args.judge).name)}.json")
    rubrics = list(dict.fromkeys(args.rubrics or RUBRICS))
    with Journal(_journal(out)) as journal:
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
    _finish(out, record, args, device)


def evaluate_frontier(args: Namespace) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.frontier import grid_of_settings, sweep
    from insertlm.evaluation.generation import unconditional
    from insertlm.evaluation.nll import summarise
    from insertlm.model import load

    evaluator = _evaluator(args)
    out = _out(args, f"{_name(args.source)}-frontier-{_plain(evaluator.label)}.json")
    data = read_texts(args.data) if args.data else None
    model = load(args.source, args.device)
    source = unconditional(model, args.seed)
    grid = grid_of_settings(model.settings(args.overrides), dict(args.sweeps or [_SWEEP]))
    with Journal(_journal(out)) as journal:
        with progress_bar("points", len(grid)) as advance:
            points = sweep(source, grid, args.count, evaluator, journal, advance)
        reference = summarise(_score(data, evaluator, journal)) if data else None
    print(f"{args.source} under {evaluator.name}, {args.count:,} texts a point")
    _print_points(points, reference)
    record: dict[str, Any] = {**_named(evaluator), "count": args.count, "points": [asdict(point) for point in points]}
    if reference:
        record["data"] = {"file": str(args.data), **asdict(reference)}
    _finish(out, record, args, evaluator.device)


# --- What the commands share


def _evaluator(args: Namespace) -> Evaluator:
    from insertlm.evaluation.evaluator import Evaluator
    from insertlm.model import choose_device

    return Evaluator(args.evaluator, choose_device(args.device), args.bos)


def _named(evaluator: Evaluator) -> dict[str, str | None]:
    return {"evaluator": evaluator.name, "bos": evaluator.bos}  # bos None: the evaluator's own


def _score(texts: list[str], evaluator: Evaluator, journal: Journal) -> list[Any]:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.nll import score_texts

    with progress_bar("scoring", len(texts)) as advance:
        return score_texts(texts, evaluator, journal, advance)


def _lengths(scores: list[Any]) -> list[int]:
    return [score.tokens for score in scores if score is not None]


def _texts(args: Namespace, journal: Journal) -> list[str]:
    """The texts of a file, or texts that a run writes."""
    if not _is_run(args.source):
        if args.overrides:
            raise InsertlmError(f"--{args.overrides[0][0]}: expected a run, which can decode; {args.source} is a file")
        return read_texts(Path(args.source), args.field, args.count)
    from insertlm.evaluation.generation import generate_once, unconditional
    from insertlm.model import load

    model = load(args.source, args.device)
    settings = model.settings(args.overrides)
    return generate_once(unconditional(model, args.seed), settings, args.count or _WRITTEN, journal).texts


def _is_run(source: str) -> bool:
    """Whether it is a folder, or the name of a model rather than of a file. A suffix that is no number, as in `a.txt`,
    makes it a file; `org/model-1.5` is a model."""
    path = Path(source)
    return path.is_dir() or not (path.is_file() or re.match(r"\.[^\d]", path.suffix))


def _name(source: str) -> str:
    return _plain(Path(source).resolve().name if _is_run(source) else stem(Path(source)))


def _plain(name: str) -> str:
    """A name with the characters that a file name may have."""
    return re.sub(r"[^\w.-]+", "-", name)


def _label(args: Namespace) -> str:
    return args.label or _name(args.source)


def _out(args: Namespace, default: str) -> Path:
    out: Path = args.out or Path(default)
    if out.suffix != ".json":  # the journal's name is derived from it
        raise InsertlmError(f"--out {out}: expected a .json file")
    check_writable(out)
    return out


def _journal(out: Path) -> Path:
    """Beside the result, with a suffix that no file of texts is likely to have."""
    return out.with_suffix(".journal.jsonl")


def _print_summaries(columns: Sequence[tuple[str, Summary]]) -> None:
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


def _print_likelihood(summary: LikelihoodSummary) -> None:
    from insertlm.cli.terminal import results_table, standard_output

    kind = "exact" if not summary.bounds else f"{summary.exact:,} exact, {summary.bounds:,} as a lower bound"
    noise = "" if not summary.bounds else f"bounds of random orders: ± {summary.bound_error:.3f}"
    rows = [
        ("NLL per token", f"{summary.nll_per_token:.3f} ± {summary.nll_per_token_error:.3f}", noise),
        ("NLL per word", f"{summary.nll_per_word:.3f} ± {summary.nll_per_word_error:.3f}", ""),
        ("bits per byte", f"{summary.bits_per_byte:.3f} ± {summary.bits_per_byte_error:.3f}", ""),
        ("texts", f"{summary.count:,}", kind),
    ]
    standard_output().print(results_table(rows))
    _print_numbers("empty", summary.empty)
    _print_numbers("impossible for the model", summary.impossible)
    if summary.cut:
        print(f"  {summary.cut:,} longer than the model takes, measured up to there")


def _print_numbers(what: str, numbers: Sequence[int]) -> None:
    if numbers:
        more = ", …" if len(numbers) > _NAMED else ""
        print(f"  {len(numbers):,} {what}, in no mean: number {', '.join(map(str, numbers[:_NAMED]))}{more}")


def _print_changes(changes: Mapping[str, Comparison]) -> None:
    from insertlm.cli.terminal import grid, standard_output

    rows = [
        [
            name,
            f"{(change := found.change).nll:+.2f} ± {change.nll_error:.2f} %",
            f"{change.entropy:+.2f} ± {change.entropy_error:.2f} %",
            f"{found.count:,}",
            f"{len(found.left_out):,}",
        ]
        for name, found in changes.items()
    ]
    standard_output().print(grid(["", "ΔNLL", "ΔEntropy", "texts", "left out"], rows))


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


def _print_left_out(name: str, summary: Summary) -> None:
    if summary.empty:
        more = ", …" if len(summary.empty) > _NAMED else ""
        numbers = ", ".join(map(str, summary.empty[:_NAMED])) + more
        print(f"  {name}: {len(summary.empty):,} empty, in no mean: number {numbers}")
    if summary.cut:
        print(f"  {name}: {summary.cut:,} longer than the evaluator's context, scored up to it")


def _finish(out: Path, record: Mapping[str, Any], args: Namespace, device: torch.device) -> None:
    from insertlm.evaluation.provenance import provenance

    whole = {"command": args.line, "label": _label(args), "source": str(args.source), **record, **provenance(device)}
    write_atomically(out, f"{json.dumps(whole, indent=2)}\n".encode())
    print(f"wrote {out}")
