"""How exported models write, all but the filler, for which see filling_insertlm.py: requests, chance, and writers.

Design choices:
- ILM: a row is `<stop> <bos> text`. Slot k means "right after the k-th token"; one softmax over slots × vocabulary. A
  step chooses a slot and then a token in it, or both as a pair (`joint`). The stop classifier reads the hidden row of
  <stop> before every insertion or, in a model with gates, that of every slot; class 0 means that nothing is missing.
- IT: the same row, with a softmax in every slot, of which one word means that nothing is missing there.
- ARM: a row is `<bos> text`, and only one blank, at the end of the text, can be written.
- Special tokens are never chosen. One token is written in a step.
- Random numbers are a hash of their purpose, the seed, the step and the entry, so a text depends on its seed alone.
- The given text comes back unchanged, because the result is joined from the given pieces and the fills. The model does
  not see a single space before a blank; it writes the space as the start of the fill's first token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ArmWriter",
    "Given",
    "IlmWriter",
    "Infilled",
    "ItWriter",
    "Lengths",
    "Request",
    "checked",
    "choose",
    "parse_blanks",
    "uniform",
]

_SLOT, _TOKEN, _GATE = 0, 1, 2  # streams of noise, by purpose; an ARM has one, an IT two of its own
_NEXT, _CELL, _WORD = 0, 0, 1
_PLAUSIBLE = 0.5  # an order that looks at tokens skips slots with less than this share of the largest mass
_COLD = 1e-30  # lower temperatures count as 0, because logits would overflow
_ENDLESS = 1 << 40  # the most tokens of a blank without a maximum
# What a word follows without a space: an opening bracket or quotation mark, a hyphen, a dash or a slash.
_OPENS = re.compile(r"""(?:[(\[{“‘„«¿¡/–—-]|(?<=[\s(\[–—-])["'])\Z""")
_ORDERS = ("auto", "mass", "certainty", "margin")

Lengths = int | Sequence[int | None] | None


# --- Requests ---------------------------------------------------------------------------------------------------------


class Infilled(NamedTuple):
    """text: with its blanks filled   fills: the text of each blank   complete: False if a limit ended it"""

    text: str
    fills: list[str]
    complete: bool


class Given(NamedTuple):
    """ids: the given text as the model sees it   blanks: for each blank the number of ids before it   spaces: those
    numbers of the blanks whose first token brings a space: one that stands before the blank and is hidden, or one that
    is dropped, because what stands there opens the word, as a bracket does"""

    ids: list[int]
    blanks: list[int]
    spaces: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[str], tokenizer: Any, by_words: bool) -> Given:
        """by_words: whether the model has learnt to begin every blank with a whole word"""
        ids, blanks, spaces = list[int](), list[int](), list[int]()
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            hidden = not last and piece.endswith(" ") and (number == 0 or len(piece) > 1)
            seen = piece[:-1] if hidden else piece
            ids += tokenizer(seen, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if not last:
                if blanks and blanks[-1] == len(ids):
                    raise ValueError(
                        f"blanks {number} and {number + 1}: the model sees nothing between them; expected one blank "
                        "for both, or some text between them"
                    )
                blanks.append(len(ids))
                opened = by_words and _OPENS.search(" " + piece if number == 0 else piece)
                spaces += [len(ids)] if hidden or opened else []
        return cls(ids, blanks, frozenset(spaces))


class Request(NamedTuple):
    """needs, rooms: the fewest and the most tokens of each blank   words: about how many words, None: not said
    heads: [W] bool, which of the ids that may be written begin a word; None if no blank needs it
    longest: most tokens of a text, special ones not counted   seed: in 32 bits
    """

    given: Given
    needs: list[int]
    rooms: list[int]
    words: list[int | None]
    heads: Tensor | None
    decode: dict[str, Any]
    longest: int
    seed: int

    @classmethod
    def of(
        cls,
        given: Given,
        lengths: tuple[Lengths, Lengths, Lengths],
        least: int,
        heads: Tensor | None,
        decode: dict[str, Any],
        longest: int,
        seed: int,
    ) -> Request:
        """lengths: as the user gave them, least, most and words   least: of a blank of which nothing is said"""
        lows, highs, words = (_each(given_, len(given.blanks)) for given_ in lengths)
        rooms = [_ENDLESS if high is None else high for high in highs]
        needs = [
            (0 if hint == 0 else min(least, room)) if low is None else low
            for low, room, hint in zip(lows, rooms, words, strict=True)
        ]
        if any(not 0 <= need <= room for need, room in zip(needs, rooms, strict=True)):
            raise ValueError(f"expected 0 <= min_length <= max_length, got {lengths[0]} and {lengths[1]}")
        if not 0 <= seed < 1 << 62:
            raise ValueError(f"expected 0 <= seed < 2^62, got {seed}")
        folded = (seed + (seed >> 32) * 0x9E3779B9) & 0xFFFFFFFF
        return cls(given, needs, rooms, words, heads, decode, longest, folded)

    @property
    def way(self) -> tuple[float, int, float]:
        """How tokens are chosen, for `choose`."""
        return self.decode["temperature"], self.decode["top_k"], self.decode["top_p"]


def checked(decode: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Settings, refused if there is no such one or its value has no meaning. known: those of config.json"""
    if unknown := decode.keys() - known.keys():
        raise ValueError(f"unknown setting {min(unknown)}; expected one of {', '.join(known)}")
    order, one = decode.get("order", "auto"), decode.get("position_top_k", 1)
    if order not in _ORDERS:
        raise ValueError(f"order: expected one of {', '.join(_ORDERS)}, got {order!r}")
    if order in ("certainty", "margin") and (decode.get("joint", False) or one != 1):
        raise ValueError(f"order {order}: expected joint=False and position_top_k=1")
    if not (decode["temperature"] >= 0 and 0 < decode["top_p"] <= 1 and 0 <= decode.get("stop_threshold", 0) <= 1):
        raise ValueError("expected temperature >= 0, 0 < top_p <= 1 and 0 <= stop_threshold <= 1")
    if min(decode["top_k"], one, decode["max_steps"] - 1) < 0:
        raise ValueError("expected top_k >= 0, position_top_k >= 0 and max_steps >= 1")
    if decode.get("parallel", 1) not in (0, 1):
        raise ValueError(f"parallel: expected 1, a token a step, or 0, one in every blank, got {decode['parallel']}")
    return decode


def parse_blanks(text: str) -> list[str]:
    """The pieces around the blanks."""
    for place, character in enumerate(text):
        kind = unicodedata.category(character)
        if kind == "Cs" or (kind == "Cc" and character not in "\t\n\r"):
            raise ValueError(f"the text has U+{ord(character):04X} at character {place}; expected plain text")
    pieces, end = [""], 0
    for match in re.finditer(r"(?<!\\)(\\*)(_+)", text):
        slashes, run = match.groups()
        plain = "_" * (len(slashes) % 2)  # a backslash makes the next underscore a plain one
        run = run.removeprefix(plain)
        pieces[-1] += text[end : match.start()] + slashes[: len(slashes) // 2] + plain
        if len(run) >= 3:
            pieces.append("")
        else:
            pieces[-1] += run
        end = match.end()
    pieces[-1] += text[end:]
    if len(pieces) == 1:
        raise ValueError("the text has no blank; expected ___ where something is missing")
    return pieces


def _each(lengths: Lengths, count: int) -> list[int | None]:
    if lengths is None or isinstance(lengths, int):
        return [lengths] * count
    if len(lengths) != count:
        raise ValueError(f"expected a length, or one for each of the {count} blanks, got {len(lengths)}")
    return list(lengths)


# --- Chance -----------------------------------------------------------------------------------------------------------


def choose(logits: Tensor, noise: Callable[[], Tensor], temperature: float, top_k: int, top_p: float) -> int:
    """An index, drawn by the Gumbel-max trick. logits: [N]   noise: gives [N], uniform on (0, 1)"""
    if temperature < _COLD or top_k == 1:
        return int(logits.argmax())
    # Ties at the k-th place all stay, as in the package.
    logits = logits / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = (before >= top_p) & (before > 0)  # the first always stays, even if top_p is tiny
        logits = logits.masked_fill(torch.zeros_like(out).scatter(0, index, out), -torch.inf)
    return int((logits - (-noise().log()).log()).argmax())


def uniform(stream: int, *counters: Tensor | int) -> Tensor:
    """Floats in (0, 1): a hash of the stream and the counters."""
    return ((_hash(stream, *counters) >> 9).float() + 0.5) * 2.0**-23


def _hash(stream: int, *counters: Tensor | int) -> Tensor:
    """With the 32-bit finaliser of MurmurHash3."""
    low = 0xFFFFFFFF

    def mix(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
        return x ^ (x >> 16)

    # Plain integer arithmetic on int64, so that every device and library version draws the same numbers.
    state: Tensor | int = stream
    for counter in counters:
        state = mix((state + 0x9E3779B9 + mix(torch.as_tensor(counter).long() & low)) & low)
    return torch.as_tensor(state)


# --- Insertion --------------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    """number: the order in which it came, which noise depends on   blank: the blank right after it, or -1
    edge: whether the next token after it must begin a word   new: whether the model wrote it"""

    id: int
    number: int
    blank: int = -1
    edge: bool = False
    new: bool = False


class IlmWriter:
    """One text while an ILM writes it.

    line: its tokens without <stop>, in reading order   needs, rooms: fewest and most tokens still to come in each blank
    """

    def __init__(self, model: Any, request: Request) -> None:
        given, self.request, self.model = request.given, request, model
        blank = {gap: number for number, gap in enumerate(given.blanks)}
        self.line = [
            _Token(token, rank + 1, blank.get(rank, -1), request.heads is not None and rank in given.spaces)
            for rank, token in enumerate([model.config.bos_token_id, *given.ids])
        ]
        self.needs, self.rooms = [*request.needs], [*request.rooms]
        self.words = model.writable
        decode = request.decode
        self.most = min(decode["max_steps"], decode.get("max_tokens") or _ENDLESS)

    def run(self) -> bool:
        """Insert until the model stops or a limit is reached. Returns whether the model stopped."""
        # One pass more than insertions: the last one asks whether the text is complete.
        for step in range(self.most + 1):
            tokens = [self.model.config.stop_token_id, *(token.id for token in self.line)]
            [hidden] = self.model.backbone(torch.tensor([tokens], device=self.model.device))
            done, closed = self._judge(hidden)
            owed = sum(self.needs)
            if done and not owed:
                return True
            left = min(self.request.longest - len(tokens) + 2, self.most - step)
            slots = [] if done else [place for place in self._slots(self.rooms) if place not in closed]
            if owed and (not slots or left <= owed):  # minimum lengths first, in spite of what the model says
                wanting = self._slots(self.needs)
                slots = [place for place in wanting if place not in closed] or wanting
            if left <= 0 or not slots or not self._insert(slots, hidden[1:], step):
                break
        return False

    def fills(self) -> list[list[int]]:
        """The ids of each fill."""
        found: list[list[int]] = [[] for _ in self.needs]
        for token in self.line:
            if token.new:
                found[token.blank].append(token.id)
        return found

    def _slots(self, wanted: Sequence[int]) -> list[int]:
        """The places of the slots in blanks that get more tokens."""
        places = [place for place, token in enumerate(self.line) if token.blank >= 0 and wanted[token.blank]]
        # The package numbers slots in order of insertion, and ties must fall the same way.
        return sorted(places, key=lambda place: self.line[place].number)

    def _judge(self, hidden: Tensor) -> tuple[bool, set[int]]:
        """Whether the model says that nothing is missing, and the places where it says so."""
        threshold = self.request.decode["stop_threshold"]
        if not self.model.config.gates:
            stop = self.model.stop(hidden[:1]).float().softmax(-1)[0, 0]
            return bool(stop >= threshold), set()
        slots = [place for place, token in enumerate(self.line) if token.blank >= 0]
        sure = self.model.stop(hidden[1:][slots]).float().log_softmax(-1)[:, 0].exp()
        gate = torch.full_like(sure, threshold)
        if self.request.decode["temperature"] > 0:  # the draw belongs to the tokens on both sides of a slot
            numbers = [token.number for token in self.line] + [0]
            sides = [(numbers[place], numbers[place + 1]) for place in slots]
            gate = uniform(_GATE, self.request.seed, *torch.tensor(sides, device=sure.device).unbind(1))
        return self._shut(slots, sure >= gate)

    def _shut(self, slots: list[int], full: Tensor) -> tuple[bool, set[int]]:
        closed = {place for place, shut in zip(slots, full.tolist(), strict=True) if shut}
        return len(closed) == len(slots), closed

    def _insert(self, slots: list[int], hidden: Tensor, step: int) -> bool:
        """Insert a token after one of the slots. Returns False if no token may be written there."""
        logits = (hidden[slots] @ self.model.unembedding.weight[self.words].T).float()
        if self.request.heads is not None:
            edge = torch.tensor([self.line[place].edge for place in slots], device=logits.device)
            logits = logits.masked_fill(edge[:, None] & ~self.request.heads, -torch.inf)
        if not logits.isfinite().any():
            return False
        numbers = torch.tensor([self.line[place].number for place in slots], device=logits.device)
        slot, word = self._choose_pair(logits, hidden[slots], numbers, step)
        before = self.line[slots[slot]]
        new = _Token(int(self.words[word]), len(self.line) + 1, before.blank, False, True)
        self.line.insert(slots[slot] + 1, new)
        self.rooms[new.blank] -= 1
        self.needs[new.blank] = max(0, self.needs[new.blank] - 1)
        return True

    def _choose_pair(self, logits: Tensor, hidden: Tensor, slots: Tensor, step: int) -> tuple[int, int]:
        """logits: [S, W]   slots: [S], numbers of their tokens. Returns the indices of a slot and of a word in it."""
        decode, seed, way, width = self.request.decode, self.request.seed, self.request.way, logits.shape[1]
        columns = torch.arange(width, device=logits.device)
        # Noise depends on the number of a slot's token, not on its place, which changes with every insertion.
        if decode["joint"]:
            pairs = (slots[:, None] * width + columns).flatten()
            pair = choose(logits.flatten(), lambda: uniform(_TOKEN, seed, step, pairs), *way)
            return pair // width, pair % width
        score = _slot_scores(logits, decode["order"])
        slot = choose(score, lambda: uniform(_SLOT, seed, step, slots), 1.0, decode["position_top_k"], 1.0)
        return slot, choose(logits[slot], lambda: uniform(_TOKEN, seed, step, columns), *way)


class ItWriter(IlmWriter):
    """One text while an Insertion Transformer writes it."""

    def _judge(self, hidden: Tensor) -> tuple[bool, set[int]]:
        slots = [place for place, token in enumerate(self.line) if token.blank >= 0]
        rows = hidden[1:][slots]
        mass, end = self._ends((rows @ self.model.unembedding.weight[self.words].T).float(), rows)
        return self._shut(slots, (end - mass).exp() >= self.request.decode["stop_threshold"])

    def _ends(self, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The mass of each slot, of words and the end, and the logit of the end."""
        end = (hidden @ self.model.unembedding.weight[self.model.config.eos_token_id]).float()
        return torch.cat([logits, end[:, None]], 1).logsumexp(1), end

    def _choose_pair(self, logits: Tensor, hidden: Tensor, slots: Tensor, step: int) -> tuple[int, int]:
        mass, end = self._ends(logits, hidden)
        order = self.request.decode["order"]
        if order == "mass":
            score = mass - end
        elif order == "margin":  # the lead over the second best, which may be the end
            score = _lead(logits, mass, end)
        else:
            score = logits.amax(1) - mass
        slot = int(score.masked_fill(logits.amax(1) == -torch.inf, -torch.inf).argmax())
        seed = _hash(_CELL, self.request.seed, slots[slot])
        columns = torch.arange(logits.shape[1], device=logits.device)
        return slot, choose(logits[slot], lambda: uniform(_WORD, seed, step, columns), *self.request.way)


def _slot_scores(logits: Tensor, order: str) -> Tensor:
    """The slot with the highest score gets the next token. [S, W] to [S]"""
    mass = logits.logsumexp(-1)
    if order in ("auto", "mass"):
        return mass
    score = logits.amax(-1) - mass if order == "certainty" else _lead(logits, mass)
    return score.masked_fill(mass < mass.max() + torch.tensor(_PLAUSIBLE).log(), -torch.inf)


def _lead(logits: Tensor, mass: Tensor, rival: Tensor | None = None) -> Tensor:
    """How much more probable the likeliest is than the second. rival: [S], of what may be the second, too"""
    best, *others = logits.topk(min(2, logits.shape[1])).values.unbind(-1)
    second = others[0] if others else torch.full_like(best, -torch.inf)
    second = second if rival is None else torch.maximum(second, rival)
    return (best - mass).exp() - (second - mass).exp()


# --- Left to right ----------------------------------------------------------------------------------------------------


class ArmWriter:
    """One text while an ARM writes its end."""

    def __init__(self, model: Any, request: Request) -> None:
        if request.given.blanks != [len(request.given.ids)]:
            raise ValueError("this model writes at the end of a text alone; expected one ___, at the end")
        if any(request.needs) or any(room < _ENDLESS for room in request.rooms):
            raise ValueError("this model cannot keep to min_length or max_length; expected none, or max_tokens")
        self.model, self.request, self.written = model, request, list[int]()

    def run(self) -> bool:
        model, decode = self.model, self.request.decode
        rows = [model.config.bos_token_id, *self.request.given.ids]
        words = torch.cat([model.writable, model.writable.new_tensor([model.config.eos_token_id])])
        vectors, columns = model.unembedding.weight[words], torch.arange(len(words), device=words.device)
        most = min(self.request.longest - len(rows) + 1, decode.get("max_tokens") or _ENDLESS, decode["max_steps"])
        cache: list[Any] = []
        hidden = model.backbone(torch.tensor([rows], device=model.device), cache=cache, causal=True)
        for step in range(most + 1):
            logits = (hidden[0, -1] @ vectors.T).float()
            word = choose(logits, partial(uniform, _NEXT, self.request.seed, step, columns), *self.request.way)
            if word == len(words) - 1:
                return True
            if step == most:
                break
            self.written.append(int(words[word]))
            place = torch.tensor([len(rows) + step], device=model.device)
            hidden = model.backbone(words[word][None, None], positions=place, cache=cache)
        return False

    def fills(self) -> list[list[int]]:
        return [self.written]
