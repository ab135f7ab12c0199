"""What was written into blanks beside what had been removed: lengths, words in common, and what the writing took.

No language model is needed here. Words are what white space sets apart, as in the sets themselves.

- **Lengths**: words written over words removed, as the ratio of the totals and as the mean of the texts' ratios; and
  the total variation between the lengths of all fills and of all removed segments, which is half the sum, over the bins
  of `BINS`, of the difference of their shares (0: the same lengths as often, 1: no bin in common). Two finite samples
  of one distribution differ too: `by_chance` is the mean total variation after both were shuffled together.
- **Words in common**: F1 of ROUGE-1, 2 and L (rouge-score, without stemming, as for published numbers), for every blank
  and then averaged within a text and over texts; BLEU (sacrebleu) over all blanks together. In percent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.infills import Infilled
from insertlm.evaluation.intervals import Estimate, estimate

__all__ = ["BINS", "FillFigures", "Lengths", "Overlap", "Speed", "measure_fills"]

# The least words of each bin: half an octave each where words are many.
BINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 23, 32, 46, 64)
_SHUFFLES, _SEED = 200, 0
_ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Lengths:
    """written, removed: mean words of a blank   ratio: of the totals   mean_ratio: of the texts' own ratios
    variation: total variation between the lengths   by_chance: what it would be if both came from one distribution"""

    written: float
    removed: float
    ratio: Estimate
    mean_ratio: Estimate
    variation: float
    by_chance: float


@dataclass(frozen=True)
class Overlap:
    """In percent."""

    rouge1: Estimate
    rouge2: Estimate
    rougeL: Estimate  # noqa: N815  # as the field writes it
    bleu: float


@dataclass(frozen=True)
class Speed:
    """tokens: written in all   per_step: tokens written in one step of a text, None where the writer has no steps"""

    tokens: int
    seconds: float
    per_second: float
    per_step: float | None


@dataclass(frozen=True)
class FillFigures:
    """complete: the share of texts that their model ended itself. What the lines do not tell is None."""

    texts: int
    blanks: int
    complete: float | None
    lengths: Lengths
    overlap: Overlap
    speed: Speed | None


def measure_fills(lines: Sequence[Infilled]) -> FillFigures | None:
    """None: the lines do not say what was written into each blank."""
    fills = [line.fills for line in lines if line.fills is not None]
    if not fills:
        return None
    if len(fills) < len(lines):
        raise InsertlmError(f"{len(lines) - len(fills):,} of {len(lines):,} lines have no fills; expected all or none")
    for number, (line, written) in enumerate(zip(lines, fills, strict=True), start=1):
        if len(written) != len(line.removed) or not written:
            raise InsertlmError(f"line {number}: expected a fill for each of {len(line.removed)} removed segments")
    removed = [line.removed for line in lines]
    ended = [line.complete for line in lines if line.complete is not None]
    return FillFigures(
        texts=len(lines),
        blanks=sum(map(len, fills)),
        complete=sum(ended) / len(ended) if len(ended) == len(lines) else None,
        lengths=_lengths(fills, removed),
        overlap=_overlap(fills, removed),
        speed=_speed(lines),
    )


def _lengths(fills: Sequence[Sequence[str]], removed: Sequence[Sequence[str]]) -> Lengths:
    ours, theirs = ([[len(part.split()) for part in text] for text in texts] for texts in (fills, removed))
    written, gone = list(map(sum, ours)), list(map(sum, theirs))
    all_ours, all_theirs = list(chain.from_iterable(ours)), list(chain.from_iterable(theirs))
    if not all(gone):
        raise InsertlmError(f"line {1 + gone.index(0)}: no word was removed; expected at least one")
    return Lengths(
        written=sum(written) / len(all_ours),
        removed=sum(gone) / len(all_theirs),
        ratio=estimate(written, gone),
        mean_ratio=estimate([ours / theirs for ours, theirs in zip(written, gone, strict=True)]),
        variation=_variation(all_ours, all_theirs),
        by_chance=_by_chance(all_ours, all_theirs),
    )


def _variation(ours: Sequence[int], theirs: Sequence[int]) -> float:
    shares = [
        np.bincount([bisect_right(BINS, words) - 1 for words in lengths], minlength=len(BINS)) / len(lengths)
        for lengths in (ours, theirs)
    ]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _by_chance(ours: Sequence[int], theirs: Sequence[int]) -> float:
    rng = np.random.default_rng(_SEED)
    shuffled = (rng.permutation([*ours, *theirs]).tolist() for _ in range(_SHUFFLES))
    return math.fsum(_variation(both[: len(ours)], both[len(ours) :]) for both in shuffled) / _SHUFFLES


def _overlap(fills: Sequence[Sequence[str]], removed: Sequence[Sequence[str]]) -> Overlap:
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu import corpus_bleu
    except ImportError as error:
        raise InsertlmError("ROUGE and BLEU need rouge-score and sacrebleu: pip install 'insertlm[text]'") from error
    scorer = RougeScorer(_ROUGE)
    means: dict[str, list[float]] = {name: [] for name in _ROUGE}
    for written, gone in zip(fills, removed, strict=True):
        scores = [scorer.score(truth, fill) for truth, fill in zip(gone, written, strict=True)]
        for name, values in means.items():
            values.append(100 * math.fsum(score[name].fmeasure for score in scores) / len(scores))
    bleu = corpus_bleu(list(chain.from_iterable(fills)), [list(chain.from_iterable(removed))])
    rouge1, rouge2, rouge_l = (estimate(means[name]) for name in _ROUGE)
    return Overlap(rouge1, rouge2, rouge_l, bleu.score)


def _speed(lines: Sequence[Infilled]) -> Speed | None:
    timed = [(line.tokens, line.seconds) for line in lines if line.tokens is not None and line.seconds is not None]
    tokens, seconds = sum(tokens for tokens, _ in timed), math.fsum(seconds for _, seconds in timed)
    if len(timed) < len(lines) or not seconds:
        return None
    stepped = [line.steps for line in lines if line.steps is not None]
    steps = sum(stepped) if len(stepped) == len(lines) else 0
    per_step = tokens / steps if steps else None
    return Speed(tokens, seconds, tokens / seconds, per_step)
