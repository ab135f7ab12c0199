"""How probable texts are to a model of ours: NLL per token and per word, and bits per byte.

All are sums over the texts, divided by what the texts have in all. A token is what the model writes, and the end of a
text counts as one: so the NLL per token of an ARM is its training loss. Words are what blank space sets apart. A bit
per byte of UTF-8 means the same whatever the tokenizer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.generation import fingerprint
from insertlm.evaluation.journal import Journal, key_of
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.model import Model
from insertlm.recipe import portable, to_yaml

__all__ = ["Measured", "Passage", "Summary", "measure", "passages_of", "summarise"]


@dataclass(frozen=True)
class Passage:
    """A text that is measured. prefix: what it answers   cut: whether it is the beginning of a longer text"""

    prefix: Sequence[int]
    ids: Sequence[int]
    text: str
    cut: bool = False


@dataclass(frozen=True)
class Measured:
    """A passage of some tokens with its log-probability"""

    passage: Passage
    estimate: Estimate


@dataclass(frozen=True)
class Summary:
    """In nats. *_error: the standard error over texts   bound_error: that of the NLL per token which comes from bounds

    count: of all texts   empty, impossible: numbers, from 1, of texts without a word, and of those with a token that
    the model never writes; both are in no mean   cut: how many are longer than the model takes and scored up to there
    exact, bounds: how many texts have their probability, and how many a lower bound, so that their NLL may be lower
    """

    count: int
    empty: list[int]
    impossible: list[int]
    cut: int
    exact: int
    bounds: int
    nll_per_token: float
    nll_per_token_error: float
    bound_error: float
    nll_per_word: float
    nll_per_word_error: float
    bits_per_byte: float
    bits_per_byte_error: float
    nll_per_text: float
    tokens: int
    words: int
    bytes: int


def passages_of(model: Model, texts: Sequence[str]) -> list[Passage]:
    """Texts as the model takes them: a text that is too long is cut, as in training."""
    tokenizer, most, passages = model.text_tokenizer, model.family.longest_text, list[Passage]()
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) > most:
            passages.append(Passage([], ids[:most], tokenizer.decode(ids[:most]), cut=True))
        else:
            passages.append(Passage([], ids, text))
    return passages


def measure(
    model: Model,
    passages: Sequence[Passage],
    effort: Effort,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Measured]:
    """The log-probability of each passage. Those in the journal are not measured again, equal ones once."""
    # The batch size changes nothing, and the recipe decides what ids mean.
    asked = fingerprint(model.family), to_yaml(portable(model.recipe)), effort._replace(batch_size=0)
    common = key_of("likelihood", *asked)
    keys = [key_of(common, list(passage.prefix), list(passage.ids)) for passage in passages]
    missing = {key: passage for key, passage in zip(keys, passages, strict=True) if key not in journal}
    names, done = list(missing), len(passages) - len(missing)
    progress(done)

    def found(number: int, estimate: Estimate) -> None:
        nonlocal done
        value = estimate.value if math.isfinite(estimate.value) else None  # JSON has no infinity
        journal.add(names[number], {"value": value, "error": estimate.error, "exact": estimate.exact})
        progress(done := done + 1)

    completions = [Completion.behind([], passage.ids, passage.prefix) for passage in missing.values()]
    log_likelihoods(model.family, completions, effort, found)
    return [Measured(passage, _estimate(journal, key)) for passage, key in zip(passages, keys, strict=True)]


def _estimate(journal: Journal, key: str) -> Estimate:
    value, error, exact = (journal[key][name] for name in ("value", "error", "exact"))
    return Estimate(-math.inf if value is None else value, error, exact)


def summarise(measured: Sequence[Measured]) -> Summary:
    numbered = list(enumerate(measured, start=1))
    empty = [number for number, each in numbered if not each.passage.text.split()]
    impossible = [number for number, each in numbered if math.isinf(each.estimate.value)]
    full = [each for number, each in numbered if number not in {*empty, *impossible}]
    if not full:
        raise InsertlmError(
            f"of {len(measured)} texts {len(empty)} are empty and {len(impossible)} impossible for the model; expected "
            "at least one that it can write"
        )
    nll = [-each.estimate.value for each in full]
    tokens = [len(each.passage.ids) + 1 for each in full]
    words = [len(each.passage.text.split()) for each in full]
    sizes = [len(each.passage.text.encode()) for each in full]
    per_token, per_token_error = _ratio(nll, tokens)
    per_word, per_word_error = _ratio(nll, words)
    per_byte, per_byte_error = _ratio([value / math.log(2) for value in nll], sizes)
    return Summary(
        count=len(measured),
        empty=empty,
        impossible=impossible,
        cut=sum(each.passage.cut for each in measured),
        exact=sum(each.estimate.exact for each in full),
        bounds=sum(not each.estimate.exact for each in full),
        nll_per_token=per_token,
        nll_per_token_error=per_token_error,
        bound_error=math.hypot(*(each.estimate.error for each in full)) / sum(tokens),
        nll_per_word=per_word,
        nll_per_word_error=per_word_error,
        bits_per_byte=per_byte,
        bits_per_byte_error=per_byte_error,
        nll_per_text=math.fsum(nll) / len(nll),
        tokens=sum(tokens),
        words=sum(words),
        bytes=sum(sizes),
    )


def _ratio(values: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """The sum of values over the sum of sizes, and its standard error: texts are drawn, and long ones count more."""
    whole = sum(sizes)
    ratio = math.fsum(values) / whole
    if len(values) == 1:
        return ratio, 0.0
    rest = math.fsum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    return ratio, math.sqrt(rest * len(values) / (len(values) - 1)) / whole
