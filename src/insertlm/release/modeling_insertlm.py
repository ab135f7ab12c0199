"""insertlm's models for transformers. This and the files it imports from beside it need only torch and transformers.

    from transformers import AutoModel, AutoTokenizer
    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    print(model.infill("Lily found ___. She ___ all day.", tokenizer).text)

`insertlm export` puts these files beside the weights. For the same seed they write what the package writes, token for
token; tests compare the two. They are the plain version: one draft of one text at a time, no banned or required words.
The package (insertlm) has these, and training. This file holds the network; how texts are written is in
writing_insertlm.py, and for fillers in filling_insertlm.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput, cached_file

from .filling_insertlm import FillWriter
from .writing_insertlm import ArmWriter, Given, IlmWriter, Infilled, ItWriter, Lengths, Request, checked, parse_blanks

__all__ = ["Infilled", "InsertlmConfig", "InsertlmModel", "InsertlmOutput"]

_SUMS = "SHA256SUMS"
_ENDLESS = 1 << 40
_WRITERS: dict[str, Any] = {"ilm": IlmWriter, "it": ItWriter, "arm": ArmWriter, "fill": FillWriter, "both": FillWriter}
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

    family: ilm, it, arm, fill or both (which writes as fill)   gates: whether every slot of an ILM says if something
    is missing there
    framing: special tokens of a row   shape: what differs from the paper's transformer, see _SHAPE
    fill: of a filler, the most blanks (most), how far positions jump behind a blank (jump), the id of a blank (mask_id)
    and, if it takes them, the numbers of words that hints stand for (hints) and the id of the first of them (hint_ids)
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
        family: str = "ilm",
        gates: bool = False,
        framing: int = 2,
        fill: dict[str, Any] | None = None,
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
        self.family, self.gates, self.framing, self.fill = family, gates, framing, fill
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
    """logits: [B, N, V], of a token right after each of the row   stop_logits: of an ILM, complete and not: [B, 2], or
    with gates [B, N, 2]"""

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

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, ...], causal: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x: [B, N, width]   mask: [B, 1, 1 or N, N] bool, False for keys that are not seen
        past: keys and values of earlier rows, which all see. Returns these with the new ones too"""
        heads = [self.heads, self.key_heads, self.key_heads]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
        q, k, v = torch.split(qkv, heads, 1)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True)) if past else (k, v)
        shared = self.heads != self.key_heads
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(self._activate(self.up(self.hidden_norm(x))))
        return changed, (k, v)

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, -1)
            return F.silu(gate) * value
        return F.gelu(hidden) if self.activation == "gelu" else hidden.relu()


def _norm(config: InsertlmConfig) -> nn.Module:
    kind = nn.RMSNorm if config.shape["norm"] == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.shape["norm_epsilon"])


