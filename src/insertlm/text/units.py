"""What tokens tell of words, clauses and sentences: a table over the vocabulary, made once.

So gaps can be drawn on whatever device the tokens are, without a look at the text.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from insertlm.text.tokenizers import Tokenizer

__all__ = ["CLOSES", "ENDS_CLAUSE", "ENDS_SENTENCE", "MARKS", "STARTS_WORD", "token_traits"]

STARTS_WORD, ENDS_CLAUSE, ENDS_SENTENCE, CLOSES, MARKS = 1, 2, 4, 8, 16

_CLOSING = "\"'”’)]»"


@lru_cache(maxsize=8)
def token_traits(tokenizer: Tokenizer) -> NDArray[np.uint8]:
    """[V], of each id whether it starts a word, ends a clause or a sentence, only closes a quotation or a bracket, or
    is nothing but punctuation marks.

    A token starts a word if it stands apart when it is written behind another one: some vocabularies have the space in
    the token, others add it when they decode.
    """
    traits = np.zeros(tokenizer.size, np.uint8)
    # Any word will do to write behind: what counts is whether something comes between the two.
    behind = next((token for token in tokenizer.writable if tokenizer.decode([token]).isalnum()), None)
    first = [] if behind is None else [behind]
    before = tokenizer.decode(first)
    for token in tokenizer.writable:
        text = tokenizer.decode([*first, token]).removeprefix(before)
        bare = text.strip()
        trait = STARTS_WORD if text[:1].isspace() else 0
        marks = bare.rstrip(_CLOSING)
        if bare and not marks:
            trait |= CLOSES
        if bare and not any(map(str.isalnum, bare)):
            trait |= MARKS
        if marks.endswith((".", "!", "?", "…")):
            trait |= ENDS_SENTENCE
        if marks.endswith((",", ";", ":", "—", "–")):
            trait |= ENDS_CLAUSE
        traits[token] = trait
    return traits
