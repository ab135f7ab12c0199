"""A filler at work: how its blanks are written. What a row is and sees: fill.py.

- What is given is computed once, together with the first row of each blank at work: its opening token.
- From then on, a step reads from the last row of every blank at work what comes next there, a token or the end, and
  then computes one more row for each: of that token or, where a blank has ended, the opening of the next one. In step,
  these rows see each other. No row is computed twice, and so rows that were cut back leave the cache.
- The end is decided apart from the words: drawn with the probability that the model gives it, or by a threshold at
  temperature 0. What limits do, and how a blank ends by them, is in fills.py.
- A few texts have rules, such as runs of tokens that are banned, or a number of words. They are written one blank after
  the other, and asked what they allow before a token is chosen: fill_rules.py. Where a blank has choices, the model
  weighs them all, one is drawn, and it is written token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from insertlm.core.noise import uniform
from insertlm.core.packing import Packing
from insertlm.families.corruption.blanks import MOST
from insertlm.families.corruption.laid_out import Layout
from insertlm.families.fill_rules import FillRules, allow
from insertlm.families.fills import TAIL, Fills, Ruling
from insertlm.inference.rules import Choice
from insertlm.inference.sampling import draws
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.writer import BatchWriter, Step
from insertlm.nn.attention import ROOM, Attention, CachedAttention, PackedAttention, PrefixCache

if TYPE_CHECKING:
    from insertlm.families.fill import Filler

__all__ = ["FillWriter"]

_TOKEN, _END, _CHOICE = 0, 1, 2  # streams of noise in decoding
_PATIENCE = 4  # steps: a few useless rows cost less than waiting for the GPU after every step


class FillWriter(BatchWriter):
    """A batch of texts. Of each are kept, besides its blanks (`fills`):

    rules: of those that have some, else None   play: what may be written
    rows: [B, MOST] bool, the blanks at work, of which there is a row   hidden: [B, MOST, d], this row

    ending: [d], the unembedding of the end   tight: the first step in which tokens may be held, while nobody joins
    """

    mixes = True

    def __init__(
        self,
        family: Filler,
        layout: Layout,
        prompts: Sequence[Prompt],
        settings: DecodeConfig,
        longest: int,
    ) -> None:
        super().__init__(prompts, settings, family.device)
        self.family, self.layout, self.end = family, layout, layout.end
        vectors = family.unembedding.weight
        self.ending = vectors[self.end].to(family.backbone.precision).float()
        self.rules = [FillRules(prompt) if FillRules.apply_to(prompt) else None for prompt in prompts]
        self.play = _Play([*map(_Play.of, prompts)], family.writable, len(vectors))
        together = settings.parallel == 0
        self.fills = Fills.of(
            prompts,
            settings,
            layout,
            [longest - family.framing - len(prompt.prefix) - len(prompt.start) for prompt in prompts],
            family.model.max_length,
            family.abilities.takes_hints,
            [together and rules is None for rules in self.rules],
            family.device,
        )
        waits = together or family.device.type != "cuda" or any(self.rules)
        self.patience = 1 if waits else _PATIENCE
        shortest = torch.minimum(self.fills.left.min(), self.fills.most.min()) - self.fills.least.sum(1).max()
        self.tight = int(shortest) - MOST - TAIL
        self.rows = self._at_work()
        self.hidden, self.cache = self._read(prompts)

    # --- A step

    def step(self, number: int) -> Step:
        """The next token of every blank at work, or its end."""
        own, fills = self.own(number), self.fills
        if self._idle():
            return self._judged(*(part.new_empty(len(part), 0) for part in (fills.gap, fills.gap, fills.chance)))
        cells = self._packing(self.rows).pack(_cells(self.rows))  # [R]
        text, blank = cells // MOST, cells % MOST
        hidden = self.hidden.flatten(0, 1)[cells]
        logits, end_logit = self._logits(hidden)
        mass = logits.logsumexp(-1)
        end = (end_logit - mass).exp()
        ends = self._ends(end, text, blank, own)
        first = fills.headed & (fills.size == 0)
        choices = logits + self.play.bias(text, first.flatten()[cells])
        ends, choices, ruling, beyond = self._rule(cells, ends, logits, choices, own)
        texts = None if self.mixed is None else text.tolist()
        turn = (own if isinstance(own, int) else own[text]) * MOST + blank
        token = self.choose(choices, draws(_TOKEN, self.seed[text], turn), texts)
        token = torch.where(fills.replays.flatten()[cells], fills.scripted.flatten()[cells], token)
        score = logits.gather(1, token[:, None]).squeeze(1) - mass
        if ruling is not None:
            passed = [row for row, ids in beyond.items() if ids[int(token[row])]]
            ruling.full.view(-1)[cells[passed]] = True
            ruling = ruling._replace(blocked=ruling.blocked | ruling.full)

        def dense(values: Tensor) -> Tensor:
            return values.new_zeros(self.rows.numel()).index_copy(0, cells, values).view_as(self.rows)

        token, score, end, ends = map(dense, (token, score, end, ends))
        place, tokens, scores = fills.take(token, score, end, ends, own, ruling)
        for row, rules in enumerate(self.rules):
            if rules is not None:
                rules.note(fills.size[row].tolist(), fills.latest[row].tolist())
        if self.patience == 1:
            shown = (place >= 0).any(0).nonzero().squeeze(1)
            place, tokens, scores = (part.index_select(1, shown) for part in (place, tokens, scores))
        elif number < self.tight:
            place, tokens, scores = (part[:, :MOST] for part in (place, tokens, scores))
        return self._judged(place, tokens, scores)

    def write(self, step: Step) -> Tensor:
        """Let go of what was cut back, and compute the rows of what is new."""
        if not self._idle():
            self._forget()
            self._append()
        return step.place

    def _judged(self, place: Tensor, token: Tensor, score: Tensor) -> Step:
        fills = self.fills
        over, limited = fills.over & (place < 0).all(1), fills.limited > 0
        return Step(over & ~limited, over & limited, fills.chance.prod(1), place, token, score, fills.limited)

    def _idle(self) -> bool:
        """Whether all is written, if the host may ask."""
        return self.patience == 1 and bool(self.fills.over.all())

    def _ends(self, end: Tensor, text: Tensor, blank: Tensor, own: Tensor | int) -> Tensor:
        """Whether the model ends each blank at work, [R] bool. end: [R], the chance of it"""
        threshold = self.threshold(end)
        likely = end >= (threshold if isinstance(threshold, float) else threshold[text])
        turn = (own if isinstance(own, int) else own[text]) * MOST + blank
        drawn = uniform(_END, self.seed[text], turn) < end
        if self.mixed is None:
            return likely if self.settings.temperature == 0.0 else drawn
        greedy = torch.tensor([settings.temperature == 0.0 for settings in self.mixed], device=end.device)
        return torch.where(greedy[text], likely, drawn)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ids, −inf where they are not in play, and of the end. [R, V], [R]. hidden: [R, d]"""
        logits = self.family.logits(hidden).float() + self.play.everything
        # In bfloat16 a logit has three digits. Of words these are enough, but ends decide how long fills are.
        logits[:, self.end] = hidden.float() @ self.ending
        return logits, logits[:, self.end]

    def _rule(
        self, cells: Tensor, ends: Tensor, logits: Tensor, choices: Tensor, own: Tensor | int
    ) -> tuple[Tensor, Tensor, Ruling | None, dict[int, Tensor]]:
        """What rules leave of the ends, [R], and the choices, [R, V], and what they say of blanks. And by row, the ids
        that would pass the most of its blank."""
        if not any(self.rules):
            return ends, choices, None, {}
        fills, room, beyond = self.fills, self.fills.room(own), dict[int, Tensor]()
        penalty = torch.zeros(self.rows.shape, device=ends.device)
        blocked, full, held = (torch.zeros_like(self.rows) for _ in range(3))
        live, enough = fills.live.flatten()[cells], (fills.size >= fills.least).flatten()[cells]
        tails = (fills.size - fills.shown).tolist()
        rows = zip(
            cells.tolist(), (ends & enough).tolist(), (live & ~fills.replays.flatten()[cells]).tolist(), strict=True
        )
        for row, (cell, wants, asked) in enumerate(rows):
            text, blank = divmod(cell, MOST)
            rules = self.rules[text]
            if rules is None or not asked:
                continue
            rooms = room.blank[text, : len(rules.fills)].tolist()
            left = rooms[blank]
            if tails[text][blank]:  # no more can be cut back
                rooms[blank] = min(left, TAIL - tails[text][blank])
            if (choice := rules.undecided(blank)) is not None:
                self._decide(choice, rules, text, blank)
            verdict = rules.judge(blank, wants, rooms, int(room.spare[text]))
            choices[row] = allow(verdict, logits[row], choices[row])
            if verdict.over:
                ends[row] = True
            elif verdict.mask is not None:
                # What may not be written takes no share of the probability that it ends here.
                rest = choices[row].logsumexp(0)
                chance = (logits[row, self.end] - torch.logaddexp(rest, logits[row, self.end])).exp()
                ends[row] = self._ends(chance[None], cells[row, None] // MOST, cells[row, None] % MOST, own)
            penalty[text, blank], held[text, blank] = verdict.penalty, verdict.held
            blocked[text, blank] = left > 0 and choices[row].max() == -torch.inf
            if verdict.beyond is not None:
                beyond[row] = verdict.beyond
        return ends, choices, Ruling(penalty, blocked, full, held), beyond

    def _decide(self, choice: Choice, rules: FillRules, text: int, blank: int) -> None:
        """Draw one of the options, by their probabilities."""
        weights = self.family.weigh(rules.prompt, rules.fills[:blank], choice.options)
        logits = torch.tensor([weights], device=self.seed.device)
        seed = self.seed[text, None]
        choice.decide(weights, int(self.choose(logits, draws(_CHOICE, seed, blank), [text])))

    # --- Joining

    def stay_open(self) -> None:
        self.patience = 1

    def join(self, other: Self, number: int) -> None:
        super().join(other, number)
        # The caches count on from their longest texts, which may have left; what counts is who is here now.
        mine, theirs = _measured(self.cache), _measured(other.cache)
        self.fills, self.play = self.fills.join(other.fills), self.play.join(other.play)
        self.rules += other.rules
        self.rows, self.hidden = torch.cat([self.rows, other.rows]), torch.cat([self.hidden, other.hidden])
        self.cache = mine.join(theirs, ROOM)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        here = rows.tolist()
        self.rules = [self.rules[row] for row in here]
        self.fills, self.play = self.fills.select(rows), self.play.select(here)
        self.rows, self.hidden = self.rows.index_select(0, rows), self.hidden.index_select(0, rows)
        self.cache = _measured(self.cache.select(rows))

    # --- Computing

    def _at_work(self) -> Tensor:
        """The blanks that get a row now, [B, MOST] bool."""
        live = self.fills.live
        if self.settings.parallel == 0:
            return live
        # One after the other, every text has one row, so that the host need not ask how many there are. That of a text
        # that is over stays for nobody to see.
        first = torch.arange(MOST, device=live.device) == 0
        return live | (self.fills.over[:, None] & first)

    def _packing(self, rows: Tensor) -> Packing:
        return Packing(rows, counts=None if self.settings.parallel == 0 else np.ones(len(rows), np.int64))

    def _read(self, prompts: Sequence[Prompt]) -> tuple[Tensor, PrefixCache]:
        """Compute what is given, and the openings of the blanks at work. Returns their hidden rows and the cache."""
        # Drafts and samples of one text have all of this in common, so each is computed once.
        openings = torch.cat([*self.fills.fed, self.rows], 1).tolist()
        starts, first = list[_Start](), dict[_Start, int]()
        for place, (prompt, row) in enumerate(zip(prompts, openings, strict=True)):
            tokens, positions = self._given(prompt)
            starts.append((tuple(tokens), tuple(positions), tuple(row)))
            first.setdefault(starts[-1], place)
        number = {start: row for row, start in enumerate(first)}
        which = torch.tensor([number[start] for start in starts], device=self.family.device)
        hidden, cache, cells = self._begin([*first], torch.tensor([*first.values()], device=self.family.device))
        self.fills.computed(self.rows, cells.index_select(0, which))
        return (hidden, cache) if len(first) == len(starts) else (hidden.index_select(0, which), cache.select(which))

    def _begin(self, starts: Sequence[_Start], texts: Tensor) -> tuple[Tensor, PrefixCache, Tensor]:
        """Compute these starts. texts: one with each   Also returns the openings' cells in the cache, [S, MOST]"""
        device, rows = self.family.device, self.rows.index_select(0, texts)
        lengths = np.array([len(tokens) for tokens, _, _ in starts])
        opens = rows.sum(1).cpu().numpy()
        whole = [torch.zeros(len(starts), int(lengths.max()) + MOST, dtype=torch.int64) for _ in range(2)]
        for row, parts in enumerate(starts):
            for matrix, part in zip(whole, parts[:2], strict=True):
                matrix[row, : len(part)] = torch.tensor(part)
        length = torch.from_numpy(lengths).to(device)[:, None]
        column = torch.arange(whole[0].shape[1], device=device)
        # Openings follow what is given, in the last columns.
        in_front = column[:-MOST] < length
        keep = torch.cat([in_front, rows], 1)
        packing = Packing(keep, counts=lengths + opens)
        width = len(column) - MOST
        order = packing.pack(torch.where(column < width, column * self.layout.causal, width).expand_as(keep)).int()
        record: list[tuple[Tensor, Tensor]] = []
        attention = PackedAttention(packing.segments, order=order, record=record)
        ids, places = (
            packing.pack(torch.cat([matrix.to(device)[:, :-MOST], new.index_select(0, texts)], 1))
            for matrix, new in zip(whole, self.fills.fed, strict=True)
        )
        hidden = self._run(ids, places, attention, packing.where[:, -MOST:].flatten().clamp(min=0))
        cells = packing.where[:, -MOST:] - packing.starts[:, None]
        return hidden.view(len(starts), MOST, -1), PrefixCache.of(record, packing.segments, ROOM), cells

    def _given(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        """The given row with its blanks, and the positions of its tokens."""
        jump, blanks = self.layout.jump, count()
        tokens, positions = [*prompt.prefix, self.family.specials.bos], [*range(len(prompt.prefix) + 1)]
        for gap, token in enumerate([*prompt.start, None]):
            if gap in prompt.gaps:
                tokens.append(self.layout.blank_of(next(blanks)))
                positions.append(positions[-1] + 1)
            if token is not None:
                tokens.append(token)
                positions.append(positions[-1] + 1 + jump * (gap in prompt.gaps))
        return tokens, positions

    def _forget(self) -> None:
        """Let the rows that were cut back leave the cache."""
        stale = self.fills.stale
        if self.settings.parallel != 0:  # they are the last ones
            self.cache = replace(self.cache, length=self.cache.length - stale.sum((1, 2)).int())
        elif stale.any():
            cells = torch.where(stale, self.fills.cells, self.cache.cells)  # of others, one that does not exist
            gone = torch.zeros(len(stale), self.cache.cells + 1, dtype=torch.bool, device=stale.device)
            gone = gone.scatter(1, cells.flatten(1), True)[:, :-1]
            self.cache = self.cache.without(gone)
            moved = self.fills.cells - gone.cumsum(1).gather(1, self.fills.cells.flatten(1)).view_as(stale)
            self.fills = replace(self.fills, cells=moved.clamp(min=0))

    def _append(self) -> None:
        """Compute one more row of each blank at work."""
        self.rows = self._at_work()
        packing = self._packing(self.rows)
        token, position = map(packing.pack, self.fills.fed)
        self.cache = self.cache.with_room(packing.segments.longest)
        attention = CachedAttention(self.cache, packing.segments)
        hidden = self._run(token, position, attention)
        before, after = self.cache.length, attention.kept
        cell = before[:, None] + packing.where - packing.starts[:, None]
        self.fills.computed(self.fills.live, cell)
        # Rows that nobody sees are overwritten, so that the cache of a text that is over does not grow.
        length = torch.where(self.fills.over, before, after.length)
        self.cache = replace(after, length=length)
        self.hidden = hidden[packing.where.clamp(min=0)]

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None) -> Tensor:
        with self.family.backbone.autocast():
            hidden: Tensor = self.family.backbone(tokens, positions, attention, wanted=wanted)
        return hidden


class _Play:
    """Which ids may be written in each text.

    kinds: of each text, its banned ids, and its heads   table: [M, V], 0 for what may be written, else −inf
    which: [B, 2], the row of the table for each text, for tokens in general and for the first of a headed blank
    everything: [V], the same for what the model ever writes, and the end
    """

    def __init__(self, kinds: Sequence[_Kind], writable: Tensor, size: int) -> None:
        self.kinds, self.writable, self.size = kinds, writable, size
        pairs = [((banned, None), (banned, heads)) for banned, heads in kinds]
        number = {key: row for row, key in enumerate(dict.fromkeys(key for pair in pairs for key in pair))}
        words = torch.zeros(size, dtype=torch.bool, device=writable.device).index_fill(0, writable, True)
        rows = []
        for banned, heads in number:
            row = words if heads is None else words & _among(heads, size, words.device)
            rows.append(row & ~_among(banned, size, words.device) if banned else row)
        self.table = torch.zeros(len(rows), size, device=words.device).masked_fill(~torch.stack(rows), -torch.inf)
        self.which = torch.tensor([[number[key] for key in pair] for pair in pairs], device=words.device)
        self.everything = torch.zeros(size, device=words.device).masked_fill(~words, -torch.inf)

    @staticmethod
    def of(prompt: Prompt) -> _Kind:
        return frozenset(run[0] for run in prompt.banned if len(run) == 1), prompt.heads if prompt.headed else None

    def bias(self, text: Tensor, first: Tensor) -> Tensor:
        """[R, V]. text: [R]   first: [R] bool, whether it is the first token of a headed blank"""
        return self.table[self.which[text, first.long()]]

    def join(self, other: _Play) -> _Play:
        return _Play([*self.kinds, *other.kinds], self.writable, self.size)

    def select(self, rows: Sequence[int]) -> _Play:
        return _Play([self.kinds[row] for row in rows], self.writable, self.size)


_Kind = tuple[frozenset[int], frozenset[int] | None]
# Of a text: the tokens and the positions of what is given, and the openings of its blanks with theirs.
_Start = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=16)  # a set of heads holds thousands of ids, and all texts share it
def _among(ids: frozenset[int], size: int, device: torch.device) -> Tensor:
    """[size] bool"""
    inside = torch.tensor([token for token in ids if 0 <= token < size], dtype=torch.int64, device=device)
    return torch.zeros(size, dtype=torch.bool, device=device).index_fill(0, inside, True)


def _cells(rows: Tensor) -> Tensor:
    """The number of each cell, [B, MOST]"""
    return torch.arange(rows.numel(), device=rows.device).view_as(rows)


def _measured(cache: PrefixCache) -> PrefixCache:
    return replace(cache, longest=int(cache.length.max()))
