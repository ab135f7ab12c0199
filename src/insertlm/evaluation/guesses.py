"""Lengths for a model that must be told them and has nobody to tell: a guess from a set of other texts.

Each blank gets the length of a segment that was removed from the other set, at random. A set of the same kind, made of
the model's own training texts, is the best source: it says how long such blanks are, and nothing of these texts. With
several tries per text the likeliest is kept: the one whose tokens have, in the mean, the highest probability in the
model's own view. (A sum over the tokens would be highest for the shortest.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from insertlm.core.errors import InsertlmError
from insertlm.infill.requests import Request
from insertlm.tasks.infill_sets import Blanked

__all__ = ["guessed", "likeliest"]


def guessed(examples: Sequence[Blanked], others: Sequence[Blanked], tries: int, seed: int) -> list[Request]:
    """All first tries, then all second ones, and so on."""
    pool = [part for other in others for part in other.removed]
    if not pool:
        raise InsertlmError("--guess-lengths: the set has no removed segment; expected some to guess lengths from")
    return [
        Request(example.text, example.blanks, lengths_of=_drawn(pool, len(example.removed), seed, number, turn))
        for turn in range(tries)
        for number, example in enumerate(examples)
    ]


def _drawn(pool: Sequence[str], count: int, seed: int, number: int, turn: int) -> list[str]:
    # Of its own generator, so that more tries and more texts leave the lengths of the others as they are.
    return random.Random(f"{seed} {number} {turn}").choices(pool, k=count)


def likeliest(written: Sequence[dict[str, Any]], texts: int) -> list[dict[str, Any]]:
    """The best try of each text. Steps and seconds are those of all its tries. written: in the order of `guessed`"""
    found = []
    for number in range(texts):
        tries = written[number::texts]
        taken = [record for record in tries if "refused" not in record]
        best = max(taken, key=_likelihood, default=tries[0])
        spent = {name: sum(record[name] for record in taken) for name in ("steps", "seconds") if "refused" not in best}
        found.append({**best, **spent})
    return found


def _likelihood(record: dict[str, Any]) -> float:
    value = record["log_probability"]
    return -math.inf if value is None else float(value)
