"""Per-token negative log-likelihood, entropy and length of texts under an evaluator.

These are the numbers of the paper's Table 2: means over texts, with equal weight for every text. The mean over tokens,
in which long texts count more, is given beside them. evaluator.py says which tokens are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.evaluator import Evaluator, TextScore
from insertlm.evaluation.journal import Journal, key_of
from insertlm.evaluation.lengths import Lengths, describe_lengths

__all__ = ["Summary", "mean_and_error", "score_texts", "summarise"]

_CHUNK = 1024  # texts that are tokenised together and sorted by length


@dataclass(frozen=True)
class Summary:
    """Means over the texts that have tokens, in nats. *_error: the standard error of a mean (0 for one text)

    count: of all texts   empty: numbers, from 1, of the texts without tokens, which are left out of the means
    cut: how many texts are longer than the evaluator's context, so that only their beginning is scored
    nll_by_token: the mean over tokens rather than texts   length: in tokens of the evaluator
    """

    count: int
    empty: list[int]
    cut: int
    nll: float
    nll_error: float
    nll_by_token: float
    entropy: float
    entropy_error: float
    length: Lengths


def score_texts(
    texts: Sequence[str],
    evaluator: Evaluator,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> list[TextScore | None]:
    """A score for each text, None for an empty one. Texts in the journal are not scored again, equal texts once."""
    # The key has the evaluator with its BOS, so scores of different evaluators may share a journal.
    keys = [key_of("nll", evaluator.identity, text) for text in texts]
    missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in journal}.items())
    done = len(texts) - len(missing)
    progress(done)
    for first in range(0, len(missing), _CHUNK):
        chunk = missing[first : first + _CHUNK]
        for number, score in evaluator.score([text for _, text in chunk]):
            journal.add(chunk[number][0], {"empty": True} if score is None else asdict(score))
            done += 1
            progress(done)
    return [None if journal[key].get("empty") else TextScore(**journal[key]) for key in keys]


def summarise(scores: Sequence[TextScore | None]) -> Summary:
    full = [score for score in scores if score is not None]
    if not full:
        raise InsertlmError(f"all of {len(scores)} texts are empty; expected at least one with a word in it")
    nll, nll_error = mean_and_error([score.nll for score in full])
    entropy, entropy_error = mean_and_error([score.entropy for score in full])
    tokens = sum(score.scored for score in full)
    return Summary(
        count=len(scores),
        empty=[number for number, score in enumerate(scores, start=1) if score is None],
        cut=sum(score.scored < score.tokens for score in full),
        nll=nll,
        nll_error=nll_error,
        nll_by_token=math.fsum(score.nll * score.scored for score in full) / tokens,
        entropy=entropy,
        entropy_error=entropy_error,
        length=describe_lengths([score.tokens for score in full]),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
