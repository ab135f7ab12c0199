"""`evaluate RUN` of a model of text: how probable held-out texts are to it, and how it fills in phrases of them.

No other model is asked. `evaluate nll`, `infilling` and `judge` ask one; `evaluate infilling` takes sets of any kind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from insertlm.cli.evaluate_infilling import print_fills
from insertlm.cli.evaluate_likelihood import print_likelihood
from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal

if TYPE_CHECKING:
    from insertlm.evaluation.fills import FillFigures
    from insertlm.evaluation.likelihoods import Summary
    from insertlm.inference.settings import DecodeConfig
    from insertlm.model import Model
    from insertlm.tasks.base import Examples

__all__ = ["MOST", "TextFigures", "measure_text"]

MOST = 100  # texts, unless a number is given: an ILM's likelihood of a long text takes a second or more
_SEED = 0  # of what is removed, and of what is written


@dataclass(frozen=True)
class TextFigures:
    """What a family cannot be measured by is None, and `unknown` and `unfilled` say why."""

    likelihood: Summary | None
    unknown: str
    infilling: FillFigures | None
    unfilled: str
    told: bool  # how many tokens were removed

    def record(self) -> dict[str, Any]:
        return {
            "likelihood": None if self.likelihood is None else asdict(self.likelihood),
            "infilling": None if self.infilling is None else asdict(self.infilling),
        }

    def print(self) -> None:
        if self.likelihood is None:
            print(f"  no likelihood: {self.unknown}")
        else:
            print_likelihood(self.likelihood)
        if self.infilling is None:
            print(f"  no infilling: {self.unfilled}")
        else:
            print(f"phrases of these texts, removed and written again{', told how many tokens' * self.told}")
            print_fills(self.infilling)


def measure_text(
    model: Model, examples: Examples, settings: DecodeConfig, batch_size: int, journal: Path | None
) -> TextFigures:
    """journal: where what is done is kept, so that a stopped evaluation goes on"""
    with Journal(journal) as kept:
        likelihood, unknown = _likelihood(model, examples, kept)
        fills, unfilled = _fills(model, examples, settings, batch_size, kept)
    return TextFigures(likelihood, unknown, fills, unfilled, told=not model.family.abilities.decides_length)


def _likelihood(model: Model, examples: Examples, journal: Journal) -> tuple[Summary | None, str]:
    """Or why there is none."""
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.likelihoods import Passage, measure, summarise
    from insertlm.families.likelihood.measure import Effort

    passages = [Passage(example.prefix, example.target, model.decode(example.target)) for example in examples]
    try:
        with progress_bar("measuring", len(passages)) as advance:
            return summarise(measure(model, passages, Effort(), journal, advance)), ""
    except InsertlmError as error:  # of some families none is known
        return None, str(error)


def _fills(
    model: Model, examples: Examples, settings: DecodeConfig, batch_size: int, journal: Journal
) -> tuple[FillFigures | None, str]:
    """What was written in place of a phrase of each text that has two words or more; else why nothing was."""
    from insertlm.core.progress import progress_bar
    from insertlm.evaluation.fills import measure_fills
    from insertlm.evaluation.generation import fill_once
    from insertlm.evaluation.infills import Infilled
    from insertlm.infill.requests import Request
    from insertlm.tasks.infill_sets import Document, make_set

    if model.family.abilities.appends:
        return None, f"an {model.recipe.family.tag} writes at the end of a text only"
    documents = [Document(model.decode(example.target)) for example in examples]
    texts = make_set(documents, "phrase", None, _SEED)
    told = not model.family.abilities.decides_length
    requests = [Request(text.text, text.blanks, lengths_of=text.removed if told else None) for text in texts]
    with progress_bar("infilling", len(requests)) as advance:
        written = fill_once(model, requests, settings, _SEED, journal, advance, batch_size)
    lines = [
        msgspec.convert({**text._asdict(), **fields}, Infilled)
        for text, fields in zip(texts, written, strict=True)
        if "refused" not in fields
    ]
    if not lines:
        return None, written[0]["refused"]
    return measure_fills(lines), ""
