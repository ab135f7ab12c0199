"""The rules of a text whose blanks are written one after the other: those of single blanks (inference/rules.py), and
runs of tokens that are banned or required.

- What the rule of a blank forbids is never written. A run has a place in such a blank only as far as the rule says.
  Choices and patterns count alone there: a banned word that comes about by them is found when the text is done.
- No token completes a banned run with what stands to its left, given or written. A blank does not end where that would
  complete one across its edge, and no token is written that would leave the blank no other choice.
- Each required run is written once, without interruption, in some blank. It is begun when the model would end the last
  blank that can take it, and when what is left for blanks is what is owed. Where the fill ends with the first tokens of
  a run, only the rest is written. A run that the model wrote by itself counts.
- If a blank cannot end as it should, it is cut back to where least is wrong, and the text is not complete.

This runs on the host, one text at a time: few texts have such constraints, and plain code can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.inference.constraints import is_within
from insertlm.inference.rules import Choice, Verdict
from insertlm.inference.settings import Prompt

__all__ = ["FillRules", "allow"]

Run = tuple[int, ...]
_OWING, _BANNED = 1.0, 2.0  # how bad an end is that leaves a run out, and one that completes a banned run


class FillRules:
    """pieces: the given text, cut at its blanks   fills: what has been written into them   own: the rules of blanks, by
    number
    offered: what remains to be written of the runs that may begin now, by first id   begun: of the one that has begun
    """

    def __init__(self, prompt: Prompt) -> None:
        gaps = sorted(prompt.gaps)
        edges = [0, *gaps, len(prompt.start)]
        self.pieces = [prompt.start[first:last] for first, last in pairwise(edges)]
        self.fills: list[list[int]] = [[] for _ in gaps]
        self.prompt = prompt
        self.own = {number: prompt.rules[gap] for number, gap in enumerate(gaps) if gap in prompt.rules}
        self.banned = [run for run in prompt.banned if len(run) > 1]
        self.required = [*dict.fromkeys(prompt.required)]
        self.offered: dict[int, Run] = {}
        self.begun: Run = ()

    @staticmethod
    def apply_to(prompt: Prompt) -> bool:
        """Whether a prompt has such rules. Single banned tokens need none: they are never in play."""
        return bool(prompt.rules or prompt.required) or any(len(run) > 1 for run in prompt.banned)

    def undecided(self, blank: int) -> Choice | None:
        """The choice that is to be made for a blank before it is judged."""
        rule = self.own.get(blank)
        return rule if isinstance(rule, Choice) and not self.fills[blank] else None

    def judge(self, blank: int, wants: bool, rooms: Sequence[int], spare: int) -> Verdict:
        """What blank number `blank`, all before which have ended, may do next.

        wants: whether the model would end it   rooms: how many tokens each blank may still get
        spare: how many of all these are not needed for the least of blanks
        """
        own = self.own[blank].judge(self.fills[blank], rooms[blank]) if blank in self.own else Verdict()
        if own.alone or not (self.banned or self.required):
            return own
        takes = [self._takes(number, room) for number, room in enumerate(rooms)]
        runs = self._judge_runs(blank, wants, takes, spare)
        return own._replace(penalty=own.penalty + runs.penalty, only=runs.only, never=runs.never)

    def _takes(self, blank: int, room: int) -> int:
        return min(room, self.own[blank].takes(self.fills[blank], room)) if blank in self.own else room

    def _judge_runs(self, blank: int, wants: bool, rooms: Sequence[int], spare: int) -> Verdict:
        """rooms: how many tokens of required runs each blank may still get"""
        if self.begun:
            return Verdict(_OWING, [self.begun[0]])
        left, right, room, later = self._left(blank), self.pieces[blank + 1], rooms[blank], rooms[blank + 1 :]
        missing = [run for run in self.required if not any(is_within(run, tuple(fill)) for fill in self.fills)]
        rest = {run: self._rest(run, self.fills[blank]) for run in missing}
        fitting = [run for run in missing if len(rest[run]) <= room]
        leaves = _fit(missing, later, spare) or (bool(later) and not fitting)
        penalty = _OWING * (not leaves) + _BANNED * self._crosses(left, right)
        if missing and (not _fit(missing, [room - 1, *later], spare - 1) or (wants and not leaves)):
            self.offered = self._offers(missing, {run: rest[run] for run in fitting}, left, right, rooms[blank:], spare)
            if self.offered:
                return Verdict(penalty, [*self.offered])
        return Verdict(penalty, None, self._completions(left, right if room == 1 else []))

    def note(self, sizes: Sequence[int], latest: Sequence[int]) -> None:
        """What has become of the blanks: how many tokens each has now, and the last one written there."""
        for fill, size, token in zip(self.fills, sizes, latest, strict=False):
            if size > len(fill):
                fill.append(token)
                self.begun = (self.begun or self.offered.get(token, ()))[1:]
            elif size < len(fill):
                del fill[size:]
                self.begun = ()
        self.offered = {}

    def _left(self, blank: int) -> list[int]:
        """All that stands before the next token."""
        parts = zip(self.pieces[: blank + 1], self.fills, strict=False)
        return [token for piece, fill in parts for token in (*piece, *fill)]

    def _offers(
        self,
        missing: Sequence[Run],
        rest: dict[Run, Run],
        left: Sequence[int],
        right: Sequence[int],
        rooms: Sequence[int],
        spare: int,
    ) -> dict[int, Run]:
        """The runs that may begin now, the longest first: those after which all others still fit, if there are any."""
        fair, others = dict[int, Run](), dict[int, Run]()
        for run in sorted(rest, key=len, reverse=True):
            tokens = rest[run]
            if not self._clean(left, tokens, right if len(tokens) == rooms[0] else []):
                continue
            after = [rooms[0] - len(tokens), *rooms[1:]]
            fits = _fit([other for other in missing if not is_within(other, run)], after, spare - len(tokens))
            (fair if fits else others).setdefault(tokens[0], tokens)
        return fair or others

    def _clean(self, left: Sequence[int], tokens: Sequence[int], right: Sequence[int]) -> bool:
        """Whether these tokens complete no banned run, behind `left` and, if the blank must end then, before `right`"""
        line = [*left]
        for token in tokens:
            if token in self._completions(line, []):
                return False
            line.append(token)
        return not right or not self._crosses(line, right)

    def _completions(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """The tokens that would complete a banned run between these."""
        found = []
        for run in self.banned:
            for place, token in enumerate(run):
                behind = run[place + 1 :]
                if _ends_with(left, run[:place]) and tuple(right[: len(behind)]) == behind:
                    found.append(token)
        return found

    def _crosses(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Whether a banned run lies across this edge."""
        return any(
            _ends_with(left, run[:cut]) and tuple(right[: len(run) - cut]) == run[cut:]
            for run in self.banned
            for cut in range(1, len(run))
        )

    @staticmethod
    def _rest(run: Run, fill: Sequence[int]) -> Run:
        """What remains of a run of which the fill may end with the first tokens."""
        overlap = next(k for k in range(len(run) - 1, -1, -1) if _ends_with(fill, run[:k]))
        return run[overlap:]


