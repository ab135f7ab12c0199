"""How good filled-in texts are: the change of NLL and of entropy, in percent of what they are compared with.

A text is compared with the truth, and with the input: what was given, its blanks removed. Changes are taken text by
text and then averaged, as in the paper. All three sides are scored by the one rule of evaluator.py, with BOS. (The
published code scores inputs without BOS and the texts with it, and lets some mask tokens stand in the inputs; those
numbers and these cannot be compared to the last digit.)
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
from insertlm.evaluation.nll import mean_and_error

__all__ = ["Change", "Comparison", "Infilled", "compare", "read_infilled"]


class Infilled(msgspec.Struct, frozen=True):
    """One line of a set. pieces: what was given, in order, with a blank between neighbours; removed: what the blanks
    hid; text: the truth; output: the whole text as a model filled it in"""

    pieces: list[str]
    removed: list[str]
    text: str
    output: str

    @property
    def input(self) -> str:
        """The pieces closed up: of two spaces that meet where a blank was, one goes."""
        joined = self.pieces[0] if self.pieces else ""
        for piece in self.pieces[1:]:
            joined += piece.lstrip() if re.search(r"\s$", joined) or not joined else piece
        return joined.strip()


@dataclass(frozen=True)
class Change:
    """Percent, averaged over texts, with the standard error; below 0: the filled-in text has less of it."""

    nll: float
    nll_error: float
    entropy: float
    entropy_error: float


@dataclass(frozen=True)
class Comparison:
    """count: texts that are compared   left_out: the numbers, from 1, of those that have no tokens on one of the sides,
    or of which a side has no entropy to compare with (a single token, or one token over and over)"""

    count: int
    left_out: list[int]
    change: Change


def read_infilled(path: Path, count: int | None = None) -> list[Infilled]:
    """The lines of a JSONL file; other fields than those of `Infilled` are ignored."""
    found = []
    for number, record in enumerate(read_records(path, count), start=1):
        try:
            found.append(msgspec.convert(record, Infilled))
        except msgspec.ValidationError as error:
            raise InsertlmError(f"{path}, line {number}: expected pieces, removed, text and output: {error}") from error
    return found


def compare(outputs: Sequence[TextScore | None], others: Sequence[TextScore | None]) -> Comparison:
    """outputs: of the texts as filled in; others: of what each is compared with."""
    left_out: list[int] = []
    nll: list[float] = []
    entropy: list[float] = []
    for number, (ours, other) in enumerate(zip(outputs, others, strict=True), start=1):
        if ours is None or other is None or not (other.nll > 0 and other.entropy > 0):
            left_out.append(number)
            continue
        nll.append(100 * (ours.nll - other.nll) / other.nll)
        entropy.append(100 * (ours.entropy - other.entropy) / other.entropy)
    if not nll:
        raise InsertlmError(f"none of {len(outputs)} texts can be compared; expected some with several different words")
    return Comparison(len(nll), left_out, Change(*mean_and_error(nll), *mean_and_error(entropy)))
