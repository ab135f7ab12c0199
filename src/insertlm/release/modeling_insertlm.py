"""An insertion language model for transformers, complete in one file that needs only torch and transformers.

    from transformers import AutoModel, AutoTokenizer
    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    print(model.infill("Lily found ___. She ___ all day.", tokenizer).text)

`insertlm export` puts this file beside the weights. For the same seed it writes what the package writes, token for
token; tests compare the two. It is the plain version: one text at a time, no cache, no banned or required words. The
package (insertlm) has these, and training.

Design choices:
- A row is `<stop> <bos> text`. Slot k means "right after the k-th token"; one softmax over slots × vocabulary.
- The stop classifier reads the hidden row of <stop> before every insertion; class 0 means complete.
- A step chooses a slot and then a token in it, or both as a pair (`joint`). Special tokens are never chosen.
- Random numbers are a hash of their purpose, the seed, the step and the entry, so a text depends on its seed alone.
- The given text comes back unchanged, because the result is joined from the given pieces and the fills. The model does
  not see a single space before a blank; it writes the space as the start of the fill's first token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

__all__ = ["Infilled", "InsertlmConfig", "InsertlmModel", "InsertlmOutput"]

_SLOT, _TOKEN = 0, 1  # streams of noise, by purpose
_PLAUSIBLE = 0.5  # an order that looks at tokens skips slots with less than this share of the largest mass
_COLD = 1e-30  # lower temperatures count as 0, because logits would overflow
_ENDLESS = 1 << 40  # the most tokens of a blank without a maximum
_ORDERS = ("auto", "mass", "certainty", "margin")
# The paper's transformer; config.json names what is different. The keys are those of `model` in a recipe.
_SHAPE: dict[str, Any] = {
    "norm": "layer",
    "norm_epsilon": 1e-5,
    "final_norm": False,
    "feed_forward": "relu",
    "feed_forward_bias": True,
    "attention_bias": False,
    "kv_heads": 0,
    "head_size": 0,
    "rotary_dims": 64,
    "rotary_base": 10_000.0,
}


class InsertlmConfig(PretrainedConfig):  # type: ignore[misc]
    """The contents of config.json.

    shape: what differs from the paper's transformer, see _SHAPE
    reserved: ids that are never written, such as special tokens   decode: decoding settings, see `infill`
    """

    model_type = "insertlm"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 8,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        intermediate_size: int = 8,
        max_position_embeddings: int = 2048,
        shape: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        stop_token_id: int = 0,
        reserved: Sequence[int] = (),
        decode: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.shape = {**_SHAPE, **(shape or {})}
        self.stop_token_id = stop_token_id
        self.reserved = list(reserved)
        self.decode = dict(decode or {})
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @property
    def head_dim(self) -> int:
        return int(self.shape["head_size"]) or self.hidden_size // self.num_attention_heads


# --- Model ------------------------------------------------------------------------------------------------------------


@dataclass
class InsertlmOutput(ModelOutput):  # type: ignore[misc]
    """logits: [B, N, V], of inserting a token right after each of the row   stop_logits: [B, 2], complete and not"""

    logits: Tensor | None = None
    stop_logits: Tensor | None = None


class _Block(nn.Module):
    def __init__(self, config: InsertlmConfig) -> None:
        super().__init__()
        width, hidden, size, shape = config.hidden_size, config.intermediate_size, config.head_dim, config.shape
        self.activation, self.heads = shape["feed_forward"], config.num_attention_heads
        self.key_heads = shape["kv_heads"] or self.heads
        rows, bias = (self.heads + 2 * self.key_heads) * size, shape["attention_bias"]
        self.attention_norm = _norm(config)
        self.qkv = nn.Linear(width, rows, bias=bias)
        self.out = nn.Linear(self.heads * size, width, bias=bias)
        self.hidden_norm = _norm(config)
        self.up = nn.Linear(width, (1 + (self.activation == "swiglu")) * hidden, bias=shape["feed_forward_bias"])
        self.down = nn.Linear(hidden, width, bias=shape["feed_forward_bias"])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x: [B, N, width]   mask: [B, 1, 1, N] bool, False for keys that are not seen"""
        heads = [self.heads, self.key_heads, self.key_heads]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
        q, k, v = torch.split(qkv, heads, 1)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        shared = self.heads != self.key_heads
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(self._activate(self.up(self.hidden_norm(x))))
        return changed

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, -1)
            return F.silu(gate) * value
        return F.gelu(hidden) if self.activation == "gelu" else hidden.relu()


def _norm(config: InsertlmConfig) -> nn.Module:
    kind = nn.RMSNorm if config.shape["norm"] == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.shape["norm_epsilon"])