def allow(verdict: Verdict, logits: Tensor, choices: Tensor) -> Tensor:
    """The choices that are left, [V]. logits: the same, with those that are banned"""
    choices = logits if verdict.alone else choices
    if verdict.only is not None:
        choices = torch.full_like(logits, -torch.inf)
        choices[[*verdict.only]] = logits[[*verdict.only]]
    elif verdict.never:
        choices = choices.clone()
        choices[[*verdict.never]] = -torch.inf
    if verdict.mask is None:
        return choices
    # Families may have rows of their own behind the vocabulary; none of them is ever written.
    barred = ~F.pad(verdict.mask, (0, len(choices) - len(verdict.mask)))
    return choices.masked_fill(barred.to(choices.device), -torch.inf)


def _ends_with(line: Sequence[int], part: Run) -> bool:
    return not part or tuple(line[-len(part) :]) == part


def _fit(runs: Sequence[Run], rooms: Sequence[int], spare: int) -> bool:
    """Whether runs are sure to fit into blanks: each, the longest first, into the first one that has room."""
    if sum(map(len, runs)) > max(0, spare):
        return False
    rooms = [*rooms]
    for run in sorted(runs, key=len, reverse=True):
        blank = next((number for number, room in enumerate(rooms) if room >= len(run)), None)
        if blank is None:
            return False
        rooms[blank] -= len(run)
    return True
