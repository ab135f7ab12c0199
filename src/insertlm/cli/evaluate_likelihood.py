"""The command `evaluate likelihood`, which measures how probable texts are to a model of ours."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from insertlm.cli.common import split_of
from insertlm.cli.measuring import finish, journal_of, name_of, out_of, plain, print_numbers
from insertlm.data.textfiles import read_texts, stem
from insertlm.evaluation.journal import Journal

if TYPE_CHECKING:
    from insertlm.evaluation.likelihoods import Passage, Summary
    from insertlm.model import Model

__all__ = ["evaluate_likelihood", "print_likelihood"]


def evaluate_likelihood(args: Namespace) -> None:
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.likelihoods import measure, summarise
    from insertlm.families.likelihood.measure import Effort
    from insertlm.model import load

    effort = Effort(exact=args.exact, orders=args.orders)
    effort.check()
    of = "" if args.data is None else f"-{plain(stem(args.data))}"
    out = out_of(args, f"{name_of(args.source)}-likelihood{of}.json")
    model = load(args.source, args.device, checkpoint=args.checkpoint)
    passages = _passages(model, args)
    with Journal(journal_of(out)) as journal, progress_bar("measuring", len(passages)) as advance:
        summary = summarise(measure(model, passages, effort, journal, advance))
    data = {"split": args.split} if args.data is None else {"file": str(args.data)}
    print(f"{args.source}, {'its own ' + args.split + ' split' if args.data is None else args.data}")
    print_likelihood(summary)
    record = {
        "family": model.recipe.family.tag,
        "step": model.step,
        "data": data,
        "effort": {name: getattr(effort, name) for name in ("exact", "orders", "states", "seed")},
        **asdict(summary),
    }
    finish(out, record, args, model.family.device)


def _passages(model: Model, args: Namespace) -> list[Passage]:
    """The texts of a file, or the examples of a split of the model's own task."""
    from insertlm.evaluation.likelihoods import Passage, passages_of

    if args.data is not None:
        return passages_of(model, read_texts(args.data, args.field, args.count))
    examples = split_of(model.recipe.task, args)
    return [Passage(example.prefix, example.target, model.decode(example.target)) for example in examples]


def print_likelihood(summary: Summary) -> None:
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
    print_numbers("", "empty", summary.empty)
    print_numbers("", "impossible for the model", summary.impossible)
    if summary.cut:
        print(f"  {summary.cut:,} longer than the model takes, measured up to there")
