"""Subword tokenizers: our own byte-level BPE, and any that the Hugging Face `tokenizers` library reads.

Design choices:
- Our own BPE works on bytes, keeps case and adds no space, so decoding returns any Unicode string unchanged.
- Encoding a text never yields a special token: what looks like one is encoded as the characters it is made of.
- Special tokens that a vocabulary lacks are added behind it. bert-base-uncased has [CLS] (our stop), [UNK], [PAD] and
  [MASK]; bos and eos become 30,522 and 30,523. SmolLM2's has <|im_start|> and <|endoftext|>, and grows by four.
- A model never writes other special tokens of a vocabulary, such as [SEP], <|im_start|> and BERT's [unused…].
- Texts repeat their words. If a tokenizer never looks across a blank, each word is encoded once and looked up from then
  on: several times faster than the library, with the same ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, count, groupby
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from insertlm.core.assets import find_bundled
from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, write_atomically
from insertlm.text.tokenizers import Specials

__all__ = ["LEAST_SIZE", "SubwordTokenizer", "has_tokenizer", "load_tokenizer", "train_bpe"]

# Names of our special tokens, here and in other vocabularies. The first one that a vocabulary has counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "stop": ("<stop>", "[CLS]", "<cls>"),
    "bos": ("<bos>", "[BOS]", "<s>", "<|begin_of_text|>", "<|im_start|>"),
    "eos": ("<eos>", "[EOS]", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}
_RESERVED = re.compile(r"\[(?:unused\d+|SEP|CLS|PAD|MASK|UNK|BOS|EOS)\]")  # vocab.txt does not mark special tokens
LEAST_SIZE = 256 + len(Specials._fields)  # of a BPE vocabulary: all bytes and the special tokens


class SubwordTokenizer:
    """A tokenizer of the Hugging Face library behind the `Tokenizer` protocol.

    name: for messages   known: how many ids it had before special tokens were added
    """

    def __init__(self, inner: tokenizers.Tokenizer, name: str = "tokenizer") -> None:
        inner.encode_special_tokens = True  # as the characters they are made of, in spite of the name
        inner.no_truncation()
        inner.no_padding()
        self.name, self._inner = name, inner
        self.known = max(inner.get_vocab().values(), default=-1) + 1
        behind = count(self.known)
        found = (_find(inner, role) for role in Specials._fields)
        self.specials = Specials._make(next(behind) if i is None else i for i in found)
        self._words = _WordCache(self._encode_whole) if _splits_at_blanks(self.json) else None

    @cached_property
    def size(self) -> int:
        return max(self.known, *(i + 1 for i in self.specials))

    @cached_property
    def writable(self) -> list[int]:
        marked = {i for i, token in self._inner.get_added_tokens_decoder().items() if token.special}
        kept = (i for word, i in self._inner.get_vocab().items() if not _RESERVED.fullmatch(word))
        return sorted(set(kept) - marked - set(self.specials))

    @cached_property
    def _marks(self) -> dict[int, str]:
        return {i: f"<{role}>" for role, i in self.specials._asdict().items()}

    @property
    def names(self) -> list[Hashable]:
        roles = {i: ("special", role) for role, i in self.specials._asdict().items()}
        return [roles.get(i) or ("word", self._inner.id_to_token(i)) for i in range(self.size)]

    @cached_property
    def fingerprint(self) -> str:
        """Equal where the same text gives the same ids."""
        return hashlib.sha256(f"{self.specials}{self.json}".encode()).hexdigest()

    @property
    def json(self) -> str:
        """The content of a tokenizer.json, from which another process can rebuild this tokenizer."""
        return self._inner.to_str()

    @classmethod
    def from_json(cls, text: str, name: str = "tokenizer") -> SubwordTokenizer:
        return cls(tokenizers.Tokenizer.from_str(text), name)

    def save(self, path: Path) -> None:
        write_atomically(path, self.json.encode())

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Faster than encoding one by one."""
        # The library refuses lone surrogates, which Python strings may have; they become question marks.
        clean = [text if text.isascii() else text.encode("utf-8", "replace").decode() for text in texts]
        if self._words is None:
            return self._encode_whole(clean)
        known = self._words.__getitem__
        return [
            self._encode_whole([text])[0]
            if _ODD_BLANK.search(text)
            else list(chain.from_iterable(map(known, _WORD.findall(text))))
            for text in clean
        ]

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens show as `<bos>` etc., whatever the vocabulary calls them."""
        runs = groupby(ids, key=self._marks.get)
        return "".join(
            self._inner.decode(list(run), skip_special_tokens=False) if name is None else name * len(list(run))
            for name, run in runs
        )


def _find(inner: tokenizers.Tokenizer, role: str) -> int | None:
    ids = (inner.token_to_id(name) for name in _NAMES[role])
    return next((i for i in ids if i is not None), None)


# --- The word cache

_WORD = re.compile(r"[ \n]*[^ \n]+|[ \n]+")  # with the blanks before it
# Libraries do not agree on other kinds of blanks, so texts that have one are left to the library.
_ODD_BLANK = re.compile(r"[^\S \n]|[\u180e\u200b-\u200d\u2060\ufeff]")
_MOST_WORDS = 1 << 18


class _WordCache(dict[str, list[int]]):
    """The ids of words, encoded when first asked for. It is emptied when it has grown large, to bound memory."""

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        if len(self) >= _MOST_WORDS:
            self.clear()
        [ids] = self._encode([word])
        self[word] = ids
        return ids


def _splits_at_blanks(tokenizer_json: str) -> bool:
    """Whether the ids of a text are those of its words. So it is for BERT and for byte-level BPE that splits as GPT-2
    does, with or without single digits (SmolLM2): there a word ends where a blank begins, whatever stands around it."""
    parts = msgspec.json.decode(tokenizer_json)
    split, normalizer = parts["pre_tokenizer"] or {}, (parts["normalizer"] or {}).get("type")
    if parts["model"].get("dropout") or any(not token["special"] for token in parts["added_tokens"]):
        return False
    if split.get("type") == "Sequence":
        *others, split = split["pretokenizers"]
        if any(other["type"] != "Digits" for other in others):
            return False
    if split.get("type") == "ByteLevel":
        return normalizer is None and split["use_regex"] and not split["add_prefix_space"]
    return split.get("type") == "BertPreTokenizer" and normalizer in (None, "BertNormalizer")


# --- Training


def train_bpe(texts: Iterable[str], size: int) -> SubwordTokenizer:
    """Byte-level BPE with `size` ids, special ones included; fewer if the texts have no more pairs to merge."""
    if size < LEAST_SIZE:
        raise InsertlmError(f"a vocabulary of {size} is too small; expected at least {LEAST_SIZE}: bytes and specials")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[names[0] for names in _NAMES.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # a set, whose order changes from run to run
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return SubwordTokenizer(inner)


# --- Loading

_FILES = ("tokenizer.json", "vocab.txt")  # of a folder


def load_tokenizer(source: str) -> SubwordTokenizer:
    """From a tokenizer.json, a BERT vocab.txt, a folder with either, a GGUF file, or by the name of a bundled model or
    one on the Hugging Face Hub."""
    place = find_bundled(source) or Path(source)
    try:
        if place.is_dir():
            place = next((place / name for name in _FILES if (place / name).is_file()), place)
        if place.is_file():
            return _read(place, place.stat().st_mtime_ns)
        exists = place.exists()
    except OSError as error:
        raise InsertlmError(f"{source}: cannot be read: {reason(error)}") from error
    if exists:
        raise InsertlmError(f"{source}: no tokenizer there; expected a folder with tokenizer.json or vocab.txt")
    if place.suffix == ".gguf":
        raise InsertlmError(f"{source}: no such file; expected a GGUF file, which holds a model and its tokenizer")
    if place.suffix in (".json", ".txt") or place.is_absolute():
        raise InsertlmError(f"{source}: no such tokenizer; make one with: insertlm data tokenizer FILES --out {source}")
    return _fetch(source)


def has_tokenizer(source: str) -> bool:
    """Whether there is one beside the weights of a model, or in their file."""
    place = Path(source)
    return not place.is_dir() or any((place / name).is_file() for name in _FILES)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> SubwordTokenizer:
    """changed: when the file was changed last, so that a new one is not taken for the cached one"""
    try:
        if path.suffix == ".gguf":
            inner = _from_gguf(path)
        else:
            inner = _bert(path) if path.suffix == ".txt" else tokenizers.Tokenizer.from_file(str(path))
    except InsertlmError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise InsertlmError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from error
    return SubwordTokenizer(inner, str(path))


@lru_cache(maxsize=8)
def _fetch(name: str) -> SubwordTokenizer:
    try:
        inner = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing narrower
        raise InsertlmError(
            f"tokenizer {name!r}: neither a file here nor one the hub gives ({type(error).__name__}); expected "
            "tokenizer.json, vocab.txt, a folder with one of them, or a hub name and a connection"
        ) from error
    return SubwordTokenizer(inner, name)


def _from_gguf(path: Path) -> tokenizers.Tokenizer:
    """transformers knows how the vocabularies of GGUF files are to be read."""
    try:
        import gguf  # noqa: F401  # what transformers reads the file with
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InsertlmError(f"{path}: reading it needs transformers and gguf; pip install 'insertlm[text]'") from error
    found = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # A copy, since we change its settings.
    return tokenizers.Tokenizer.from_str(found.backend_tokenizer.to_str())


class _BertSettings(msgspec.Struct):
    do_lower_case: bool = True


def _bert(vocabulary: Path) -> tokenizers.Tokenizer:
    """A vocab.txt with a word piece per line; tokenizer_config.json beside it may say that case counts."""
    words = vocabulary.read_text(encoding="utf-8").split("\n")
    ids = {word.rstrip("\r"): i for i, word in enumerate(words) if word.rstrip("\r")}
    if "[UNK]" not in ids:
        raise InsertlmError(f"{vocabulary}: not a BERT vocabulary: it has no [UNK]; expected a word piece per line")
    settings = vocabulary.with_name("tokenizer_config.json")
    lower = msgspec.json.decode(settings.read_bytes(), type=_BertSettings).do_lower_case if settings.is_file() else True
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=lower)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner
