"""The same examples in the same order as ever: a corpus must not change because the code that reads it does.

The hashes were computed when stores still had their first form. A bytes-only vocabulary keeps them independent of how
the `tokenizers` library learns merges.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from insertlm.data.order import Order
from insertlm.tasks.base import Split
from insertlm.tasks.text import Text
from insertlm.text.subwords import LEAST_SIZE, train_bpe

# Of each split: its examples, padded, and the fingerprint that `corpus.sha256` in a run's folder holds.
GOLDEN: dict[Split, tuple[str, str]] = {
    "train": ("b12b777f6fcd610c", "3fd35ec52ed9f7fe"),
    "validation": ("f169e83f36ea042c", "708c9f7eb0c9e4d2"),
    "test": ("4b7c4c7185770ac2", "d86331ff76cc1e74"),
}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    """Four files of all kinds, with excerpts, long documents and lines that hold none."""
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    stories = [f"The cat no. {i} sat. “É!” said it.{' Then it ran.' * (i % 9)} It was {i}." for i in range(300)]
    lines = [json.dumps({"text": story, "id": 1}, ensure_ascii=i % 2 == 0) for i, story in enumerate(stories)]
    lines[7], lines[90], lines[200] = "{", '{"text": 3}', '{"text": " "}'
    data = "\n".join(lines).encode() + b'\n{"text": "\xff"}\n\r\n{"text": "last"}'
    paragraphs = "\n \n".join(story.replace(". ", ".\n") for story in stories).encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[5000:]))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf" + paragraphs)
    (tmp_path / "d.txt.xz").write_bytes(lzma.compress(paragraphs[: len(paragraphs) // 2]))
    train_bpe(["a"], LEAST_SIZE).save(tmp_path / "tokenizer.json")
    names = ("a.jsonl", "b.jsonl.gz", "c.txt", "d.txt.xz")
    return Text(
        train=tuple(str(tmp_path / name) for name in names),
        vocabulary=str(tmp_path / "tokenizer.json"),
        block=120,
        share=0.1,
        excerpts=0.4,
        documents="blank",
    )


@pytest.mark.parametrize("split", GOLDEN)
def test_documents_and_their_order_are_those_of_old(task: Text, split: Split) -> None:
    stored = task.stored(split)
    examples, _ = Order(len(stored), 16, 3).batches(0, 2 * len(stored) // 16)
    taken = stored.take(np.concatenate([np.arange(len(stored)), examples.ravel()]))
    digest = hashlib.sha256(taken.target.astype("<i4").tobytes() + taken.target_length.astype("<i4").tobytes())
    assert (digest.hexdigest()[:16], stored.store.fingerprint[:16]) == GOLDEN[split]