def _rotations(positions: Tensor, config: InsertlmConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of these positions, each [N, rotary/2]. They are not a buffer, because `from_pretrained` leaves
    buffers uninitialised that are in no file."""
    dims = min(config.shape["rotary_dims"], config.head_dim)
    frequency = config.shape["rotary_base"] ** (
        -torch.arange(0, dims, 2, dtype=torch.float64, device=like.device) / dims
    )
    angle = positions[:, None] * frequency
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

    def forward(
        self,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: list[Any] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """[B, N] to hidden rows [B, N, width]. positions: [N] (None: 0, 1, …)   cache: of each layer, keys and values
        of rows that came before, to which those of these rows are added; empty at first"""
        x: Tensor = self.embedding(input_ids)
        places = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        rotation, kept = _rotations(places, self.config, x), list[tuple[Tensor, Tensor]]()
        for block, past in zip(self.blocks, cache or [()] * len(self.blocks), strict=True):
            x, both = block(x, rotation, mask, past, causal)
            kept.append(both)
        if cache is not None:
            cache[:] = kept
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
        if config.family in ("ilm", "both"):
            self.stop = _StopHead(config.hidden_size)
        self._heads: tuple[Any, Tensor] | None = None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> InsertlmOutput:
        """input_ids: [B, N], rows padded on the right: of an ILM or IT `<stop> <bos> text`, of an ARM `<bos> text`
        attention_mask: [B, N], 0 on padding, or [B, N, N], 0 where a row does not see another
        position_ids: [N] (None: 0, 1, …); those of a filler jump, see filling_insertlm.py
        """
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None:
            mask = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        if self.config.family == "arm":  # a row sees those before it
            causal = torch.ones(input_ids.shape[1:] * 2, dtype=torch.bool, device=input_ids.device).tril()
            mask = causal if mask is None else mask & causal
        hidden = self.backbone(input_ids, mask, positions=position_ids)
        stop = None
        if self.config.family in ("ilm", "both"):
            stop = self.stop(hidden if self.config.gates else hidden[:, 0])
        return InsertlmOutput(logits=self.unembedding(hidden), stop_logits=stop)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but weights that are no numbers, or not those of the export, are refused."""
        hub = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
        _check_sums(name, {key: kwargs[key] for key in hub if kwargs.get(key) is not None})
        found = super().from_pretrained(name, *args, **kwargs)
        for key, value in (found[0] if isinstance(found, tuple) else found).state_dict().items():
            if not all(edge.isfinite() for edge in value.aminmax()):
                raise ValueError(f"{name}: the weights are no numbers: {key} has NaN or infinite entries")
        return found

    @torch.inference_mode()
    def infill(
        self,
        text: str,
        tokenizer: Any,
        *,
        seed: int = 0,
        min_length: Lengths = None,
        max_length: Lengths = None,
        words: Lengths = None,
        **settings: Any,
    ) -> Infilled:
        """Fill in the blanks of a text. Three or more underscores are a blank, and `\\___` are plain underscores. The
        text `"___"` writes from nothing.

        min_length, max_length: tokens of every blank, or a list with one number for each (None: at least 1, no maximum)
        words: about how many words belong into every blank, or a list, for fillers that have learnt such hints

        `settings` override config.decode, which holds those that the model knows:
        stop_threshold   stop when the probability that nothing is missing reaches this
        order            how slots are ranked: mass (auto), certainty or margin
        joint            choose slot and token as a pair
        position_top_k   slots to choose among, 1 = the best one, 0 = all
        parallel         of a filler: 1 = blank by blank, 0 = a token in every blank at a time
        temperature, top_k, top_p   of tokens, or of pairs if joint; temperature 0 takes the likeliest
        max_tokens, max_steps   most tokens and steps; a step writes a token. Enough steps for max_tokens if not given
        max_length is that of a blank; that of the whole row is the recipe's
        """
        known = self.config.decode
        decode = checked({**known, **settings}, known)
        if "max_tokens" in settings and "max_steps" not in settings:
            decode["max_steps"] = max(decode["max_steps"], decode["max_tokens"] or 0)
        if words is not None and not (self.config.fill and self.config.fill["hint_ids"]):
            raise ValueError("words: this model has not learnt what length hints mean; leave them out")
        family, framing = self.config.family, self.config.framing
        pieces = parse_blanks(text)
        given = Given.of(pieces, tokenizer, family == "fill")
        longest = min(self.config.max_position_embeddings, decode.get("max_length") or _ENDLESS) - framing
        heads = self._first_words(tokenizer) if given.spaces and family != "arm" else None
        lengths = min_length, max_length, words
        request = Request.of(given, lengths, 0 if family == "arm" else 1, heads, decode, longest, seed)
        if (needed := len(given.ids) + sum(request.needs)) > longest:
            raise ValueError(
                f"the text and its blanks need {needed + framing} tokens; the model takes {longest + framing}"
            )
        if (needed := sum(request.needs)) > (decode.get("max_tokens") or _ENDLESS):
            raise ValueError(
                f"max_tokens: expected at least {needed}, which the blanks need, got {decode['max_tokens']}"
            )
        writer = _WRITERS[family](self, request)
        complete = writer.run()
        # The result is joined from the user's own pieces: decoding their ids could change spaces.
        written = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in writer.fills())
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


def _check_sums(name: Any, hub: dict[str, Any]) -> None:
    """Refuse files that are not those of the export. name: of a folder or a repository"""
    sums = cached_file(name, _SUMS, _raise_exceptions_for_missing_entries=False, **hub)
    if sums is None:  # an older export
        return
    for line in Path(sums).read_text().splitlines():
        expected, file = line.split(maxsplit=1)
        if file in ("config.json", "model.safetensors"):
            with Path(cached_file(name, file, **hub)).open("rb") as data:
                found = hashlib.file_digest(data, "sha256").hexdigest()
            if found != expected:
                raise ValueError(f"{name}: {file} is altered: its SHA-256 is {found}, expected {expected} by {_SUMS}")
