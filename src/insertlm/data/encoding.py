"""Documents to ids, by as many processes as there are cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from insertlm.data.sources import Document, Kind, Separator, text_of
from insertlm.text.detokenise import Detokeniser, detokeniser
from insertlm.text.sentences import excerpt
from insertlm.text.subwords import SubwordTokenizer

__all__ = ["Chunk", "Encode", "Encoder", "Longer", "Options", "encoders", "process_count"]

Longer = Literal["truncate", "skip"]


class Options(msgspec.Struct, frozen=True):
    """What a store depends on beside its sources and its tokenizer.

    separator: of documents in .txt   block: most ids of a document   longer: what to do with those that have more
    excerpts: of the documents, of which some sentences are another one   shares: names of splits and how much of the
    documents goes to each
    """

    block: int
    separator: Separator = "line"
    detokenise: Detokeniser = "none"
    longer: Longer = "truncate"
    excerpts: float = 0.0
    shares: tuple[tuple[str, float], ...] = (("all", 1.0),)


class Chunk(NamedTuple):
    """Documents as ids. split: [N] number of each one's split   lengths: [N]   ids: of all, end to end"""

    split: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: NDArray[np.uint16 | np.uint32]
    longer: int
    bad: list[tuple[int, str]]


class Encoder:
    """Makes ids of documents. Every process has its own."""

    def __init__(self, tokenizer: SubwordTokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
        self.bounds = np.cumsum([share for _, share in options.shares])[:-1]

    def __call__(self, documents: Sequence[Document], kind: Kind) -> Chunk:
        texts, bad = self._texts(documents, kind)
        encoded = list(zip(texts.values(), self.tokenizer.encode_many(list(texts.values())), strict=True))
        bad += [(line, "no token in it") for line, (_, ids) in zip(texts, encoded, strict=True) if not ids]
        found = [(text, ids) for text, ids in encoded if ids]
        kept = [(text, ids) for text, ids in found if len(ids) <= self.options.block]
        longer = len(found) - len(kept)
        if self.options.longer == "truncate":
            kept = [(text, ids[: self.options.block]) for text, ids in found]
        kept += self._excerpts(list(texts.values()))
        lengths = np.array([len(ids) for _, ids in kept], np.int64)
        flat = np.fromiter(chain.from_iterable(ids for _, ids in kept), self.dtype, int(lengths.sum()))
        return Chunk(self._splits([text for text, _ in kept]), lengths, flat, longer, bad)

    def _texts(self, documents: Sequence[Document], kind: Kind) -> tuple[dict[int, str], list[tuple[int, str]]]:
        """By line, and what is wrong with the lines that hold none."""
        clean = detokeniser(self.options.detokenise)
        texts: dict[int, str] = {}
        bad: list[tuple[int, str]] = []
        for line, data in documents:
            try:
                texts[line] = clean(text_of(data, kind))
            except ValueError as error:
                bad.append((line, str(error)))
        return texts, bad

    def _excerpts(self, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
        """With the text that each is from, whose split is its own too."""
        if not self.options.excerpts:
            return []
        parts = {text: part for text in texts if (part := excerpt(text, self.options.excerpts))}
        encoded = zip(parts, self.tokenizer.encode_many(list(parts.values())), strict=True)
        return [(text, ids) for text, ids in encoded if 0 < len(ids) <= self.options.block]

    def _splits(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """By a hash of each text, uniform on [0, 1)."""
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        return np.searchsorted(self.bounds, np.frombuffer(digests, "<u8") / 2.0**64, side="right")


# --- In parallel

Encode = Callable[[Sequence[Document], Kind], Future[Chunk]]


def process_count() -> int:
    """The cores of this machine, shared with the other processes that torchrun has started here."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def encoders(stack: ExitStack, tokenizer: SubwordTokenizer, options: Options, alone: bool) -> Encode:
    """What encodes until the stack ends: other processes, or alone this one, at once."""
    if alone or process_count() == 1:
        return partial(_at_once, Encoder(tokenizer, options))
    pool = ProcessPoolExecutor(
        process_count(), get_context("spawn"), initializer=_start, initargs=(tokenizer.json, options)
    )
    stack.callback(pool.shutdown, cancel_futures=True)
    return lambda documents, kind: pool.submit(_encode, documents, kind)


def _at_once(encoder: Encoder, documents: Sequence[Document], kind: Kind) -> Future[Chunk]:
    future: Future[Chunk] = Future()
    future.set_result(encoder(documents, kind))
    return future


_here: list[Encoder] = []  # of a process of the pool


def _start(tokenizer: str, options: Options) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many
    Thread(target=_end_with_parent, daemon=True).start()
    _here.append(Encoder(SubwordTokenizer.from_json(tokenizer), options))


def _end_with_parent() -> None:
    """A pool does not end its processes when it is killed itself."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(documents: Sequence[Document], kind: Kind) -> Chunk:
    return _here[0](documents, kind)
