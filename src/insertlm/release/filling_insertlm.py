"""How an exported filler writes: blank by blank from left to right, or a token in every blank at a time.

Design choices:
- What is given is `<bos> text`, with `<mask>` wherever a blank is. It sees itself and no fill. A fill begins with an
  opening token (<stop>, or one for a hint of about so many words), which stands at the position of its blank; its
  tokens stand at the following ones. Rows of fills see all that is given and all rows of fills before them. So no row
  that is computed ever changes, and keys and values are kept.
- The end of a blank is decided apart from its words: drawn with the probability that the model gives it, or at
  temperature 0 by `stop_threshold`.
- Limits are budgets. A blank that may have no more tokens is cut back to where its end was likeliest, among the last
  32 tokens. A blank that reaches its own most where no end was fair is written up to three times. Such a text is not
  complete.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .writing_insertlm import Request, choose, uniform

__all__ = ["FillWriter"]

_TOKEN, _END = 0, 1  # streams of noise, by purpose
_TAIL = 32  # the most tokens that are cut back
_FAIR = 0.3  # the chance of an end that is good enough to cut back to
_ATTEMPTS = 3  # at a blank
_SHARES = (0.75, 0.5)  # words for each token of room: the hints of the second and third attempt
_REPLAY = _ATTEMPTS  # the number of an attempt in which an earlier one is repeated
_EQUAL = 1e-4  # chances that differ by less
_TOO_SHORT = 4.0  # what a blank below its least takes off the chance of its end
_ENDLESS = 1 << 40


class _Blank:
    """One blank.

    at: the position of its opening   openings: of each attempt   tokens: so far, of which the first `final` may not be
    cut back   rows: the cells in the cache of its rows, each of which has said in `ends` how likely an end is there
    script: tokens of the best attempt before this one, its number, and how likely it ends there
    """

    def __init__(self, number: int, model: Any, request: Request) -> None:
        fill, gap = model.config.fill, request.given.blanks[number]
        self.number, self.at = number, 1 + gap + number * (1 + fill["jump"])
        self.least, most = request.needs[number], request.rooms[number]
        self.most = min(most, model.config.max_position_embeddings - 1 - self.at)
        self.headed = request.heads is not None and gap in request.given.spaces
        hints = fill["hint_ids"] > 0
        varies = (hints or request.decode["temperature"] > 0.0) and self.least < self.most <= _TAIL
        self.attempts = _ATTEMPTS if varies else 1
        asked = request.words[number]
        fitting = [max(1, int(self.most * share)) for share in _SHARES]
        tried = [asked, *(fit if asked is None else min(asked, fit) for fit in fitting)]
        self.openings = [_opening(model, words) for words in (tried if hints and varies else [asked] * _ATTEMPTS)]
        self.open, self.limited, self.attempt, self.final = True, False, 0, 0
        self.tokens, self.rows, self.ends = list[int](), list[int](), list[float]()
        self.script: tuple[list[int], int, float] = [], 0, -torch.inf

    @property
    def next(self) -> tuple[int, int]:
        """The token of the row to compute, and its position."""
        attempt = self.script[1] if self.attempt == _REPLAY else self.attempt
        return self.tokens[-1] if self.tokens else self.openings[attempt], self.at + len(self.tokens)

    def cut(self, size: int) -> list[int]:
        """Keep so many tokens and the rows that tell what follows them. Returns the rows to forget."""
        stale = self.rows[size + 1 :]
        self.tokens, self.rows, self.ends = self.tokens[:size], self.rows[: size + 1], self.ends[: size + 1]
        return stale

    def restart(self, attempt: int) -> list[int]:
        """Write it again. Returns the rows to forget, all of them."""
        stale, self.tokens, self.rows, self.ends = self.rows, [], [], []
        self.attempt = attempt
        return stale


class FillWriter:
    """One text while a filler writes it. cache: keys and values   cells: a number for each of its rows that can go"""

    def __init__(self, model: Any, request: Request) -> None:
        fill, given, decode = model.config.fill, request.given, request.decode
        self.model, self.request, self.together = model, request, decode.get("parallel") == 0
        if len(given.blanks) > fill["most"]:
            raise ValueError(f"a filler has learnt texts with up to {fill['most']} blanks; got {len(given.blanks)}")
        self.blanks = [_Blank(number, model, request) for number in range(len(given.blanks))]
        last, positions = self.blanks[-1], model.config.max_position_embeddings
        used = max(len(given.ids) + 1 + len(self.blanks) * (1 + fill["jump"]), last.at + 1 + last.least)
        if used > positions:
            raise ValueError(f"the text and its blanks need {used} positions; the model has {positions}")
        room = request.longest - len(given.ids)
        self.most, self.steps = min(room, decode.get("max_tokens") or _ENDLESS), decode["max_steps"]
        self.bias = torch.full((2, model.config.vocab_size), -torch.inf, device=model.device)
        self.bias[0, model.writable] = 0.0  # of any token; [1]: of the first one behind a hidden space
        self.bias[1, model.writable if request.heads is None else model.writable[request.heads]] = 0.0

    def run(self) -> bool:
        """Write until all blanks have ended. Returns whether the model ended them all."""
        self._read()
        for step in range(self.steps):
            if not self._live():
                break
            self._step(step)
        return all(not blank.open and not blank.limited for blank in self.blanks)

    def fills(self) -> list[list[int]]:
        """The ids of each fill."""
        return [blank.tokens[: blank.final] for blank in self.blanks]

    def _live(self) -> list[_Blank]:
        """The blanks at work."""
        return [blank for blank in self.blanks if blank.open][: None if self.together else 1]

    # --- A step

    def _step(self, number: int) -> None:
        """The next token of every blank at work, or its end."""
        live, stale = self._live(), list[int]()
        left = self._left(number)
        needy = others = 0
        for blank in live:
            token, end, ends = self._expect(blank, number)
            short = len(blank.tokens) < blank.least
            blank.ends.append(end - _TOO_SHORT * short)
            if self._ended(blank, ends and not short):
                self._close(blank, len(blank.tokens), blank.attempt == _REPLAY)
                continue
            room = left.of(blank)
            if room > 0 and len(blank.tokens) - blank.final < _TAIL:
                needy, others = needy + short, others + (not short)
                if needy <= left.text if short else others <= left.spare:
                    # What may still be cut back is not final.
                    blank.final += blank.final == len(blank.tokens) and (room > _TAIL or left.spare < 0)
                    blank.tokens.append(token)
                    continue
            stale += self._stuck(blank, left)
        self._forget(stale)
        self._append(self._live())

    def _ended(self, blank: _Blank, ends: bool) -> bool:
        return len(blank.tokens) == len(blank.script[0]) if blank.attempt == _REPLAY else ends

    def _close(self, blank: _Blank, size: int, limited: bool) -> list[int]:
        blank.open, blank.limited, blank.final = False, limited, size
        return blank.cut(size)

    def _stuck(self, blank: _Blank, left: _Left) -> list[int]:
        """A blank may have no more tokens: write it again, or cut it back. Returns the rows to forget."""
        size, replays = len(blank.tokens), blank.attempt == _REPLAY
        best = max(range(blank.final, size + 1), key=blank.ends.__getitem__)
        end = blank.ends[best]
        if size >= blank.most and blank.final == 0 and not replays:
            # There must be steps for this attempt and a replay, and for whatever else the text needs.
            affordable = left.steps - left.others(blank) > 2 * (blank.most + 1) + 1
            better = end > blank.script[2] - _EQUAL
            if end < _FAIR and blank.attempt + 1 < blank.attempts and affordable:
                if better:
                    blank.script = blank.tokens[:best], blank.attempt, end
                return blank.restart(blank.attempt + 1)
            if not better:
                return blank.restart(_REPLAY)
        return self._close(blank, best, True)

    def _left(self, number: int) -> _Left:
        owed = {blank.number: max(0, blank.least - len(blank.tokens)) for blank in self.blanks if blank.open}
        steps = self.steps - number
        text = self.most - sum(len(blank.tokens) for blank in self.blanks)
        # One after the other, each token takes a step and so does each end; together, blanks have steps of their own.
        text = text if self.together else min(text, steps - len(owed))
        return _Left(text, text - sum(owed.values()), steps, owed, self.together)

    def _expect(self, blank: _Blank, number: int) -> tuple[int, float, bool]:
        """What would be written next: a token, the chance of an end, and whether it ends."""
        logits = (self.hidden[blank.number] @ self.model.unembedding.weight.T).float()
        end = logits[self.model.config.eos_token_id]
        words = logits + self.bias[0]
        mass = torch.logaddexp(words.logsumexp(0), end)
        chance, decode = (end - mass).exp(), self.request.decode
        turn = number * self.model.config.fill["most"] + blank.number
        if blank.attempt == _REPLAY:
            script = blank.script[0]
            return (script[len(blank.tokens)] if len(blank.tokens) < len(script) else 0), float(chance), False
        if decode["temperature"] == 0.0:
            ends = bool(chance >= decode["stop_threshold"])
        else:
            ends = bool(uniform(_END, self.request.seed, turn).to(chance.device) < chance)
        if blank.headed and not blank.tokens:
            words = logits + self.bias[1]
        ids = torch.arange(len(words), device=words.device)
        token = choose(words, lambda: uniform(_TOKEN, self.request.seed, turn, ids), *self.request.way)
        return token, float(chance), ends

    # --- Computing

    def _read(self) -> None:
        """Compute what is given, then the openings of the blanks at work."""
        config, given = self.model.config, self.request.given
        tokens, positions = [config.bos_token_id], [0]
        for gap, token in enumerate([*given.ids, None]):
            if gap in given.blanks:
                tokens.append(config.fill["mask_id"])
                positions.append(positions[-1] + 1)
            if token is not None:
                tokens.append(token)
                positions.append(positions[-1] + 1 + config.fill["jump"] * (gap in given.blanks))
        self.cache, self.cells, self.hidden = list[Any](), [-1] * len(tokens), dict[int, Tensor]()
        self._compute(tokens, positions)
        self._append(self._live())

    def _append(self, blanks: list[_Blank]) -> None:
        """Compute one more row of each of these blanks."""
        if not blanks:
            return
        rows = self._compute(*zip(*(blank.next for blank in blanks), strict=True))
        for blank, row in zip(blanks, rows, strict=True):
            self.hidden[blank.number] = row
            blank.rows.append(self._cell)
            self.cells.append(self._cell)
            self._cell += 1

    def _compute(self, tokens: Any, positions: Any) -> Tensor:
        """Hidden rows, [N, width], of tokens that see all that is in the cache, and each other."""
        device = self.model.device
        ids, places = torch.tensor([[*tokens]], device=device), torch.tensor([*positions], device=device)
        hidden: Tensor = self.model.backbone(ids, positions=places, cache=self.cache)[0]
        return hidden

    _cell = 0

    def _forget(self, rows: list[int]) -> None:
        """Let these rows leave the cache."""
        if not rows:
            return
        keep = [place for place, cell in enumerate(self.cells) if cell not in rows]
        self.cells = [self.cells[place] for place in keep]
        index = torch.tensor(keep, device=self.model.device)
        self.cache[:] = [tuple(part.index_select(2, index) for part in layer) for layer in self.cache]


class _Left(NamedTuple):
    """What limits leave before a step. text: tokens   spare: of these, how many no blank needs for its least
    steps: to come   owed: tokens that each open blank still needs, by its number"""

    text: int
    spare: int
    steps: int
    owed: dict[int, int]
    together: bool

    def of(self, blank: _Blank) -> int:
        """The most tokens that a blank may still get."""
        room: int = min(blank.most - len(blank.tokens), self.owed[blank.number] + self.spare)
        return min(room, self.steps - 1) if self.together else room

    def others(self, blank: _Blank) -> int:
        """The steps that other blanks need at least."""
        return sum(owed + 1 for number, owed in self.owed.items() if number != blank.number)


def _opening(model: Any, words: int | None) -> int:
    fill = model.config.fill
    if words is None:
        return int(model.config.stop_token_id)
    return int(fill["hint_ids"] + bisect_right(fill["hints"], words) - 1)
