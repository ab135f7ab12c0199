"""Tokenizers for text: byte-level BPE of our own, and whatever the Hugging Face `tokenizers` library reads.

Design choices:
- Our own BPE works on bytes, keeps case and adds no space, so that decoding gives back any Unicode string as it was.
- Special tokens never come out of text. What looks like one is encoded as the characters it is made of.
- A tokenizer that lacks some of our special tokens gets them behind its vocabulary: bert-base-uncased has [CLS] (our
  stop), [UNK], [PAD] and [MASK]; bos and eos become 30,522 and 30,523.
- Text repeats its words. Where a tokenizer never looks across a blank, pieces of text are encoded once and looked up
  from then on, which is several times faster than the library and gives the same ids.
- Other special tokens of a vocabulary, such as [SEP] and BERT's [unused…], are never written either.
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

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, write_atomically
from insertlm.text.tokenizers import Specials

__all__ = ["LEAST_SIZE", "SubwordTokenizer", "load_tokenizer", "train_bpe"]

# What our special tokens are called, here and elsewhere. The first name that a vocabulary has is taken.
_NAMES: dict[str, tuple[str, ...]] = {
    "stop": ("<stop>", "[CLS]", "<cls>"),
    "bos": ("<bos>", "[BOS]", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "[EOS]", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}
_RESERVED = re.compile(r"\[(?:unused\d+|SEP|CLS|PAD|MASK|UNK|BOS|EOS)\]")  # a plain vocab.txt does not mark them
LEAST_SIZE = 256 + len(Specials._fields)  # of a BPE vocabulary: every byte and the special tokens


class SubwordTokenizer:
    """A tokenizer of the Hugging Face library as the rest of this one sees it. name: for messages."""

    def __init__(self, inner: tokenizers.Tokenizer, name: str = "tokenizer") -> None:
        inner.encode_special_tokens = True  # text that looks like a special token is text
        inner.no_truncation()
        inner.no_padding()
        self.name, self._inner = name, inner
        self._known = max(inner.get_vocab().values(), default=-1) + 1
        behind = count(self._known)
        found = (_find(inner, role) for role in Specials._fields)
        self.specials = Specials._make(next(behind) if i is None else i for i in found)
        self._pieces = _Pieces(self._whole) if _stops_at_blanks(self.json) else None

    @cached_property
    def size(self) -> int:
        return max(self._known, *(i + 1 for i in self.specials))

    @cached_property
    def writable(self) -> list[int]:
        marked = {i for i, token in self._inner.get_added_tokens_decoder().items() if token.special}
        kept = (i for word, i in self._inner.get_vocab().items() if not _RESERVED.fullmatch(word))
        return sorted(set(kept) - marked - set(self.specials))

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
        """The content of a tokenizer.json: what another process, or `load_tokenizer`, makes this tokenizer of."""
        return self._inner.to_str()

    @classmethod
    def from_json(cls, text: str, name: str = "tokenizer") -> SubwordTokenizer:
        return cls(tokenizers.Tokenizer.from_str(text), name)

    def save(self, path: Path) -> None:
        write_atomically(path, self.json.encode())

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Faster than one by one."""
        # Rust strings have no lone surrogates; they become question marks.
        clean = [text if text.isascii() else text.encode("utf-8", "replace").decode() for text in texts]
        if self._pieces is None:
            return self._whole(clean)
        known = self._pieces.__getitem__
        return [
            self._whole([text])[0]
            if _ODD_BLANK.search(text)
            else list(chain.from_iterable(map(known, _PIECE.findall(text))))
            for text in clean
        ]

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens show as `<bos>` and so on, whatever the vocabulary calls them."""
        names = {i: f"<{role}>" for role, i in self.specials._asdict().items()}
        runs = groupby(ids, key=names.get)
        return "".join(
            self._inner.decode(list(run), skip_special_tokens=False) if name is None else name * len(list(run))
            for name, run in runs
        )


def _find(inner: tokenizers.Tokenizer, role: str) -> int | None:
    ids = (inner.token_to_id(name) for name in _NAMES[role])
    return next((i for i in ids if i is not None), None)


# --- Pieces

_PIECE = re.compile(r"[ \n]*[^ \n]+|[ \n]+")  # a word with the blanks before it
# Blanks of other kinds, about which libraries do not agree: texts that have one are left to the library.
_ODD_BLANK = re.compile(r"[^\S \n]|[\u180e\u200b-\u200d\u2060\ufeff]")
_MOST_PIECES = 1 << 18


class _Pieces(dict[str, list[int]]):
    """Ids of pieces of text, encoded when they are first asked for. Starts anew when it has grown large."""

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, piece: str) -> list[int]:
        if len(self) >= _MOST_PIECES:
            self.clear()
        [ids] = self._encode([piece])
        self[piece] = ids
        return ids


def _stops_at_blanks(text: str) -> bool:
    """Whether the ids of a text are those of its pieces. text: of a tokenizer.json. True for byte-level BPE that splits
    as GPT-2 does, and for BERT: in both a word ends where a blank begins, and nothing else matters to it."""
    parts = msgspec.json.decode(text)
    split, before = parts["pre_tokenizer"] or {}, (parts["normalizer"] or {}).get("type")
    if parts["model"].get("dropout") or any(not token["special"] for token in parts["added_tokens"]):
        return False
    if split.get("type") == "ByteLevel":
        return before is None and split["use_regex"] and not split["add_prefix_space"]
    return split.get("type") == "BertPreTokenizer" and before in (None, "BertNormalizer")


# --- Making


def train_bpe(texts: Iterable[str], size: int) -> SubwordTokenizer:
    """Byte-level BPE with `size` ids, special ones included; fewer where the texts have no more pairs to merge."""
    if size < LEAST_SIZE:
        raise InsertlmError(f"a vocabulary of {size} is too small; expected at least {LEAST_SIZE}: bytes and specials")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[names[0] for names in _NAMES.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted: it comes as a set
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return SubwordTokenizer(inner)


# --- Loading


def load_tokenizer(source: str) -> SubwordTokenizer:
    """By a tokenizer.json, a BERT vocab.txt, a folder with either, or a name on the Hugging Face hub."""
    place = Path(source)
    try:
        if place.is_dir():
            files = (place / name for name in ("tokenizer.json", "vocab.txt"))
            place = next((path for path in files if path.is_file()), place)
        if place.is_file():
            return _read(place, place.stat().st_mtime_ns)
        exists = place.exists()
    except OSError as error:
        raise InsertlmError(f"{source}: cannot be read: {reason(error)}") from error
    if exists:
        raise InsertlmError(f"{source}: no tokenizer there; expected a folder with tokenizer.json or vocab.txt")
    if place.suffix in (".json", ".txt") or place.is_absolute():
        raise InsertlmError(f"{source}: no such tokenizer; make one with: insertlm data tokenizer FILES --out {source}")
    return _fetch(source)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> SubwordTokenizer:
    """changed: when the file was, so that a new one is read anew."""
    try:
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


class _BertSettings(msgspec.Struct):
    do_lower_case: bool = True


def _bert(vocabulary: Path) -> tokenizers.Tokenizer:
    """A vocab.txt with one word piece a line; tokenizer_config.json beside it may say that case counts."""
    words = vocabulary.read_text(encoding="utf-8").split("\n")
    ids = {word.rstrip("\r"): i for i, word in enumerate(words) if word.rstrip("\r")}
    if "[UNK]" not in ids:
        raise InsertlmError(f"{vocabulary}: not a BERT vocabulary: it has no [UNK]; expected a word piece a line")
    settings = vocabulary.with_name("tokenizer_config.json")
    lower = msgspec.json.decode(settings.read_bytes(), type=_BertSettings).do_lower_case if settings.is_file() else True
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=lower)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner
