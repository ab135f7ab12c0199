"""The blanks of a batch while they are filled: how much each may take, where it ends, and what is shown of it.

Plain bookkeeping in tensors, without the model: a writer says what it would write into each blank at work, and how
likely it ends there.

- A blank ends where its model ends it, once it has its least. A text is complete if all its blanks have ended so.
- **Limits are budgets.** A blank at its most, or for which the limits of its text leave nothing, is cut back to where
  its end was likeliest. What may still be cut back is held and shown when the blank is done: all of a blank that takes
  `TAIL` tokens or fewer, else the tokens behind which that many or fewer may follow.
- What limits leave is for all blanks of a text: none takes what another needs for its least.
- A blank that reaches its own most where no end was fair (`FAIR`) is written again, with other noise and, if the model
  takes hints, a hint of what fits. If no attempt has a fair end, the one of the likeliest end stays; it is replayed if
  it was not the last.
- So if a limit has ended some blank, the text is not complete, and the limit is named: see `LIMITS`.

Blanks are at work one after the other, or all together, one token in each at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from insertlm.families.corruption.blanks import MOST
from insertlm.families.corruption.laid_out import Layout
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import LIMITS

__all__ = ["ATTEMPTS", "FAIR", "TAIL", "Fills", "Room", "Ruling", "Shown"]

TAIL = 32  # the most tokens that are cut back
FAIR = 0.3  # the chance of an end that is good enough to cut back to
ATTEMPTS = 3  # at a blank
_SHARES = (0.75, 0.5)  # words for each token of room: the hints of the second and third attempt
_REPLAY = ATTEMPTS  # the number of an attempt in which an earlier one is repeated

_ENDLESS = 1 << 40
_EQUAL = 1e-4  # chances that differ by less
_BLANKS, _MAX_LENGTH, _MAX_STEPS, _MAX_TOKENS = range(1, 1 + len(LIMITS))
_TOO_SHORT = 4.0  # see Ruling.penalty


class Room(NamedTuple):
    """How many more tokens there may be. blank: [B, G], in each   text: [B, 1], in all   spare: [B, 1], of these, how
    many no blank needs for its least   steps: [B, 1], to come"""

    blank: Tensor
    text: Tensor
    spare: Tensor
    steps: Tensor


class Ruling(NamedTuple):
    """What else forbids ends and tokens. penalty: [B, G], 0 where blanks may end, else the more the worse it would be
    All [B, G] bool: blocked, no token may be written   full, because the next one would pass the most of the blank
    held, what is written may yet be cut back"""

    penalty: Tensor
    blocked: Tensor
    full: Tensor
    held: Tensor


class Shown(NamedTuple):
    """Tokens that are final. place: [B, K], ranks in the text after this step, or -1   token, score: [B, K]"""

    place: Tensor
    token: Tensor
    score: Tensor


@dataclass
class Fills:
    """B texts with G blanks each, from left to right, of which some may not exist.

    Given, [B, G]: gap, rank in the given text   at, its position, if it stays where it is (`placed`, bool), else that
    behind all that is given   least, most   kept, how many tokens it can have whatever others need   most_limit, what
    `most` stands for
    attempts   headed: bool   openings: [B, G, ATTEMPTS], the token each attempt begins with
    Given, [B]: max_tokens, max_steps   tokens_limit, what `max_tokens` stands for   together: bool

    So far, [B, G]: open, bool   size, tokens in it   shown, of these   attempt, from 0   latest, the last token written
    fresh: bool, its opening is yet to be computed   chance, of its end, when it was last at work; NaN before
    limited: [B], the limit that has ended a blank, 0 for none

    What is held, the first being number `shown`: tokens, scores, [B, G, TAIL]   Rows of the held tokens and of the one
    before them, [B, G, TAIL + 1]: ends, the chance of an end there   cells, where they are in the cache
    stale, bool, those that are to leave it
    The best attempt before this one: script, [B, G, TAIL]   script_size, script_end, script_attempt: [B, G]
    """

    gap: Tensor
    at: Tensor
    placed: Tensor
    least: Tensor
    most: Tensor
    kept: Tensor
    most_limit: Tensor
    attempts: Tensor
    headed: Tensor
    openings: Tensor
    max_tokens: Tensor
    tokens_limit: Tensor
    max_steps: Tensor
    together: Tensor

    open: Tensor
    size: Tensor
    shown: Tensor
    attempt: Tensor
    latest: Tensor
    fresh: Tensor
    chance: Tensor
    limited: Tensor

    tokens: Tensor
    scores: Tensor
    ends: Tensor
    cells: Tensor
    stale: Tensor

    script: Tensor
    script_size: Tensor
    script_end: Tensor
    script_attempt: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        settings: DecodeConfig,
        layout: Layout,
        room: Sequence[int],
        positions: int,
        hints: bool,
        together: Sequence[bool],
        device: torch.device,
    ) -> Self:
        """room: how many tokens fit into the row of each   positions: of the model   hints: whether it takes them"""
        blanks = [
            _Blank(prompt, gap, number, layout, positions, hints, settings)
            for prompt in prompts
            for number, gap in enumerate(_padded(prompt))
        ]

        def each(name: str) -> Tensor:
            values = torch.tensor([getattr(blank, name) for blank in blanks], device=device)
            return values.view(len(prompts), MOST, *values.shape[1:])

        def whole(values: Sequence[int] | Sequence[bool]) -> Tensor:
            return torch.tensor(values, device=device)

        none = torch.zeros(len(prompts), MOST, dtype=torch.int64, device=device)
        no_tail = none[..., None].repeat(1, 1, TAIL)
        no_rows = none[..., None].repeat(1, 1, TAIL + 1)
        asked = settings.max_tokens or _ENDLESS
        return cls(
            gap=each("gap"),
            at=each("at"),
            placed=each("placed"),
            least=each("least"),
            most=each("most"),
            kept=each("kept"),
            most_limit=each("most_limit"),
            attempts=each("attempts"),
            headed=each("headed"),
            openings=each("openings"),
            max_tokens=whole([min(asked, most) for most in room]),
            tokens_limit=whole([_MAX_TOKENS if asked <= most else _MAX_LENGTH for most in room]),
            max_steps=whole([settings.max_steps] * len(prompts)),
            together=whole(together),
            open=each("real"),
            size=none,
            shown=none,
            attempt=none,
            latest=none,
            fresh=each("real"),
            chance=torch.where(each("real"), torch.nan, 1.0),
            limited=none[:, 0],
            tokens=no_tail,
            scores=no_tail.float(),
            ends=no_rows.float(),
            cells=no_rows,
            stale=no_rows.bool(),
            script=no_tail,
            script_size=none,
            script_end=torch.full_like(none, -torch.inf, dtype=torch.float32),
            script_attempt=none,
        )

    # --- What there is to do

    @property
    def over(self) -> Tensor:
        """[B] bool"""
        return ~self.open.any(1)

    @property
    def live(self) -> Tensor:
        """The blanks at work, [B, G] bool: all that are open, or the first of them."""
        return self.open & (self.together[:, None] | (self.open.cumsum(1) == 1))

    @property
    def replays(self) -> Tensor:
        """[B, G] bool"""
        return self.attempt == _REPLAY

    @property
    def scripted(self) -> Tensor:
        """The next token of what is replayed, [B, G]"""
        return self.script.gather(2, self.size.clamp(max=TAIL - 1)[..., None]).squeeze(2)

    @property
    def fed(self) -> tuple[Tensor, Tensor]:
        """The next row of each blank at work: its token and its position, both [B, G]. `size` is that of the row."""
        attempt = torch.where(self.replays, self.script_attempt, self.attempt)
        opening = self.openings.gather(2, attempt[..., None]).squeeze(2)
        rows = 1 + self.size  # of each blank that is done, or at work
        before = torch.where(self.placed, 0, rows.cumsum(1) - rows)
        return torch.where(self.fresh, opening, self.latest), self.at + before + self.size

    @property
    def left(self) -> Tensor:
        """The most rows that a text may still need in a cache, [B]"""
        steps = self.max_steps * torch.where(self.together, MOST, 1)
        return torch.minimum(self.max_tokens, steps) - self.size.sum(1) + self.fresh.sum(1)

    def room(self, step: Tensor | int) -> Room:
        """step: the number of the next one, [B] or one for all"""
        owed = (self.kept - self.size).clamp(min=0) * self.open
        steps = self.max_steps - step
        text = self.max_tokens - self.size.sum(1)
        # One after the other, each token takes a step and so does each end; together, blanks have steps of their own.
        text = torch.where(self.together, text, torch.minimum(text, steps - self.open.sum(1)))[:, None]
        steps = steps[:, None]
        spare = text - owed.sum(1, keepdim=True)
        blank = torch.minimum(self.most - self.size, owed + spare)
        blank = torch.where(self.together[:, None], torch.minimum(blank, steps - 1), blank)
        return Room(blank, text, spare, steps)

    # --- What is done

    def take(
        self, token: Tensor, score: Tensor, end: Tensor, ends: Tensor, step: Tensor | int, ruling: Ruling | None
    ) -> Shown:
        """One step of the blanks at work. All [B, G]: token, score, what would be written   end, the chance of an end
        ends: bool, whether the model ends it"""
        live, room, held = self.live, self.room(step), self.size - self.shown
        penalty = _TOO_SHORT * (self.size < self.least)
        if ruling is not None:
            penalty = penalty + ruling.penalty
        ended = live & torch.where(self.replays, self.size == self.script_size, ends & (penalty == 0))
        writes = self._writers(live & ~ended, room)
        if ruling is not None:
            writes = writes & ~ruling.blocked
        stuck = live & ~ended & ~writes

        # Where a blank that is stuck would be cut back, and whether it is written again instead.
        column = torch.arange(TAIL + 1, device=live.device)
        here = column == held[..., None]
        self.ends = torch.where(here & live[..., None], (end - penalty)[..., None], self.ends)
        best_end, best = self.ends.masked_fill(column > held[..., None], -torch.inf).max(2)
        full = self.size >= self.most if ruling is None else (self.size >= self.most) | ruling.full
        again, back = self._second_thoughts(stuck & full, best, best_end, room)
        restarts = again | back
        done = ended | (stuck & ~restarts)
        cut = torch.where(stuck, self.shown + best, self.size)
        limit = torch.where((self.size < self.most) & ~self.replays, self._budget(room), self.most_limit)
        if ruling is not None:
            limit = torch.where(ruling.blocked, _BLANKS, limit)
        limit = limit * (done & (stuck | self.replays))
        self.limited = torch.maximum(self.limited, limit.amax(1))
        self.chance = torch.where(live, end, self.chance)
        self.chance = torch.where(stuck, best_end.clamp(min=0.0), self.chance).masked_fill(restarts, torch.nan)

        # A text that cannot have what it needs ends in the middle: what it has by then should be seen.
        hopeless = room.spare < 0
        long = room.blank > TAIL if ruling is None else (room.blank > TAIL) & ~ruling.held
        at_once = writes & (held == 0) & (long | hopeless)
        keeps = here[..., :-1] & (writes & ~at_once)[..., None]
        self.tokens = torch.where(keeps, token[..., None], self.tokens)
        self.scores = torch.where(keeps, score[..., None], self.scores)
        final = torch.where(done, cut, self.shown + at_once)
        place = self.gap + final.cumsum(1) - final + self.shown
        new = done[..., None] & (column[:-1] < (cut - self.shown)[..., None])
        places = torch.where(new, place[..., None] + column[:-1], -1)
        shown = Shown(
            torch.cat([torch.where(at_once, place, -1), places.flatten(1)], 1),
            torch.cat([token.expand_as(live), self.tokens.flatten(1)], 1),
            torch.cat([score.expand_as(live), self.scores.flatten(1)], 1),
        )

        kept = torch.where(restarts, -1, torch.where(done, cut - self.shown, held))
        self.stale = (column > kept[..., None]) & (column <= held[..., None]) & live[..., None]
        self.size = torch.where(restarts, 0, torch.where(done, cut, self.size + writes))
        self.attempt = torch.where(back, _REPLAY, self.attempt + again)
        self.latest = torch.where(writes, token, self.latest)
        self.shown, self.open, self.fresh = final, self.open & ~done, self.fresh | restarts
        return shown

    def computed(self, live: Tensor, cell: Tensor) -> None:
        """The rows of these blanks, [B, G] bool, are now in the cache, in these cells, [B, G]."""
        here = torch.arange(TAIL + 1, device=cell.device) == (self.size - self.shown)[..., None]
        self.cells = torch.where(here & live[..., None], cell[..., None], self.cells)
        self.fresh = self.fresh & ~live

    def select(self, rows: Tensor) -> Self:
        return type(self)(*(getattr(self, part.name).index_select(0, rows) for part in fields(self)))

    def join(self, other: Self) -> Self:
        pairs = ((getattr(self, part.name), getattr(other, part.name)) for part in fields(self))
        return type(self)(*(torch.cat(pair) for pair in pairs))

    def _writers(self, willing: Tensor, room: Room) -> Tensor:
        """Which of these blanks get a token, [B, G] bool: those with room. Blanks that are written together share what
        is left, from left to right, those below their least first."""
        willing = willing & (room.blank > 0) & (self.size - self.shown < TAIL)
        needy = willing & (self.size < self.kept)
        others = willing & ~needy
        others = others & (others.cumsum(1) <= room.spare)
        return (needy & (needy.cumsum(1) <= room.text)) | others

    def _budget(self, room: Room) -> Tensor:
        """Which limit of its text leaves a blank no token, [B, 1]"""
        tokens = (self.max_tokens - self.size.sum(1))[:, None]
        # Who allows as many steps as tokens means the tokens, though ends take steps too.
        by_tokens = torch.where(
            self.together[:, None], room.steps > 1, tokens <= room.text + self.open.sum(1, keepdim=True)
        )
        return torch.where(by_tokens, self.tokens_limit[:, None], _MAX_STEPS)

    def _second_thoughts(self, full: Tensor, best: Tensor, best_end: Tensor, room: Room) -> tuple[Tensor, Tensor]:
        """Which of the blanks that are full are written again, and for which of them an earlier attempt is replayed.
        Both [B, G] bool"""
        full = full & (self.shown == 0) & ~self.replays
        # There must be steps for this attempt and a replay, and for whatever else the text needs.
        needs = ((self.kept - self.size).clamp(min=0) + 1) * self.open
        others = needs.sum(1, keepdim=True) - needs
        affordable = room.steps - others > 2 * (self.most.clamp(max=TAIL) + 1) + 1
        again = full & (best_end < FAIR) & (self.attempt + 1 < self.attempts) & affordable
        # Without noise attempts may be the same: then rounding must not decide.
        better = best_end > self.script_end - _EQUAL
        store = again & better
        self.script = torch.where(store[..., None], self.tokens, self.script)
        self.script_size = torch.where(store, best, self.script_size)
        self.script_attempt = torch.where(store, self.attempt, self.script_attempt)
        self.script_end = torch.where(store, best_end, self.script_end)
        return again, full & ~again & ~better


class _Blank:
    """What is given of one blank."""

    def __init__(
        self,
        prompt: Prompt,
        gap: int | None,
        number: int,
        layout: Layout,
        positions: int,
        hints: bool,
        settings: DecodeConfig,
    ) -> None:
        self.real, self.gap = gap is not None, gap or 0
        self.placed = layout.marks is None
        in_front = len(prompt.prefix) + 1
        self.at = in_front + self.gap + number * (1 + layout.jump)
        if not self.placed:
            self.at = in_front + len(prompt.start) + len(prompt.gaps)
        bounds = prompt.bounds.get(self.gap, Bounds()) if self.real else Bounds()
        behind = positions - 1 - self.at
        most = _ENDLESS if bounds.most is None else bounds.most
        self.least, self.most, self.kept = bounds.least, min(most, behind), prompt.owed(self.gap) if self.real else 0
        rule = prompt.rules.get(self.gap) if self.real else None
        self.most_limit = _BLANKS if most <= behind or (rule is not None and rule.hints) else _MAX_LENGTH
        self.headed = self.real and self.gap in prompt.headed
        # Nothing can come out differently if nothing is drawn. Who asks for a length wants no other. Long blanks are
        # not held whole.
        varies = (hints or settings.temperature > 0.0) and (
            self.least < self.most <= TAIL if rule is None else bool(rule.hints)
        )
        self.attempts = ATTEMPTS if varies else 1
        asked = prompt.words.get(self.gap) if self.real else None
        fitting = [max(1, int(self.most * share)) for share in _SHARES] if rule is None else rule.hints
        words = [asked, *(min(fit, fit if asked is None else asked) for fit in fitting)]
        tried, onward = words if hints and varies else [asked] * ATTEMPTS, prompt.writes_on(self.gap)
        self.openings = [layout.opening(words, onward, number) for words in tried]


def _padded(prompt: Prompt) -> list[int | None]:
    return [*sorted(prompt.gaps), *[None] * (MOST - len(prompt.gaps))]
