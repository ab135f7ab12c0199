"""Of several drafts of a text with blanks, which one to keep (`decode.best_of`).

A model that writes blanks from left to right can also say how likely a whole text is when nothing of it is given. The
two disagree where a fill does not go with what comes behind it: the whole text is then far less likely than the fill.
Importance weights put that right. With q(fills), the probability with which the drafts were written, and p(text), that
of the text from nothing, p / q is how much too rarely a draft was written, and drafts drawn in proportion to it would
be fills as p has them. Here the one with the largest weight is kept. By p alone the shortest fills would win, for every
word costs probability; by the mean over words the longest and dullest. docs/log/2026-11-19.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from insertlm.families.base import Family
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.infill.results import Infilling
from insertlm.text.tokenizers import Tokenizer

__all__ = ["likeliest"]


def likeliest(family: Family, tokenizer: Tokenizer, drafts: Sequence[Infilling]) -> int:
    """The number of the draft to keep."""
    # The same text may have been written more than once.
    alike: dict[str, int] = {}
    for number, draft in enumerate(drafts):
        alike.setdefault(draft.text, number)
    kept = [drafts[number] for number in alike.values()]
    texts = [Completion.behind([], tokenizer.encode(draft.text)) for draft in kept]
    fills = [draft.given.completed(draft.fills, tokenizer) for draft in kept]
    found = log_likelihoods(family, [*texts, *fills], Effort())
    weights = [text.value - fill.value for text, fill in zip(found, found[len(kept) :], strict=False)]
    return [*alike.values()][max(range(len(kept)), key=weights.__getitem__)]
