"""Constraints on a text while it is written: how many tokens gaps get, and runs of ids that are banned or required.

- A gap never gets more tokens than its maximum. A token belongs to the gap it was inserted into.
- No insertion completes a banned run, whether its neighbours were given or written.
- The first token of a headed gap is at any time one of the prompt's heads or the beginning of a required run.
- A text is not complete while a gap is below its minimum or a required run is missing. If the model would stop, it
  must write: first into gaps below their minimum, whatever it likes; then required runs.
- A required run is written without interruption, the longest missing one first. Among runs of equal length and among
  places the model chooses. A run that the model wrote by itself counts. A finished run is not broken up again.
- No other token may take the room of required runs. With m the length of the longest missing run and k the number of
  missing runs, an insertion is allowed only if k pieces of m tokens still fit into the gaps after it, and all runs into
  what the limits leave. If no insertion is allowed, a required run is next.
- When minimum lengths and required runs need all tokens that the limits leave, they are written even if the model would
  write something else.
- If a text cannot get what it must have, it ends and is not complete.
- Of several insertions in one step, the best comes first, and each is made only if it would be allowed as the next
  step, after those before it. So all of the above holds however many tokens a step writes.
- A model may close single slots, where it says that nothing is missing. Nothing is written there, unless it must write
  and all slots where it could are closed.

This runs on the host, one text at a time: few texts have constraints, and plain code can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import Bounds, Prompt

__all__ = ["Move", "RuledText", "check_rules", "contradicts", "is_within"]

Run = tuple[int, ...]
_ENDLESS = 1 << 40  # the room of a gap without a maximum


class Move(NamedTuple):
    """What a text may do next.

    complete: it ends   slots: cells behind which a token may go; none: the text is full
    words: the ids that may be written, None: all   never: ids that may not   barred: (slot, id) pairs that may not
    edges: slots where only `heads` may be written
    """

    complete: bool
    slots: list[int]
    words: list[int] | None = None
    never: Collection[int] = ()
    barred: Sequence[tuple[int, int]] = ()
    edges: Sequence[int] = ()
    heads: frozenset[int] = frozenset()

    def allows(self, slot: int, token: int) -> bool:
        if slot not in self.slots or token in self.never or (slot, token) in self.barred:
            return False
        return (self.words is None or token in self.words) and (slot not in self.edges or token in self.heads)


class RuledText:
    """One text and its constraints. Cells are numbered as on the canvas.

    line, token: cells in reading order, <bos> first, and what they hold   given: the cells at the start
    gap: the gap of each cell   edges: cells before headed gaps   sealed: cells inside required runs
    room, need: how many tokens each gap may still get, and must still get
    missing: required runs   offered: the runs that may begin now, by first id   begun: the rest of a run that has begun
    asked: what the last move was asked with
    """

    def __init__(self, prompt: Prompt) -> None:
        first = len(prompt.prefix) + 1
        self.cells = first + 1 + len(prompt.start)
        self.line = list(range(first, self.cells))
        self.token: list[int | None] = [None, *prompt.start]
        self.given = frozenset(self.line)
        self.gap = {cell: rank for rank, cell in enumerate(self.line)}
        self.sealed: set[int] = set()
        self.edges, self.heads = {first + gap for gap in prompt.headed}, prompt.heads
        bounds = {gap: prompt.bounds.get(gap, Bounds()) for gap in sorted(prompt.gaps)}
        self.room = {gap: _ENDLESS if most is None else most for gap, (_, most) in bounds.items()}
        self.need = {gap: least for gap, (least, _) in bounds.items()}
        self.never = {run[0] for run in prompt.banned if len(run) == 1}
        self.banned = [run for run in prompt.banned if len(run) > 1]
        self.missing = [*dict.fromkeys(prompt.required)]
        self.offered: dict[int, Run] = {}
        self.begun: Run = ()
        self.asked: tuple[bool, int, Collection[int], int] = (False, 0, (), 0)

    def move(self, done: bool, left: int, closed: Collection[int] = (), steps: int = _ENDLESS) -> Move:
        """done: whether the model would stop   left, steps: how many more tokens and steps the limits allow
        closed: the slots where the model says that nothing is missing"""
        self.asked = done, left, closed, steps
        left = min(left, steps)  # a step may write several tokens, but one is all that is sure
        if self.begun:
            return self._move([self.cells - 1], [self.begun[0]])
        runs = sum(map(len, self.missing))
        owed = sum(self.need.values()) + runs
        # Inside a required run nothing can be inserted, so it does not count what the model misses there.
        done = done or (bool(closed) and all(slot in closed for slot in self._slots(self.room)))
        if done and not owed:
            return Move(True, [])
        free = [gap for gap in self.room if left > runs and self._spares(gap)]
        liked = [] if done else [slot for slot in self._slots(free) if slot not in closed]
        must = not liked or left <= owed  # of the latter every token that is left is needed
        wanting = [gap for gap in free if self.need[gap]]
        if must and wanting:  # minimum lengths first: any token counts for them, also one of a required run
            return self._move(self._slots(wanting, closed))
        if must and self.missing:
            return self._begin(closed)
        return self._move(liked)

    def write_all(self, insertions: Sequence[tuple[int, int]]) -> list[bool]:
        """Write those of the insertions, the best first, that are allowed one after the other. Returns which. The move
        before it is the first one's."""
        (done, left, closed, steps), written = self.asked, list[bool]()
        for slot, token in insertions:
            # What was closed says nothing of slots that this step made; they are open until the model has seen them.
            allowed = slot >= 0 and self.move(done, left - sum(written), closed, steps).allows(slot, token)
            if allowed:
                self.write(slot, token)
            written.append(allowed)
        return written

    def write(self, slot: int, token: int) -> None:
        """A token was inserted right behind a cell."""
        place, gap = self.line.index(slot) + 1, self.gap[slot]
        self.line.insert(place, self.cells)
        self.token.insert(place, token)
        self.gap[self.cells] = gap
        self.cells += 1
        self.room[gap] -= 1
        self.need[gap] = max(0, self.need[gap] - 1)
        # Either the run in progress goes on, or the token is the first of a run that was offered.
        self.begun = self.begun[1:] or self.offered.get(token, ())[1:]
        self.offered = {}
        if not self.begun:  # the rest of a run that has begun may still break up another one
            self._tick_off()

    def _move(self, slots: list[int], words: list[int] | None = None) -> Move:
        """words: ids of required runs; None: whatever the model likes"""
        barred = [(slot, token) for slot in slots for token in self._completions(slot)]
        edges = [slot for slot in slots if slot in self.edges and words is None]
        return Move(False, slots, words, self.never, barred, edges, self.heads)

    def _begin(self, closed: Collection[int]) -> Move:
        """Begin one of the longest missing runs that fit into a gap, if any does."""
        for length in sorted({len(run) for run in self.missing}, reverse=True):
            if gaps := [gap for gap, room in self.room.items() if room >= length]:
                # Of runs with the same first token only one can be offered: reversed, so that it is the first of them.
                self.offered = {run[0]: run for run in reversed(self.missing) if len(run) == length}
                best = [gap for gap in gaps if self.need[gap]] or gaps
                return self._move(self._slots(best, closed), [*self.offered])
        return self._move([])

    def _spares(self, gap: int) -> bool:
        """Whether a gap has room for a token that is not required."""
        if not self.missing or not self.room[gap]:
            return self.room[gap] > 0
        # Counting all runs as long as the longest is too strict, but exact packing would be a search in every step.
        longest = max(map(len, self.missing))
        pieces = sum((room - (other == gap)) // longest for other, room in self.room.items())
        return pieces >= len(self.missing)

    def _slots(self, gaps: Collection[int], closed: Collection[int] = ()) -> list[int]:
        """Without those that are closed, unless all are."""
        slots = [cell for cell in self.line if self.gap[cell] in gaps and cell not in self.sealed]
        return [slot for slot in slots if slot not in closed] or slots

    def _completions(self, slot: int) -> Iterator[int]:
        """The ids that would complete a banned run if inserted right behind a cell."""
        place = self.line.index(slot) + 1 if self.banned else 0
        for run in self.banned:
            for k, token in enumerate(run):
                before, behind = self.token[max(0, place - k) : place], self.token[place : place + len(run) - k - 1]
                if (*before, token, *behind) == run:
                    yield token

    def _tick_off(self) -> None:
        """Remove the required runs that are now in the text from those missing, and seal them."""
        for run in [*self.missing]:
            for place in range(len(self.line) - len(run) + 1):
                cells = self.line[place : place + len(run)]
                if tuple(self.token[place : place + len(run)]) == run and self.given.isdisjoint(cells):
                    self.sealed.update(cells[:-1])
                    self.missing.remove(run)
                    break


def check_rules(prompt: Prompt, writable: Collection[int], left: int) -> None:
    """Refuse constraints that no text can satisfy. left: how many tokens the limit on length allows"""
    for gap, (least, most) in prompt.bounds.items():
        if gap not in prompt.gaps:
            raise InsertlmError(f"a prompt has bounds for gap {gap}, which is not open")
        if least < 0 or (most is not None and most < least):
            raise InsertlmError(
                f"a gap must get at least {least} and at most {most} tokens; expected 0 <= least <= most"
            )
    if stray := prompt.rules.keys() - prompt.gaps:
        raise InsertlmError(f"a prompt has rules for gap {min(stray)}, which is not open")
    if (owed := sum(map(prompt.owed, {*prompt.bounds, *prompt.rules}))) > left:
        raise InsertlmError(f"the gaps of a prompt must get at least {owed} tokens; there is room for {left}")
    heads = [head for head in prompt.heads if head in writable and (head,) not in prompt.banned]
    if not prompt.headed <= prompt.gaps or (prompt.headed and not heads):
        raise InsertlmError("headed gaps: expected open ones, and heads that can be written and are not banned")
    for run in (*prompt.banned, *prompt.required):
        if not run or any(token not in writable for token in run):
            raise InsertlmError(f"banned and required: expected ids that can be written, got {list(run)}")
    for run in prompt.required:
        if banned := [other for other in prompt.banned if is_within(other, run)]:
            raise InsertlmError(f"the ids {list(banned[0])} are banned and required")
        if not any(_room(prompt, gap) >= len(run) for gap in prompt.gaps):
            raise InsertlmError(f"the required ids {list(run)} do not fit into any gap")
    if len({run for run in prompt.banned if len(run) == 1}) == len(writable):
        raise InsertlmError("all that can be written is banned")


def contradicts(prompt: Prompt) -> bool:
    """Whether its banned runs leave no head for headed gaps, or forbid what is required."""
    headless = bool(prompt.headed) and all((head,) in prompt.banned for head in prompt.heads)
    return headless or any(is_within(run, other) for run in prompt.banned for other in prompt.required)


def _room(prompt: Prompt, gap: int) -> int:
    most = prompt.bounds.get(gap, Bounds()).most
    return _ENDLESS if most is None else most


def is_within(part: Sequence[int], run: Sequence[int]) -> bool:
    return any(run[k : k + len(part)] == part for k in range(len(run) - len(part) + 1))
