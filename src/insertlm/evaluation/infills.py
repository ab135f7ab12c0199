"""How good filled-in texts are: the change of NLL and entropy, in percent of the text they are compared with.

A filled-in text is compared with the truth and with the input, which is the given text without its blanks. Changes are
computed for every text and then averaged, as in the paper. All three are scored with BOS, by the one rule of
evaluator.py. (The published code scores inputs without BOS but the other texts with it, and leaves some mask tokens in
the inputs, so its numbers differ from these in the last digits.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from insertlm.core.errors import InsertlmError
from insertlm.data.textfiles import read_records
from insertlm.evaluation.evaluator import TextScore
from insertlm.evaluation.intervals import estimate
from insertlm.evaluation.nll import mean_and_error

__all__ = ["Change", "Comparison", "Infilled", "compare", "read_infilled"]


class Infilled(msgspec.Struct, frozen=True):
    """One line of a file of `infill set`. pieces: the given text, with a blank between neighbours   removed: the true
    text of each blank   text: the whole true text   output: the whole text as a model filled it in

    Not every writer tells the rest. fills: what was written into each blank   complete: whether the model ended the
    text itself   tokens, steps, seconds: how many tokens were written, in how many steps, and how long it took
    """

    pieces: list[str]
    removed: list[str]
    text: str
    output: str
    fills: list[str] | None = None
    complete: bool | None = None
    tokens: int | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def input(self) -> str:
        """The pieces joined. Where two spaces meet at a blank, one is dropped."""
        joined = self.pieces[0] if self.pieces else ""
        for piece in self.pieces[1:]:
            joined += piece.lstrip() if re.search(r"\s$", joined) or not joined else piece
        return joined.strip()


@dataclass(frozen=True)
class Change:
    """In percent, averaged over texts, with standard errors. Below 0: the filled-in text has less. nll_low, nll_high:
    the interval of 95 %, see intervals.py"""

    nll: float
    nll_error: float
    entropy: float
    entropy_error: float
    nll_low: float
    nll_high: float


@dataclass(frozen=True)
class Comparison:
    """count: texts that are compared   left_out: numbers, from 1, of texts where one side has no tokens, or where the
    NLL or entropy to compare with is 0 (a single token, or the same token over and over)"""

    count: int
    left_out: list[int]
    change: Change


def read_infilled(path: Path, count: int | None = None) -> list[Infilled]:
    """The lines of a JSONL file. Fields that `Infilled` does not have are ignored."""
    found = []
    for number, record in enumerate(read_records(path, count), start=1):
        try:
            found.append(msgspec.convert(record, Infilled))
        except msgspec.ValidationError as error:
            hint = "" if "output" in record else "; a set that is not filled in needs --model"
            what = f"expected pieces, removed, text and output: {error}{hint}"
            raise InsertlmError(f"{path}, line {number}: {what}") from error
    return found


def compare(outputs: Sequence[TextScore | None], others: Sequence[TextScore | None]) -> Comparison:
    """outputs: scores of the filled-in texts   others: scores of the texts they are compared with"""
    left_out: list[int] = []
    nll: list[float] = []
    entropy: list[float] = []
    for number, (ours, other) in enumerate(zip(outputs, others, strict=True), start=1):
        # A change in percent needs something to compare with.
        if ours is None or other is None or not (other.nll > 0 and other.entropy > 0):
            left_out.append(number)
            continue
        nll.append(100 * (ours.nll - other.nll) / other.nll)
        entropy.append(100 * (ours.entropy - other.entropy) / other.entropy)
    if not nll:
        raise InsertlmError(f"none of {len(outputs)} texts can be compared; expected some with several different words")
    interval = estimate(nll)
    change = Change(*mean_and_error(nll), *mean_and_error(entropy), interval.low, interval.high)
    return Comparison(len(nll), left_out, change)
