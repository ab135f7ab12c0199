"""What may be written into single blanks, for families that write a blank from left to right: asked before each token.

A rule judges one blank by what stands in it so far and by how many more tokens it may get. It keeps nothing of a text,
so all samples of a request can share it. Rules are made where texts are known: infill/words.py, infill/patterns.py. A
`Choice` is the exception: it needs the model, and remembers what was chosen for one text.

Rules that say how much room they need (`needs`) get it: what limits leave is not given to other blanks. Then each
promises that it never leaves the blank in a state from which it cannot end well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Choice", "Rule", "Verdict"]

_UNFINISHED = 3.0


class Verdict(NamedTuple):
    """What a blank may do next.

    penalty: of ending here, 0 if that is fine, else the more the worse
    only: the ids that may be written, None: all but those of `never`   mask: [V] bool on the host, the same, besides
    beyond: [V] bool on the host, the ids that would pass the most of this blank: whoever chooses one has filled it up
    held: whether tokens may yet be cut back, so that a blank that was filled up ends where its end is likely
    alone: whether nothing else counts, not even banned ids, because the rest could not be written any more
    """

    penalty: float = 0.0
    only: Sequence[int] | None = None
    never: Sequence[int] = ()
    mask: Tensor | None = None
    beyond: Tensor | None = None
    held: bool = False
    alone: bool = False

    @property
    def over(self) -> bool:
        """Whether the blank can only end, and may."""
        nothing = self.mask is not None and not bool(self.mask.any())
        return not self.penalty and (nothing or (self.only is not None and not self.only))


class Rule(Protocol):
    """needs: with so many tokens the blank can be filled for sure   free: whether other constraints count beside it;
    else it also brings the space that is hidden before the blank   hints: about how many words fit, for the further
    attempts at a blank that was filled up; none: there is only one"""

    @property
    def needs(self) -> int: ...

    @property
    def free(self) -> bool: ...

    @property
    def hints(self) -> Sequence[int]: ...

    def judge(self, fill: Sequence[int], room: int) -> Verdict:
        """fill: the ids in the blank so far   room: how many more it may get"""
        ...

    def takes(self, fill: Sequence[int], room: int) -> int:
        """How many more tokens of required words have a place."""
        ...


@dataclass
class Choice:
    """One of several fills. A writer decides when it comes to the blank: `decide`. From then on it is a rule.

    options: in ids   weights: the log-probabilities of all, ends included, given what was written before; empty until
    it is decided   chosen: the number of the one that is written
    """

    options: Sequence[tuple[int, ...]]
    weights: Sequence[float] = ()
    chosen: int = 0
    free: bool = False
    hints: Sequence[int] = ()

    @property
    def needs(self) -> int:
        return max(map(len, self.options))

    def decide(self, weights: Sequence[float], chosen: int) -> None:
        self.weights, self.chosen = weights, chosen

    def judge(self, fill: Sequence[int], room: int) -> Verdict:
        option = self.options[self.chosen]
        rest = option[len(fill) :]
        return Verdict(_UNFINISHED * bool(rest), rest[:1], alone=True)

    def takes(self, fill: Sequence[int], room: int) -> int:
        return 0
