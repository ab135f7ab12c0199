"""Which of several drafts of a text with blanks should be kept (decode.best_of), and of how many? Every rule chooses
from the same drafts; another model may score what it keeps. Use texts that nothing else is measured with.

python benchmarks/best_of.py english SET… --count 60 --evaluator gemma-3-270m.gguf --out english-drafts.json
python benchmarks/best_of.py english SET… --count 60 --out english-echoes.json           # words and ROUGE alone
python benchmarks/best_of.py english SET… --parallel 0 …     # a token in every blank at a time

p: the probability of the whole text from nothing   q: that of the fills, as they were written
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec
import torch
from rouge_score.rouge_scorer import RougeScorer

from insertlm.core.files import write_atomically
from insertlm.evaluation.evaluator import Evaluator
from insertlm.evaluation.provenance import provenance
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.infill.drafts import begin
from insertlm.infill.requests import Request
from insertlm.infill.stream import Stream
from insertlm.infill.weighing import echoes
from insertlm.model import Model, load
from insertlm.tasks.infill_sets import Blanked, read_set

COUNTS = (4, 6, 8)


class Draft(NamedTuple):
    """text: whole   size: tokens of the fills and their ends   log_p, log_q: see above
    echoes: runs of three words that are said again"""

    text: str
    fills: Sequence[str]
    size: int
    log_p: float
    log_q: float
    echoes: int


RULES: dict[str, Callable[[Draft], float]] = {
    "p / q": lambda draft: draft.log_p - draft.log_q,
    "p / q^0.95": lambda draft: draft.log_p - 0.95 * draft.log_q,
    "p / q^0.95, echoes": lambda draft: draft.log_p - 0.95 * draft.log_q - draft.echoes,
    "p / q^0.9": lambda draft: draft.log_p - 0.9 * draft.log_q,
    "p / q^0.75": lambda draft: draft.log_p - 0.75 * draft.log_q,
    "q": lambda draft: draft.log_q,
    "q per token": lambda draft: draft.log_q / draft.size,
    "p / q per token": lambda draft: (draft.log_p - draft.log_q) / draft.size,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or folder, as `insertlm infill` takes it")
    parser.add_argument("sets", nargs="+", type=Path, help="of insertlm data infilling")
    parser.add_argument("--count", type=int, help="of the texts of each set (default: all)")
    parser.add_argument("--parallel", type=int, choices=(0, 1), default=1, help="decode.parallel")
    parser.add_argument("--evaluator", help="as insertlm evaluate infilling takes it (default: none)")
    parser.add_argument("--seed", type=int, default=1, help="of the first draft of the first text")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = load(arguments.model, "cpu")
    sets = {place.stem: read_set(place, arguments.count) for place in arguments.sets}
    drafts = {name: drafts_of(model, texts, arguments.parallel, arguments.seed) for name, texts in sets.items()}
    texts = {draft.text for some in drafts.values() for each in some for draft in each}
    texts |= {example.text for examples in sets.values() for example in examples}
    nll = scores(arguments.evaluator, sorted(texts)) if arguments.evaluator else None
    found = {name: figures(drafts[name], sets[name], nll) for name in sets}
    record = {"model": model.name, "seed": arguments.seed, "parallel": arguments.parallel}
    record |= {"evaluator": arguments.evaluator and Path(arguments.evaluator).name, "sets": found}
    record |= provenance(torch.device("cpu"))
    write_atomically(arguments.out, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


def drafts_of(model: Model, examples: Sequence[Blanked], parallel: int, seed: int) -> list[list[Draft]]:
    """By text. Draft number n has the seed that decode.best_of gives it."""
    family, tokenizer = model.family, model.recipe.task.tokenizer
    settings = msgspec.structs.replace(model.recipe.decode, best_of=1, parallel=parallel)
    requests = [Request(example.text, example.blanks) for example in examples]
    found: list[list[Draft]] = [[] for _ in examples]
    for number in range(max(COUNTS)):
        begun = begin(family, tokenizer, requests, settings, seed + (number << 40))
        written = Stream(family, begun, settings, 64, watched=False).results
        texts = [Completion.behind([], tokenizer.encode(draft.text)) for draft in written]
        fills = [draft.given.completed(draft.fills, tokenizer) for draft in written]
        values = [estimate.value for estimate in log_likelihoods(family, [*texts, *fills], Effort())]
        for drafts, draft, log_p, log_q in zip(found, written, values, values[len(texts) :], strict=False):
            size = len(draft.trajectory.events) + len(draft.fills)
            drafts.append(Draft(draft.text, draft.fills, size, log_p, log_q, echoes(draft)))
    return found


def scores(evaluator: str, texts: Sequence[str]) -> dict[str, float]:
    judge = Evaluator(evaluator, torch.device("cpu"), bf16=True)
    return {texts[number]: score.nll for number, score in judge.score(texts) if score is not None}


def figures(
    drafts: Sequence[Sequence[Draft]], originals: Sequence[Blanked], nll: Mapping[str, float] | None
) -> dict[str, dict[str, float]]:
    """By number of drafts and rule: the change of the NLL against the truth in percent, with its standard error; words
    written over words removed; ROUGE-1"""
    rouge = RougeScorer(["rouge1"])
    removed = sum(len(part.split()) for example in originals for part in example.removed)

    def measured(kept: Sequence[tuple[Draft, Blanked]], times: int) -> dict[str, float]:
        words = sum(len(fill.split()) for draft, _ in kept for fill in draft.fills)
        likeness = [
            rouge.score(" ".join(example.removed), " ".join(draft.fills))["rouge1"].fmeasure for draft, example in kept
        ]
        values = {"words": words / times / removed, "rouge1": 100 * fmean(likeness)}
        if nll is not None:
            changes = [100 * (nll[draft.text] / nll[example.text] - 1) for draft, example in kept]
            values |= {"change": fmean(changes), "error": stdev(changes) / len(changes) ** 0.5}
        return {name: round(value, 2) for name, value in values.items()}

    most = len(drafts[0])
    every = [(draft, example) for some, example in zip(drafts, originals, strict=True) for draft in some]
    found = {"any draft": measured(every, most)}
    found["any draft"].pop("error", None)  # drafts of one text are alike
    for count in COUNTS:
        for name, rule in RULES.items():
            kept = [(max(some[:count], key=rule), each) for some, each in zip(drafts, originals, strict=True)]
            found[f"{count} drafts, {name}"] = measured(kept, 1)
    return found


if __name__ == "__main__":
    main()
