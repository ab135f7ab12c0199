"""Of several drafts of a text with blanks, which one to keep (`decode.best_of`).

A model that writes blanks from left to right can also say how likely a whole text is when nothing of it is given. The
two disagree where a fill does not go with what comes behind it: the whole text is then far less likely than the fill.
Importance weights put that right. With q(fills), the probability with which the drafts were written, and p(text), that
of the text from nothing, p / q is how much too rarely a draft was written, and drafts drawn in proportion to it would
be fills as p has them. Here the one with the largest weight is kept. By p alone the shortest fills would win, for every
word costs probability; by p / q itself those that are too long, because the weights of long fills vary most and the
largest of several is likely one of theirs. The power of q lies a little below 1, where written lengths are those of
texts.

A small model finds a text that says something twice very likely, as a whole and word by word. So each run of three
words that a fill says again, after itself or the given text, costs a draft what a word of usual odds would.
docs/log/ has what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from insertlm.families.base import Family
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.inference.trajectory import Trajectory
from insertlm.infill.results import Infilling
from insertlm.text.tokenizers import Tokenizer

__all__ = ["echoes", "likeliest"]

_POWER = 0.95  # of q
_ECHO = 1.0  # what three words that are said again cost, in nats
_LEAST = 1e-30  # what a probability of 0 in float32 counts as


def likeliest(family: Family, tokenizer: Tokenizer, drafts: Sequence[Infilling]) -> int:
    """The number of the draft to keep."""
    # The same text may have been written more than once.
    alike: dict[str, int] = {}
    for number, draft in enumerate(drafts):
        alike.setdefault(draft.text, number)
    kept = [drafts[number] for number in alike.values()]
    texts = [Completion.behind([], tokenizer.encode(draft.text)) for draft in kept]
    found = log_likelihoods(family, texts, Effort())
    weights = [
        text.value - _POWER * _log_q(draft.trajectory) - _ECHO * echoes(draft)
        for text, draft in zip(found, kept, strict=True)
    ]
    return [*alike.values()][max(range(len(kept)), key=weights.__getitem__)]


def echoes(draft: Infilling) -> int:
    """How many runs of three words stand in the text again because of what was written."""
    return _repeated([draft.text]) - _repeated(span.text for span in draft.spans if not span.new)


def _repeated(parts: Iterable[str]) -> int:
    words = (re.findall(r"\w+", part.lower()) for part in parts)
    runs = [run for some in words for run in zip(some, some[1:], some[2:], strict=False)]
    return len(runs) - len({*runs})


def _log_q(written: Trajectory) -> float:
    """Of the tokens, and of the ends behind them; a draft that somebody stopped has none."""
    ends = 1.0 if written.stop_probability is None else written.stop_probability
    return math.fsum(event.log_probability for event in written.events) + math.log(max(ends, _LEAST))