def _rotations(count: int, config: InsertlmConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 … count-1, each [count, rotary/2]. They are not a buffer, because
    `from_pretrained` leaves buffers uninitialised that are in no file."""
    dims = min(config.shape["rotary_dims"], config.head_dim)
    frequency = config.shape["rotary_base"] ** (
        -torch.arange(0, dims, 2, dtype=torch.float64, device=like.device) / dims
    )
    angle = torch.arange(count, device=like.device)[:, None] * frequency
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, heads, N, head_dim], of which pairs (i, i + rotary/2) are rotated and the rest is unchanged"""
    half = cos.shape[1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class _Backbone(nn.Module):
    def __init__(self, config: InsertlmConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([_Block(config) for _ in range(config.num_hidden_layers)])
        self.norm = _norm(config) if config.shape["final_norm"] else nn.Identity()

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, N] to hidden rows [B, N, width]"""
        x: Tensor = self.embedding(input_ids)
        rotation = _rotations(x.shape[1], self.config, x)
        for block in self.blocks:
            x = block(x, rotation, mask)
        normed: Tensor = self.norm(x)
        return normed


class _StopHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, 2, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, width] to [B, 2]"""
        logits: Tensor = self.out(hidden + self.down(torch.tanh(self.up(self.norm(hidden)))))
        return logits


class InsertlmModel(PreTrainedModel):  # type: ignore[misc]
    config_class = InsertlmConfig
    base_model_prefix = "insertlm"
    _no_split_modules = ("_Block",)
    _supports_sdpa = True
    _tied_weights_keys: ClassVar = {"unembedding.weight": "backbone.embedding.weight"}

    def __init__(self, config: InsertlmConfig) -> None:
        super().__init__(config)
        self.backbone = _Backbone(config)
        self.unembedding = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.stop = _StopHead(config.hidden_size)
        self._heads: tuple[Any, Tensor] | None = None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> InsertlmOutput:
        """input_ids: [B, N], rows of <stop> <bos> text, padded on the right   attention_mask: [B, N], 0 on padding"""
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        hidden = self.backbone(input_ids, mask)
        return InsertlmOutput(logits=self.unembedding(hidden), stop_logits=self.stop(hidden[:, 0]))

    @torch.inference_mode()
    def infill(
        self,
        text: str,
        tokenizer: Any,
        *,
        seed: int = 0,
        min_length: int | Sequence[int | None] | None = None,
        max_length: int | Sequence[int | None] | None = None,
        **settings: Any,
    ) -> Infilled:
        """Fill in the blanks of a text. Three or more underscores are a blank, and `\\___` are plain underscores. The
        text `"___"` writes from nothing.

        min_length, max_length: tokens of every blank, or a list with one number for each (None: at least 1, no maximum)

        `settings` override config.decode:
        stop_threshold   stop when the stop classifier's probability reaches this
        order            how slots are ranked: mass (auto), certainty or margin
        joint            choose slot and token as a pair
        position_top_k   slots to choose among, 1 = the best one, 0 = all
        temperature, top_k, top_p   of tokens, or of pairs if joint; temperature 0 takes the likeliest
        max_tokens, max_steps   most insertions, whichever is less; max_tokens alone replaces the config's max_steps
        """
        decode = _checked({**self.config.decode, **settings}, self.config.decode)
        most = decode.get("max_tokens")  # one step writes one token, so both limit the same thing
        if most is not None:
            decode["max_steps"] = most if "max_steps" not in settings else min(most, decode["max_steps"])
        if not 0 <= seed < 1 << 62:
            raise ValueError(f"expected 0 <= seed < 2^62, got {seed}")
        pieces = _parse_blanks(text)
        given = _Given.of(pieces, tokenizer)
        needs, rooms = _limits(min_length, max_length, len(given.blanks))
        length, longest = len(given.ids) + 2, self.config.max_position_embeddings
        longest = min(longest, decode.get("max_length") or longest)
        if length + sum(needs) > longest:
            raise ValueError(f"the text and its blanks need {length + sum(needs)} tokens; the model takes {longest}")
        heads = self._first_words(tokenizer) if given.spaces else None
        writing = _Writing(self, given, needs, rooms, heads, decode, seed, longest)
        complete = writing.run()
        # The result is joined from the user's own pieces: decoding their ids could change spaces.
        written = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in writing.fills())
        hidden = (" " if gap in given.spaces else "" for gap in given.blanks)
        fills = [fill.removeprefix(space) for fill, space in zip(written, hidden, strict=True)]
        whole = pieces[0] + "".join(fill + piece for fill, piece in zip(fills, pieces[1:], strict=True))
        return Infilled(whole, fills, complete)

    @property
    def writable(self) -> Tensor:
        """The ids that may be written, [W]."""
        reserved = set(self.config.reserved)
        return torch.tensor([i for i in range(self.config.vocab_size) if i not in reserved], device=self.device)

    def _first_words(self, tokenizer: Any) -> Tensor:
        """Which of `writable` may begin a word: a space and more; if there is none, spaces; else all. [W] bool"""
        if self._heads is None or self._heads[0] is not tokenizer:
            texts = [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in self.writable.tolist()]
            spaced = torch.tensor([text.startswith(" ") for text in texts], device=self.device)
            words = spaced & torch.tensor([bool(text.strip()) for text in texts], device=self.device)
            heads = words if words.any() else spaced if spaced.any() else torch.ones_like(spaced)
            self._heads = tokenizer, heads
        return self._heads[1].to(self.device)


# --- Blanks -----------------------------------------------------------------------------------------------------------


class Infilled(NamedTuple):
    """text: with its blanks filled   fills: the text of each blank   complete: False if a limit on length or steps
    ended it"""

    text: str
    fills: list[str]
    complete: bool


class _Given(NamedTuple):
    """ids: the given text as the model sees it   blanks: for each blank the number of ids before it   spaces: those
    numbers of the blanks before which a space is hidden"""

    ids: list[int]
    blanks: list[int]
    spaces: frozenset[int]

    @classmethod
    def of(cls, pieces: Sequence[str], tokenizer: Any) -> _Given:
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
                spaces += [len(ids)] if hidden else []
        return cls(ids, blanks, frozenset(spaces))


def _parse_blanks(text: str) -> list[str]:
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


def _limits(
    least: int | Sequence[int | None] | None, most: int | Sequence[int | None] | None, count: int
) -> tuple[list[int], list[int]]:
    """The fewest and the most tokens of each blank."""
    rooms = [_ENDLESS if high is None else high for high in _each(most, count)]
    needs = [min(1, room) if low is None else low for low, room in zip(_each(least, count), rooms, strict=True)]
    if any(not 0 <= need <= room for need, room in zip(needs, rooms, strict=True)):
        raise ValueError(f"expected 0 <= min_length <= max_length, got {least} and {most}")
    return needs, rooms


def _each(lengths: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    if lengths is None or isinstance(lengths, int):
        return [lengths] * count
    if len(lengths) != count:
        raise ValueError(f"expected a length, or one for each of the {count} blanks, got {len(lengths)}")
    return list(lengths)


def _checked(decode: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    if unknown := decode.keys() - known.keys():
        raise ValueError(f"unknown setting {min(unknown)}; expected one of {', '.join(known)}")
    if decode["order"] not in _ORDERS:
        raise ValueError(f"order: expected one of {', '.join(_ORDERS)}, got {decode['order']!r}")
    if decode["order"] in ("certainty", "margin") and (decode["joint"] or decode["position_top_k"] != 1):
        raise ValueError(f"order {decode['order']}: expected joint=False and position_top_k=1")
    if not (decode["temperature"] >= 0 and 0 < decode["top_p"] <= 1 and 0 <= decode["stop_threshold"] <= 1):
        raise ValueError("expected temperature >= 0, 0 < top_p <= 1 and 0 <= stop_threshold <= 1")
    if min(decode["top_k"], decode["position_top_k"], decode["max_steps"] - 1) < 0:
        raise ValueError("expected top_k >= 0, position_top_k >= 0 and max_steps >= 1")
    return decode if decode["temperature"] >= _COLD else {**decode, "temperature": 0.0}


# --- Writing ----------------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    """number: the order in which it came, which noise depends on   blank: the blank right after it, or -1
    edge: whether the next token after it must begin a word   new: whether the model wrote it"""

    id: int
    number: int
    blank: int = -1
    edge: bool = False
    new: bool = False


class _Writing:
    """One text while it is written.

    line: its tokens without <stop>, in reading order   needs, rooms: fewest and most tokens still to come in each blank
    heads: [W] bool, which tokens may begin a word; None if no blank needs it
    """

    def __init__(
        self,
        model: InsertlmModel,
        given: _Given,
        needs: list[int],
        rooms: list[int],
        heads: Tensor | None,
        decode: dict[str, Any],
        seed: int,
        longest: int,
    ) -> None:
        blank = {gap: number for number, gap in enumerate(given.blanks)}
        row = [model.config.bos_token_id, *given.ids]
        self.line = [
            _Token(token, rank + 1, blank.get(rank, -1), heads is not None and rank in given.spaces)
            for rank, token in enumerate(row)
        ]
        self.model, self.needs, self.rooms, self.heads = model, [*needs], [*rooms], heads
        self.decode, self.longest, self.words = decode, longest, model.writable
        self.seed = seed + (seed >> 32) * 0x9E3779B9  # the hash sees 32 bits

    def run(self) -> bool:
        """Insert until the model stops or a limit is reached. Returns whether the model stopped."""
        # One pass more than insertions: the last one asks whether the text is complete.
        for step in range(self.decode["max_steps"] + 1):
            tokens = [self.model.config.stop_token_id, *(token.id for token in self.line)]
            [hidden] = self.model.backbone(torch.tensor([tokens], device=self.model.device))
            stop = self.model.stop(hidden[:1]).float().softmax(-1)[0, 0]
            done, owed = bool(stop >= self.decode["stop_threshold"]), sum(self.needs)
            if done and not owed:
                return True
            left = min(self.longest - len(tokens), self.decode["max_steps"] - step)
            wanted = self.needs if owed and (done or left <= owed) else self.rooms
            slots = [place for place, token in enumerate(self.line) if token.blank >= 0 and wanted[token.blank]]
            # The package numbers slots in order of insertion, and ties must fall the same way.
            slots.sort(key=lambda place: self.line[place].number)
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

    def _insert(self, slots: list[int], hidden: Tensor, step: int) -> bool:
        """Insert a token after one of the slots. Returns False if no token may be written there."""
        logits = (hidden[slots] @ self.model.unembedding.weight[self.words].T).float()
        if self.heads is not None:
            edge = torch.tensor([self.line[place].edge for place in slots], device=logits.device)
            logits = logits.masked_fill(edge[:, None] & ~self.heads, -torch.inf)
        if not logits.isfinite().any():
            return False
        numbers = torch.tensor([self.line[place].number for place in slots], device=logits.device)
        slot, word = self._choose_pair(logits, numbers, step)
        before = self.line[slots[slot]]
        new = _Token(int(self.words[word]), len(self.line) + 1, before.blank, False, True)
        self.line.insert(slots[slot] + 1, new)
        self.rooms[new.blank] -= 1
        self.needs[new.blank] = max(0, self.needs[new.blank] - 1)
        return True

    def _choose_pair(self, logits: Tensor, slots: Tensor, step: int) -> tuple[int, int]:
        """logits: [S, W]   slots: [S], numbers of their tokens. Returns the indices of a slot and of a word in it."""
        decode, width = self.decode, logits.shape[1]
        greedy = decode["temperature"] == 0.0 or decode["top_k"] == 1
        columns = torch.arange(width, device=logits.device)
        # Noise depends on the number of a slot's token, not on its place, which changes with every insertion.
        among = decode["temperature"], decode["top_k"], decode["top_p"]
        if decode["joint"]:
            pairs = (slots[:, None] * width + columns).flatten()
            pair = _choose(logits.flatten(), _uniform(_TOKEN, self.seed, step, pairs), *among)
            return pair // width, pair % width
        score = _slot_scores(logits, decode["order"])
        slot = _choose(score, _uniform(_SLOT, self.seed, step, slots), 1.0, decode["position_top_k"], 1.0)
        noise = columns if greedy else _uniform(_TOKEN, self.seed, step, columns)
        return slot, _choose(logits[slot], noise, *among)


def _slot_scores(logits: Tensor, order: str) -> Tensor:
    """The slot with the highest score gets the next token. [S, W] to [S]"""
    mass = logits.logsumexp(-1)
    if order in ("auto", "mass"):
        return mass
    best, *others = logits.topk(min(2, logits.shape[1])).values.unbind(-1)
    if order == "certainty":
        score = best - mass
    else:
        second = others[0] if others else torch.full_like(best, -torch.inf)
        score = (best - mass).exp() - (second - mass).exp()
    return score.masked_fill(mass < mass.max() + torch.tensor(_PLAUSIBLE).log(), -torch.inf)


def _choose(logits: Tensor, noise: Tensor, temperature: float, top_k: int, top_p: float) -> int:
    """An index, drawn by the Gumbel-max trick. logits, noise: [N], the latter uniform on (0, 1)"""
    if temperature == 0.0 or top_k == 1:
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
    return int((logits - (-noise.log()).log()).argmax())


def _uniform(stream: int, *counters: Tensor | int) -> Tensor:
    """Floats in (0, 1): a hash of the stream and the counters with the 32-bit finaliser of MurmurHash3."""
    low = 0xFFFFFFFF

    def mix(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
        return x ^ (x >> 16)

    # Plain integer arithmetic on int64, so that every device and library version draws the same numbers.
    state: Tensor | int = stream
    for counter in counters:
        state = mix((state + 0x9E3779B9 + mix(torch.as_tensor(counter).long() & low)) & low)
    return ((torch.as_tensor(state) >> 9).float() + 0.5) * 2.0**-23
