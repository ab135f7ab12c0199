"""A causal language model that scores texts, from the Hugging Face hub, a folder or a GGUF file.

One rule holds for everything that is scored, so that numbers can be compared: **one BOS in front**. It is the token
that the user names (some chat models use the start of a chat message as BOS) or else the evaluator's BOS or, without
one, its end-of-text token. The tokenizer adds nothing else. BOS itself is neither scored nor counted: a text of n
tokens has n terms in its NLL, the first token's among them, and n tokens in its entropy and length.
"""

from __future__ import annotations

import io
import logging
import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import key_of

__all__ = ["Evaluator", "TextScore", "find_model", "load_pretrained", "model_identity"]

# Logits in memory at once. A GPU needs large batches (1 GiB in float32); a CPU is as fast with small ones.
_MOST_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 26}
_IN_CACHE = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_MISSING = "evaluating texts needs transformers: pip install 'insertlm[text]'"


@dataclass(frozen=True)
class TextScore:
    """One text. nll: mean over its scored tokens, in nats   entropy: of its unigram frequencies, in nats   tokens: of
    the whole text   scored: those that fit into the evaluator's context"""

    nll: float
    entropy: float
    tokens: int
    scored: int


class Evaluator:
    """Loads its model when it is first needed, so a finished journal needs no model.

    bf16: on a CPU, compute in bfloat16. How far that changes NLL depends on the model, see docs/evaluation.md. On a GPU
    products are in bfloat16 anyway, and the rest stays in float32.
    """

    def __init__(self, name: str, device: torch.device, bos: str | None = None, bf16: bool = False) -> None:
        self.name, self.device, self.bos = name, device, bos
        self.bf16 = bf16 and device.type == "cpu"
        self.place = find_model(name)

    @property
    def label(self) -> str:
        """A short name for files and tables."""
        return (self.place.resolve() if self.place else Path(self.name)).name.removesuffix(".gguf")

    @cached_property
    def identity(self) -> str:
        """A key for model, BOS and precision, under which the journal keeps scores."""
        return key_of(model_identity(self.name, self.place), self.bos, *(["bf16"] if self.bf16 else []))

    def score(self, texts: Sequence[str]) -> Iterator[tuple[int, TextScore | None]]:
        """The number of each text with its score, in any order. None: a text without tokens."""
        rows = self._tokenize(texts)
        # Texts without tokens come first: they need no model pass, and the journal has them if the rest fails.
        yield from ((number, None) for number, row in enumerate(rows) if not row)
        for batch in self._batches(rows):
            nll = self._nll([rows[number] for number in batch])
            for number, losses in zip(batch, nll, strict=True):
                mean = math.fsum(losses) / len(losses)  # exact, so that long texts lose no digits
                if not math.isfinite(mean):
                    raise InsertlmError(
                        f"{self.name}: gives a text probability 0 or NaN; expected an evaluator with sound weights"
                    )
                yield number, TextScore(mean, _entropy(rows[number]), len(rows[number]), len(losses))

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        # JSON can hold half of a surrogate pair, which tokenizers refuse.
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        _, tokenizer = self._loaded
        rows: list[list[int]] = tokenizer(clean, add_special_tokens=False)["input_ids"] if clean else []
        return [row if text.strip() else [] for row, text in zip(rows, clean, strict=True)]

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Numbers of texts of similar lengths, as many as their logits fit into `_MOST_LOGITS`."""
        model, _ = self._loaded
        most = max(1, _MOST_LOGITS[self.device.type] // model.get_output_embeddings().weight.shape[0])
        # Long texts first: if memory does not suffice, that shows at once.
        order = sorted((number for number, row in enumerate(rows) if row), key=lambda number: -len(rows[number]))
        while order:
            size = max(1, most // (1 + min(len(rows[order[0]]), self._room)))
            yield order[:size]
            del order[:size]

    @torch.inference_mode()
    def _nll(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The loss of every token that fits into the context."""
        model, _ = self._loaded
        rows = [row[: self._room] for row in rows]
        ids = torch.full((len(rows), 1 + max(map(len, rows))), self._first)
        for line, row in zip(ids, rows, strict=True):
            line[1 : 1 + len(row)] = torch.tensor(row)
        lengths = torch.tensor([1 + len(row) for row in rows])
        # Rows are padded on the right, where causal attention cannot see it; the mask is a precaution.
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        ids = ids.to(self.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = model(input_ids=ids, attention_mask=mask.to(self.device), use_cache=False).logits
        return [self._losses(logits[i, : len(row)], ids[i, 1 : 1 + len(row)]) for i, row in enumerate(rows)]

    def _losses(self, logits: Tensor, ids: Tensor) -> list[float]:
        """Of one text. A softmax over a whole batch would double the memory; on a CPU, few tokens at a time stay in its
        cache, which is more than twice as fast for large vocabularies."""
        at_once = len(ids) if logits.is_cuda else max(1, _IN_CACHE // logits.shape[1])
        parts = zip(torch.split(logits, at_once), torch.split(ids, at_once), strict=True)
        return torch.cat([F.cross_entropy(part.float(), true, reduction="none") for part, true in parts]).tolist()

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return load_pretrained(self.name, self.place, self.device, torch.bfloat16 if self.bf16 else torch.float32)

    @cached_property
    def _first(self) -> int:
        """The id of BOS."""
        _, tokenizer = self._loaded
        known = tokenizer.get_vocab()
        if self.bos is not None and self.bos not in known:
            raise InsertlmError(f"{self.name}: its vocabulary has no token {self.bos!r}; expected one for --bos")
        token = self.bos or tokenizer.bos_token or tokenizer.eos_token
        if token is None:
            raise InsertlmError(f"{self.name}: its tokenizer has no BOS and no EOS; expected --bos TOKEN")
        return int(known[token])

    @cached_property
    def _room(self) -> int:
        """The number of tokens that fit into the context after BOS."""
        model, _ = self._loaded
        return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20) - 1


def model_identity(name: str, place: Path | None) -> str:
    """A key for a model: of a local one its files, of one on the Hub its name."""
    if place is None:
        return key_of("hub", name)
    # By size and time of change, because hashing gigabytes on every call would take minutes.
    files = [place] if place.is_file() else sorted(place.iterdir())
    kept = [file for file in files if file.suffix in (*_WEIGHTS, ".json")]
    return key_of([(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in kept])


def load_pretrained(name: str, place: Path | None, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal model of transformers and its tokenizer. place: its folder or GGUF file (None: `name` is on the hub)."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_log
    except ImportError as error:
        raise InsertlmError(_MISSING) from error
    transformers_log.set_verbosity_error()  # its warnings are about other uses than scoring
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    folder = str(place or name)
    options: dict[str, Any] = {"local_files_only": place is not None or _hub_is_away()}
    if place is not None and place.is_file():
        folder, options["gguf_file"] = str(place.parent), place.name
    try:
        # transformers draws progress bars on standard error; only a download needs them.
        with redirect_stderr(io.StringIO()) if place else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, the Hub client and five file formats raise many kinds
        raise InsertlmError(_why(name, place, error)) from error
    return model.eval().requires_grad_(False).to(device), tokenizer


def _hub_is_away() -> bool:
    """Whether the Hub's address cannot be resolved. The Hub client would find out for itself, but it asks for every
    file six times before it looks into its cache."""
    from huggingface_hub import constants

    if getproxies():  # then the proxy resolves names
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _why(name: str, place: Path | None, error: Exception) -> str:
    what = " ".join(str(error).split()) or type(error).__name__
    what = what if len(what) <= 160 else f"{what[:159]}…"
    if place is None:
        todo = f"fetch it where the hub can be reached (hf download {name}; HF_TOKEN for gated ones), or give a folder"
    elif isinstance(error, ImportError) or "pip install" in what:
        todo = "expected the packages of pip install 'insertlm[text]'"
    else:
        todo = "expected a causal language model with its tokenizer, as transformers saves them, or as one GGUF file"
    return f"{name}: cannot be loaded: {todo}. The reason given: {what}"


def find_model(name: str) -> Path | None:
    """The folder or GGUF file of a local model; None for a name on the Hub. Called before texts are written, so that a
    mistake in the name costs no time."""
    if find_spec("transformers") is None:
        raise InsertlmError(_MISSING)
    path = Path(name or "nothing").expanduser()  # Path("") would be the current folder
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1 and not (path / "config.json").is_file():
            raise InsertlmError(f"{name}: several models; expected the name of one, such as {found[0]}")
        return found[0] if found and not (path / "config.json").is_file() else path
    local = path.is_absolute() or path.suffix == ".gguf" or name.startswith((".", "~")) or name.count("/") > 1
    if path.exists() or local or not name:
        raise InsertlmError(f"{name}: no model there; expected a folder, a .gguf file or a name on the hub")
    return None


def _entropy(ids: Sequence[int]) -> float:
    shares = [count / len(ids) for count in Counter(ids).values()]
    return max(0.0, -math.fsum(share * math.log(share) for share in shares))
