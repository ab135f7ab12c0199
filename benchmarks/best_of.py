"""Which of several drafts of a text with blanks should be kept (decode.best_of), and of how many? Every rule chooses
from the same drafts; another model scores what it keeps. Use texts that nothing else is measured with.

python benchmarks/best_of.py english SET… --evaluator gemma-3-270m.gguf --out docs/results/english-best-of.json

p: the probability of the whole text from nothing   q: that of the fills, as they were written
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from insertlm.core.files import write_atomically
from insertlm.evaluation.evaluator import Evaluator
from insertlm.evaluation.provenance import provenance
from insertlm.model import Model, load
from insertlm.tasks.infill_sets import read_set

COUNTS = (1, 8, 16)


class Draft(NamedTuple):
    """text: whole   words: in its fills   tokens: of the whole, with its end   log_p, log_q: see above"""

    text: str
    words: int
    tokens: int
    log_p: float
    log_q: float


RULES: dict[str, Callable[[Draft], float]] = {
    "log p": lambda draft: draft.log_p,
    "log p per token": lambda draft: draft.log_p / draft.tokens,
    "log p - 0.5 log q": lambda draft: draft.log_p - 0.5 * draft.log_q,
    "log p - 0.75 log q": lambda draft: draft.log_p - 0.75 * draft.log_q,
    "log p - 0.9 log q": lambda draft: draft.log_p - 0.9 * draft.log_q,
    "log p - log q": lambda draft: draft.log_p - draft.log_q,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or folder, as `insertlm infill` takes it")
    parser.add_argument("sets", nargs="+", type=Path, help="of insertlm data infilling")
    parser.add_argument("--evaluator", required=True, help="as insertlm evaluate infilling takes it")
    parser.add_argument("--seed", type=int, default=1000, help="of the first draft of each text")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = load(arguments.model, "cpu")
    drafts = {place.stem: [*map(drafts_of(model, arguments.seed), read_set(place))] for place in arguments.sets}
    originals = {place.stem: [*read_set(place)] for place in arguments.sets}
    texts = {draft.text for some in drafts.values() for each in some for draft in each}
    texts |= {example.text for examples in originals.values() for example in examples}
    nll = scores(arguments.evaluator, sorted(texts))
    found = {name: figures(drafts[name], originals[name], nll) for name in drafts}
    record = {"model": model.name, "seed": arguments.seed, "texts": {n: len(d) for n, d in drafts.items()}}
    record |= {"evaluator": Path(arguments.evaluator).name, "sets": found, **provenance(torch.device("cpu"))}
    write_atomically(arguments.out, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


def drafts_of(model: Model, seed: int) -> Callable[[Any], list[Draft]]:
    def write(example: Any) -> list[Draft]:
        text, drafts = "___".join(example.pieces), list[Draft]()
        for each in model.infill(text, samples=max(COUNTS), seed=seed, best_of=1):
            whole, fills = model.likelihood(each.text), model.likelihood(text, fills=each.fills)
            words = sum(len(fill.split()) for fill in each.fills)
            drafts.append(Draft(each.text, words, whole.tokens + 1, whole.value, fills.value))
        return drafts

    return write


def scores(evaluator: str, texts: Sequence[str]) -> dict[str, float]:
    judge = Evaluator(evaluator, torch.device("cpu"), bf16=True)
    return {texts[number]: score.nll for number, score in judge.score(texts) if score is not None}


def figures(drafts: Sequence[Sequence[Draft]], originals: Sequence[Any], nll: dict[str, float]) -> dict[str, Any]:
    """By number of drafts and rule: the change of the NLL against the truth in percent; words written over removed"""
    removed = sum(len(part.split()) for example in originals for part in example.removed)
    found = dict[str, Any]()
    for count in COUNTS:
        for name, rule in RULES.items() if count > 1 else [("first", lambda draft: 0.0)]:
            kept = [max(some[:count], key=rule) for some in drafts]
            changes = [
                100 * (nll[draft.text] / nll[example.text] - 1) for draft, example in zip(kept, originals, strict=True)
            ]
            words = sum(draft.words for draft in kept) / removed
            values = {"change": fmean(changes), "median_change": median(changes), "words": words}
            found[f"{count} drafts, {name}"] = {key: round(value, 3) for key, value in values.items()}
    return found


if __name__ == "__main__":
    main()
