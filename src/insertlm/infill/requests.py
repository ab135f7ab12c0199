"""Requests to fill in a text with blanks, and the same in ids: what the model sees, and its constraints."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from insertlm.core.checks import check_flag, listed, shown, whole_number
from insertlm.core.errors import InsertlmError
from insertlm.inference.constraints import contradicts, is_within
from insertlm.inference.score import Completion
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.infill.typed import check_choices, expected_words, make_rule, with_choices
from insertlm.text.blanks import check_characters, cut_out, missing_blank, parse_text
from insertlm.text.fields import Field
from insertlm.text.tokenizers import Tokenizer

if TYPE_CHECKING:  # it imports torch, and what is wrong with a request is said before that
    from insertlm.families.abilities import Abilities
    from insertlm.families.base import Family
    from insertlm.inference.rules import Rule

__all__ = ["EncodedRequest", "Given", "Lengths", "Request", "Run", "can_write", "whole_word"]

Run = tuple[int, ...]
Lengths = int | None | Sequence[int | None]
_MOST = 10**9  # of any length; more do not fit into the numbers of some writers
# What a word follows without a space: an opening bracket or quotation mark, a hyphen, a dash or a slash.
_OPENS = re.compile(r"""(?:[(\[{“‘„«¿¡/–—-]|(?<=[\s(\[–—-])["'])\Z""")


@dataclass(frozen=True)
class Request:
    """A text with blanks, and how they are to be filled.

    text: with `___` or `{name}` for blanks, see `parse_text`   blanks: ranges of its characters instead, see `cut_out`
    anywhere: whether tokens may be inserted outside blanks too
    min_length, max_length: tokens of every blank, or a list with one for each (None: at least one token, if the family
    supports constraints; no maximum)   banned, required: words, as they are written
    words: about how many words belong into every blank, or a list with one for each (None: the model decides). A hint
    and no bound, for models that have learnt what it means. With a hint of 0 a blank may stay empty
    choices: by name, what may be written into a blank; one of them is
    What the text says of a blank counts before min_length, max_length and words.
    onward: whether the last blank, at the end of the text, is none: the text is written on, not filled up
    lengths_of: texts whose numbers of tokens are both minimum and maximum, for models that must know the lengths
    """

    text: str
    blanks: Sequence[tuple[int, int]] | None = None
    anywhere: bool = False
    min_length: Lengths = None
    max_length: Lengths = None
    banned: Sequence[str] = ()
    required: Sequence[str] = ()
    lengths_of: Sequence[str] | None = None
    words: Lengths = None
    onward: bool = False
    choices: Mapping[str, Sequence[str]] = dataclass_field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InsertlmError(f"text: expected one text, got {shown(self.text)}")
        check_flag("anywhere", self.anywhere)
        for name, words in (("banned", self.banned), ("required", self.required)):
            own = tuple(listed(name, words, "words"))  # a copy, because an iterator can be read once only
            object.__setattr__(self, name, own)
            for word in own:
                if not isinstance(word, str):
                    raise InsertlmError(f"{name}: expected words, got {shown(word)}")
                check_characters(word, f"{name}: a word")

        check_choices(self.choices)

    @cached_property
    def parsed(self) -> tuple[list[str], list[Field]]:
        """The given text around the blanks, and what it says of each. Only here are blanks parsed."""
        if self.blanks is not None:
            pieces = cut_out(self.text, self.blanks)
            fields = [Field()] * (len(pieces) - 1)
        else:
            pieces, fields = parse_text(self.text)
        return pieces, with_choices(fields, self.choices)

    @property
    def pieces(self) -> list[str]:
        """One more than there are blanks."""
        return self.parsed[0]

    @property
    def fields(self) -> list[Field]:
        """What is said of each blank."""
        return self.parsed[1]


@dataclass(frozen=True)
class Given:
    """The given text in ids.

    text: all pieces, joined   ids: what the model sees of them   places: where each open gap is in the text
    blanks: the gap of each blank   spaces: the gaps whose first token brings a space: one that stands before the blank
    and is hidden from the model, or one that is dropped, because what stands there opens the word, as a bracket does
    """

    text: str
    ids: list[int]
    places: Mapping[int, int]
    blanks: list[int]
    spaces: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[str], tokenizer: Tokenizer, able: Abilities, anywhere: bool = False) -> Given:
        # A filler has learnt to begin every blank with a whole word.
        by_words = able.left_to_right and able.supports_constraints
        ids, places, blanks, spaces, end = list[int](), dict[int, int](), list[int](), list[int](), 0
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            # Tokens of words begin with a space, so a text that ends with one is not what the model has learned from.
            hidden = not last and piece.endswith(" ") and (number == 0 or len(piece) > 1)
            seen = piece[:-1] if hidden else piece
            tokens = tokenizer.encode(seen)
            if anywhere:
                places |= {len(ids) + k: end + at for k, at in _boundaries(tokenizer, seen, tokens).items()}
            ids += tokens
            end += len(piece)
            if not last:
                if blanks and blanks[-1] == len(ids):  # both would be the same gap, and a token could belong to either
                    raise InsertlmError(
                        f"blanks {number} and {number + 1}: the model sees nothing between them; expected one blank "
                        "for both, or some text between them"
                    )
                blanks.append(len(ids))
                places[len(ids)] = end  # behind the space, and no longer a boundary of the piece
                opened = by_words and _OPENS.search(" " + piece if number == 0 else piece)
                spaces += [len(ids)] if hidden or opened else []
        return cls("".join(pieces), ids, places, blanks, frozenset(spaces))

    @property
    def opened(self) -> frozenset[int]:
        """The gaps before which no space stands, though their first token brings one."""
        return frozenset(gap for gap in self.spaces if not self.text[: self.places[gap]].endswith(" "))

    @property
    def cells(self) -> list[str]:
        """The text cut at its open gaps, without hidden spaces, because the first token of a fill brings its space."""
        hidden = self.spaces - self.opened
        ends = [(place - (gap in hidden), place) for gap, place in sorted(self.places.items())]
        starts = [0, *(place for _, place in ends)]
        return [self.text[start:end] for start, end in zip(starts, [*(end for end, _ in ends), None], strict=True)]

    def bounds_for(self, fills: Sequence[str], tokenizer: Tokenizer) -> dict[int, Bounds]:
        """Every blank gets exactly as many tokens as this fill has."""
        if len(fills) != len(self.blanks):
            raise InsertlmError(f"lengths_of: expected a text for each of {len(self.blanks)} blanks, got {len(fills)}")
        written = self.completed(fills, tokenizer).fills
        return {gap: Bounds(len(fill), len(fill)) for gap, fill in zip(self.blanks, written, strict=True)}

    def completed(self, fills: Sequence[str], tokenizer: Tokenizer) -> Completion:
        """The text with these fills, as they would be written. The first token of a fill brings its space, see `spaces`
        above; an empty fill has no token."""
        if len(fills) != len(self.blanks):
            raise InsertlmError(f"fills: expected a text for each of {len(self.blanks)} blanks, got {len(fills)}")
        prompt = Prompt([], start=self.ids, open=frozenset(self.blanks))
        blanks = zip(self.blanks, fills, strict=True)
        spaced = [f" {fill}" if gap in self.spaces and fill else fill for gap, fill in blanks]
        return Completion(prompt, [tokenizer.encode(fill) for fill in spaced])


@dataclass(frozen=True)
class EncodedRequest:
    """A request in ids, see Prompt."""

    given: Given
    bounds: Mapping[int, Bounds]
    banned: tuple[Run, ...]
    required: tuple[Run, ...]
    heads: frozenset[int]
    words: Mapping[int, int]
    onward: bool
    rules: Mapping[int, Rule]

    @classmethod
    def of(cls, family: Family, tokenizer: Tokenizer, request: Request, settings: DecodeConfig) -> EncodedRequest:
        pieces = request.pieces
        if len(pieces) == 1 and not request.anywhere:
            raise InsertlmError(missing_blank(request.text))
        given = Given.of(pieces, tokenizer, family.abilities)
        words = _words(request, given.blanks, family)
        if request.lengths_of is None:
            # An empty fill is rarely what a user wants, so a blank gets at least one token where that can be ensured.
            least = 1 if family.abilities.supports_constraints else 0
            bounds = _bounds(request, given.blanks, words, least)
        else:
            bounds = given.bounds_for(request.lengths_of, tokenizer)
        rules = _rules(family, tokenizer, request, given, bounds)
        _check_room(family, settings, given, bounds, rules)
        if request.anywhere:
            # Only now, because finding all boundaries takes long, which is useless for a text that does not fit.
            given = Given.of(pieces, tokenizer, family.abilities, anywhere=True)
        if family.abilities.appends and [*given.places] != [len(given.ids)]:
            raise InsertlmError("this model writes at the end of a text alone; expected one ___, at the end")
        mosts = [_takes(gap, bounds, rules) for gap in given.places]
        required = _required(family, tokenizer, request, mosts)
        banned = _banned(family, tokenizer, request, required)
        heads = _heads(tokenizer) if family.abilities.supports_constraints and given.spaces else frozenset()
        encoded = cls(given, bounds, banned, required, heads, words, request.onward, rules)
        if contradicts(encoded.prompt(0)):
            raise InsertlmError("banned: nothing is left to begin a blank behind a space; expected fewer words")
        return encoded

    def prompt(self, seed: int) -> Prompt:
        given = self.given
        # A choice remembers what was chosen, so each text has its own.
        rules = {gap: replace(rule) if is_dataclass(rule) else rule for gap, rule in self.rules.items()}
        begun = given.spaces - {gap for gap, rule in rules.items() if not rule.free}
        return Prompt(
            [],
            seed,
            given.ids,
            frozenset(given.places),
            self.bounds,
            self.banned,
            self.required,
            headed=begun if self.heads else frozenset(),
            heads=self.heads if begun else frozenset(),
            words=self.words,
            onward=self.onward,
            rules=rules,
        )


def _boundaries(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> dict[int, int]:
    """The places where a text can be cut between two tokens: number of tokens before it to number of characters."""
    if tokenizer.decode(ids) != text:
        raise InsertlmError("anywhere: the model's tokenizer does not give back what it reads; expected blanks alone")
    found = {}
    for k in range(len(ids) + 1):  # a character of several tokens cannot be cut: its halves decode to something else
        before = tokenizer.decode(ids[:k])
        if before + tokenizer.decode(ids[k:]) == text:
            found[k] = len(before)
    return found


def _words(request: Request, blanks: Sequence[int], family: Family) -> dict[int, int]:
    hints = zip(blanks, _each("words", request.words, len(blanks)), request.fields, strict=True)
    words = {gap: hint if field.about is None else field.about for gap, hint, field in hints}
    if any(hint is not None for hint in words.values()) and not family.abilities.takes_hints:
        instead = ", or bound tokens by min_length and max_length" if family.abilities.supports_constraints else ""
        raise InsertlmError(f"words: this model has not learnt what length hints mean; leave them out{instead}")
    if family.abilities.takes_hints:
        usual = zip(blanks, map(expected_words, request.fields), strict=True)
        words = {gap: words[gap] if words[gap] is not None else hint for gap, hint in usual}
    return {gap: hint for gap, hint in words.items() if hint is not None}


def _bounds(request: Request, blanks: Sequence[int], words: Mapping[int, int], least: int) -> dict[int, Bounds]:
    lows = _each("min_length", request.min_length, len(blanks))
    highs = _each("max_length", request.max_length, len(blanks))
    bounds = {}
    for gap, low, high, field in zip(blanks, lows, highs, request.fields, strict=True):
        if field.choices or field.pattern is not None:  # these say how long a blank is
            bound = Bounds(0, field.tokens[1] if field.tokens else None)
        else:
            low, high = field.tokens or (low, high)  # noqa: PLW2901  # what the text says counts
            empty = 0 in (high, words.get(gap)) or (field.words is not None and field.words[0] == 0)
            bound = Bounds((0 if empty else least) if low is None else low, high)
        if bound.most is not None and bound.most < bound.least:
            raise InsertlmError(f"expected 0 <= min_length <= max_length, got {bound.least} and {bound.most}")
        if bound != Bounds():
            bounds[gap] = bound
    return bounds


def _rules(
    family: Family, tokenizer: Tokenizer, request: Request, given: Given, bounds: Mapping[int, Bounds]
) -> dict[int, Rule]:
    made = {
        gap: make_rule(field, family, tokenizer, bounds.get(gap, Bounds()), gap in given.spaces, request.banned)
        for gap, field in zip(given.blanks, request.fields, strict=True)
    }
    return {gap: rule for gap, rule in made.items() if rule is not None}


def _takes(gap: int, bounds: Mapping[int, Bounds], rules: Mapping[int, Rule]) -> int | None:
    """How many tokens of required words a gap takes; None: any number."""
    most = bounds.get(gap, Bounds()).most
    room = _MOST if most is None else most
    room = min(room, rules[gap].takes([], room)) if gap in rules else room
    return None if room == _MOST else room


def _each(name: str, lengths: Lengths, count: int) -> list[int | None]:
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        return [lengths if lengths is None else whole_number(name, lengths, 0, _MOST)] * count
    if len(lengths) != count:
        raise InsertlmError(f"{name}: expected a number, or one for each of the {count} blanks, got {len(lengths)}")
    return [length if length is None else whole_number(name, length, 0, _MOST) for length in lengths]


def _check_room(
    family: Family, settings: DecodeConfig, given: Given, bounds: Mapping[int, Bounds], rules: Mapping[int, Rule]
) -> None:
    longest = min(settings.max_length or family.model.max_length, family.model.max_length) - family.framing
    kept = Prompt([], bounds=bounds, rules=rules)
    owed = sum(map(kept.owed, given.blanks))
    if len(given.ids) + owed > longest:
        raise InsertlmError(
            f"the text has {len(given.ids):,} tokens and its {len(given.blanks):,} blanks need {owed:,} or more; "
            f"the model takes {longest:,}"
        )
    # An MDM is told how many tokens there are, and may stop before the last.
    most = settings.max_tokens if family.abilities.decides_length else None
    if most is not None and owed > most:
        raise InsertlmError(f"max_tokens: expected at least {owed:,}, which the blanks need, got {most:,}")
    # Rules of blanks hold whatever limits there are, so they must leave enough. The end of a blank takes a step, too.
    if rules and owed > (steps := settings.max_steps - len(given.blanks)):
        raise InsertlmError(f"the blanks need {owed:,} tokens; max_steps leaves {steps:,}")


def _required(family: Family, tokenizer: Tokenizer, request: Request, mosts: Collection[int | None]) -> tuple[Run, ...]:
    """mosts: the maximum length of each blank"""
    # With a space before it, as inside a text; the tokenizer has other tokens for a word at the very beginning.
    largest = math.inf if None in mosts else max(most for most in mosts if most is not None)
    runs = {word: tuple(tokenizer.encode(f" {word}")) for word in request.required}
    for word, run in runs.items():
        # Some tokenizers lose characters, and then the model would write something else than the required word.
        if not word.strip() or not can_write(family, run) or word not in tokenizer.decode(run):
            raise InsertlmError(f"the model cannot write {word!r}; expected other required words")
        if len(run) > largest:
            raise InsertlmError(f"the required {word!r} has {len(run)} tokens; the largest blank takes {largest:,}")
        if banned := [other for other in request.banned if whole_word(other).search(word)]:
            raise InsertlmError(f"{word!r} is required and {banned[0]!r} is banned; expected one of the two")
    return tuple(runs.values())


def _banned(family: Family, tokenizer: Tokenizer, request: Request, required: Sequence[Run]) -> tuple[Run, ...]:
    """All spellings of banned words, except those inside a required word, such as “no” in “nobody”. Whether these were
    written as whole words is checked when the text is done, see InfillDraft.finish."""
    if not all(word.strip() for word in request.banned):
        raise InsertlmError("banned: expected words, got an empty one")
    # With and without a space before it, because the word may also follow a bracket or a quotation mark.
    runs = (tuple(tokenizer.encode(form)) for word in request.banned for form in (word, f" {word}"))
    free = (run for run in dict.fromkeys(runs) if run and not any(is_within(run, other) for other in required))
    return tuple(run for run in free if can_write(family, run))


@lru_cache(maxsize=8)
def _heads(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that begin with a space. Cached, because every token of the vocabulary must be decoded."""
    spaced = {token: text for token in tokenizer.writable if (text := tokenizer.decode([token])).startswith(" ")}
    return frozenset(token for token, text in spaced.items() if text.strip()) or frozenset(spaced)


def can_write(family: Family, run: Run) -> bool:
    return set(run) <= set(family.writable.tolist())


def whole_word(word: str) -> re.Pattern[str]:
    """Matches the word where no letter or digit is next to one of its own."""
    before, behind = (r"\b" if re.match(r"\w", edge) else "" for edge in (word[0], word[-1]))
    return re.compile(before + re.escape(word) + behind)
