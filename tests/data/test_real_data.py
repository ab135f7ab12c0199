"""The real vocabulary and real stories, where they are at hand: INSERTLM_DATA names their folder."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from insertlm.data.sources import source_of, texts
from insertlm.text.detokenise import detokeniser
from insertlm.text.subwords import load_tokenizer, train_bpe
from insertlm.text.tokenizers import Specials


def data(name: str) -> str:
    path = Path(os.environ.get("INSERTLM_DATA", "")) / name
    if "INSERTLM_DATA" not in os.environ or not path.exists():
        pytest.skip(f"real data is not at hand: set INSERTLM_DATA to a folder with {name}")
    return str(path)


def test_bert_has_the_published_size() -> None:
    tokenizer = load_tokenizer(data("bert-base-uncased"))
    assert tokenizer.size == 30_524
    assert tokenizer.specials == Specials(stop=101, bos=30_522, eos=30_523, unk=100, pad=0, mask=103)
    assert len(tokenizer.writable) == 30_522 - 5 - 994  # neither the five special pieces nor [unused…]


def test_stories_come_back_and_pieces_are_right() -> None:
    stories = list(islice(texts([source_of(data("tinystories/test.jsonl.xz"))]), 300))
    ours, theirs = train_bpe(stories, 1000), load_tokenizer(data("bert-base-uncased"))
    assert [ours.decode(ids) for ids in ours.encode_many(stories)] == stories
    for tokenizer in (ours, theirs):
        assert tokenizer.encode_many(stories) == tokenizer._encode_whole(stories)


def test_news_reads_like_news() -> None:
    sentences = list(islice(texts([source_of(data("lm1b/test.txt.xz"))]), 2000))
    joined = [detokeniser("lm1b")(sentence) for sentence in sentences]
    assert sum(" ," in sentence or " ." in sentence for sentence in joined) < 20
    assert sum(" 's" in sentence for sentence in joined) == 0
