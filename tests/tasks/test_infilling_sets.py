"""Texts are taken apart as the page says, and put together again they are the same."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.tasks.infill_sets import KINDS, Blanked, make_set, read_set

Fits = Callable[[Tensor, Tensor], bool]

STORY = 'Tim had a cat. "Hi!" said Tim. Mr. Fox came by. They ran! Was it far?'
texts = st.lists(st.text("ab .!?\n\tÉ1", max_size=60), min_size=1, max_size=5)


@given(texts, st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_pieces_and_segments_make_up_the_text(texts: list[str], kind: str, seed: int) -> None:
    usable = [text for text in texts if KINDS[kind](text, np.random.default_rng(0))]
    if not usable:
        with pytest.raises(InsertlmError, match=rf"^0 of {len(texts)} texts are long enough; expected 1$"):
            make_set(texts, kind, None, seed)
        return
    found = make_set(texts, kind, None, seed)
    assert [example.text for example in found] == usable
    for example in found:
        parts = [part for pair in zip(example.pieces, [*example.removed, ""], strict=True) for part in pair]
        assert "".join(parts) == example.text
        assert [example.text[first:last] for first, last in example.blanks] == example.removed
        assert Blanked.of(example.text, example.blanks) == example
        assert all(segment == segment.strip() != "" for segment in example.removed)
        assert all(piece.strip() for piece in example.pieces[1:-1])


@pytest.mark.parametrize(("kind", "words"), [("single", 5), ("single", 23), ("several", 8), ("several", 40)])
def test_a_fifth_of_the_words_goes(kind: str, words: int) -> None:
    text = " ".join(f"w{n}" for n in range(words))
    for seed in range(20):
        [example] = make_set([text], kind, None, seed)
        assert sum(len(segment.split()) for segment in example.removed) == max(
            words // 5 + (words % 5 > 2), len(example.removed)
        )
        assert (len(example.removed) > 1) == (kind == "several")


def test_every_place_of_a_segment_is_equally_likely(fits: Fits) -> None:
    text = " ".join("abcdefghij")
    found = Counter(example.removed[0] for example in make_set([text] * 3000, "single", None, 1))
    runs = [" ".join(pair) for pair in pairwise("abcdefghij")]
    assert fits(torch.tensor([found[run] for run in runs]), torch.ones(9))
    assert not found.keys() - set(runs)


def test_several_segments_are_as_likely_as_the_page_says(fits: Fits) -> None:
    """Ten words, two of them removed: two segments of one word, not side by side."""
    examples = make_set([" ".join("abcdefghij")] * 4000, "several", None, 1)
    found = Counter("".join(example.removed) for example in examples)
    pairs = [a + b for a in "abcdefghij" for b in "abcdefghij" if ord(b) > ord(a) + 1]
    assert fits(torch.tensor([found[pair] for pair in pairs]), torch.ones(len(pairs)))
    assert not found.keys() - set(pairs)
    counts = Counter(len(example.removed) for example in make_set([" ".join("ab" * 30)] * 2000, "several", None, 2))
    assert fits(torch.tensor([counts[count] for count in (2, 3, 4, 5)]), torch.ones(4))


def test_the_middle_sentence() -> None:
    [example] = make_set([STORY], "middle", None, 0)
    assert example.removed == ["Mr. Fox came by."]
    assert example.pieces == ['Tim had a cat. "Hi!" said Tim. ', " They ran! Was it far?"]
    [example] = make_set(["One. Two. “Three.” Four"], "middle", None, 0)
    assert example.removed == ["“Three.”"]


def test_the_choice_depends_on_the_seed_and_the_order_stays() -> None:
    texts = [f"a b c d e{n}" for n in range(50)]
    first, again, other = (make_set(texts, "single", 10, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [texts.index(example.text) for example in first] == sorted(texts.index(e.text) for e in first)
    everything = {example.text: example for example in make_set(texts, "single", None, 1)}
    assert all(everything[example.text] == example for example in first)  # a larger count extends a smaller one
    with pytest.raises(InsertlmError, match=r"^50 of 50 texts are long enough; expected 51$"):
        make_set(texts, "single", 51, 1)


# --- The command


def test_the_command_writes_a_set_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.jsonl.xz").write_bytes(lzma.compress(f"{json.dumps({'text': STORY})}\n".encode() * 3))
    out = tmp_path / "set.jsonl"
    assert main(["data", "infilling", "middle", str(tmp_path / "s.jsonl.xz"), "--count", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote 2 texts with blanks to {out}\n"
    assert read_set(out) == make_set([STORY] * 3, "middle", 2, 0)


def test_the_command_chooses_by_its_seed(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a b c d e f g h i j\n" * 8, encoding="utf-8")
    arguments = ["data", "infilling", "single", str(tmp_path / "t.txt"), "--out", str(tmp_path / "set.jsonl")]
    assert main([*arguments, "--seed", "5"]) == 0
    expected = [make_set(["a b c d e f g h i j"] * 8, "single", None, seed) for seed in (5, 0)]
    assert read_set(tmp_path / "set.jsonl") == expected[0] != expected[1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["first", "t.txt"], "argument KIND: expected one of single, several, middle, got 'first'"),
        (["single", "none.txt"], "none.txt: no such file; expected a .txt or .jsonl file"),
        (["single", "t.txt", "--count", "2"], "1 of 2 texts are long enough; expected 2"),
        (["several", "t.txt"], "0 of 2 texts are long enough; expected 1"),
        (["single", "t.txt", "--out", "none/x"], "cannot write none/x: there is no folder none"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("a b c d e\nshort\n", encoding="utf-8")
    assert main(["data", "infilling", "--out", "x.jsonl", *arguments]) == 2
    assert capsys.readouterr().err == f"insertlm: {line}\n"
    assert not Path("x.jsonl").exists()


@pytest.mark.parametrize(
    "change", [{"pieces": ["a"]}, {"removed": []}, {"text": "abd"}, {"text": None}, {"pieces": ["a", 1]}, {"pieces": 3}]
)
def test_a_line_that_is_no_example(tmp_path: Path, change: dict[str, Any]) -> None:
    good = {"pieces": ["a", "c"], "removed": ["b"], "text": "abc"}
    path = tmp_path / "set.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps({**good, **change})}\n", encoding="utf-8")
    assert read_set(path, 1) == [Blanked(["a", "c"], ["b"], "abc")]
    with pytest.raises(InsertlmError, match=r"set.jsonl, line 2: expected pieces and removed segments that make up"):
        read_set(path)


def test_the_billion_words_are_joined_before_they_are_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "lm1b.txt").write_text('" I don \'t know , " he said , " and you do .\n')
    arguments = ["data", "infilling", "single", str(tmp_path / "lm1b.txt"), "--out", str(tmp_path / "set.jsonl")]
    assert main([*arguments, "--detokenise", "lm1b"]) == 0
    assert read_set(tmp_path / "set.jsonl")[0].text == '"I don\'t know," he said, "and you do.'
