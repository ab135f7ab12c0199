"""Texts are taken apart as the page says, and put together again they are the same."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterable
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
from insertlm.tasks.infill_sets import KINDS, Blanked, Document, excerpts, read_set
from insertlm.tasks.infill_sets import make_set as make_set_of

Fits = Callable[[Tensor, Tensor], bool]

STORY = 'Tim had a cat. "Hi!" said Tim. Mr. Fox came by. They ran! Was it far?'
ROC = ["Rick had a dog.", 'It said "Hi! Me?" to Mr. Fox.', "They ran.", "It rained", "All were wet."]


def make_set(texts: Iterable[str], kind: str, count: int | None, seed: int) -> list[Blanked]:
    return make_set_of(map(Document, texts), kind, count, seed)


texts = st.lists(st.text("ab .!?\n\tÉ1", max_size=60), min_size=1, max_size=5)


@given(texts, st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_pieces_and_segments_make_up_the_text(texts: list[str], kind: str, seed: int) -> None:
    usable = [text for text in texts if KINDS[kind](Document(text), np.random.default_rng(0))]
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


def test_sentences_of_a_story_are_those_its_record_lists() -> None:
    """The text alone would give other sentences: there is a full stop within the second and none behind the fourth."""
    story = Document(" ".join(ROC), tuple(ROC))
    assert [example.removed for example in make_set_of([story], "third", None, 0)] == [["They ran."]]
    [example] = make_set_of([story], "middle-three", None, 0)
    assert example.pieces == ["Rick had a dog. ", " All were wet."]
    assert example.text == " ".join(ROC)
    assert make_set([" ".join(ROC)], "third", None, 0)[0].removed == ['Me?" to Mr. Fox.']
    with pytest.raises(InsertlmError, match=r"^0 of 1 texts are long enough"):
        make_set(["One. Two. Three. Four."], "third", None, 0)
    five = "One. Two. Three. Four. Five."
    assert make_set([five], "third", None, 0)[0].removed == ["Three."]
    with pytest.raises(
        InsertlmError, match=r"expected sentences that stand in their text in this order, got 'They ran.'"
    ):
        _ = Document("They run.", ("They ran.",)).sentences


def test_phrases_are_as_likely_as_the_page_says(fits: Fits) -> None:
    """The number of words is log-uniform on 1 … 12; all places within a sentence are equally likely."""
    long = " ".join(f"w{n}" for n in range(40))
    found = Counter(len(example.removed[0].split()) for example in make_set([long] * 6000, "phrase", None, 1))
    shares = np.log1p(1 / np.arange(1, 13))
    assert fits(torch.tensor([found[count] for count in range(1, 13)]), torch.tensor(shares))
    # Sentences of three words and of one: of two words there are two runs, none of which crosses the full stop.
    removed = Counter(example.removed[0] for example in make_set(["A b c. D."] * 3000, "phrase", None, 2))
    assert fits(torch.tensor([removed[run] for run in ("A b", "b c.")]), torch.ones(2))
    assert fits(torch.tensor([removed[run] for run in ("A", "b", "c.", "D.")]), torch.ones(4))
    assert {*removed} == {"A b", "b c.", "A", "b", "c.", "D.", "A b c."}


def test_something_is_left_beside_a_phrase() -> None:
    assert {example.removed[0] for example in make_set(["a b"] * 50, "phrase", None, 0)} == {"a", "b"}
    with pytest.raises(InsertlmError, match=r"^0 of 1 texts are long enough"):
        make_set(["alone"], "phrase", None, 0)


def test_a_sentence_has_another_on_either_side_and_stands_in_one_line(fits: Fits) -> None:
    found = Counter(example.removed[0] for example in make_set([STORY] * 3000, "sentence", None, 1))
    inner = ['"Hi!" said Tim.', "Mr. Fox came by.", "They ran!"]
    assert fits(torch.tensor([found[sentence] for sentence in inner]), torch.ones(3))
    assert {*found} == {*inner}
    broken = "One. A heading\nTwo. Three. Four."
    assert {example.removed[0] for example in make_set([broken] * 20, "sentence", None, 0)} == {"Three."}


@given(st.text("ab .!A\n", max_size=400), st.integers(1, 40), st.integers(0, 9))
def test_excerpts_are_whole_sentences_in_order(text: str, most: int, seed: int) -> None:
    document = Document(text)
    found = [excerpt.text for excerpt in excerpts(document, most, np.random.default_rng(seed))]
    place = 0
    for excerpt in found:
        first = text.index(excerpt, place)
        place = first + len(excerpt)
        assert 1 <= len(excerpt.split()) <= most
    # What is in no excerpt are sentences that are too long for the smallest room.
    left = text
    for excerpt in found:
        left = left.replace(excerpt, "\0", 1)
    lengths = [len(text[slice(*sentence)].split()) for sentence in document.sentences]
    assert len(left.replace("\0", "").split()) <= sum(length for length in lengths if length > min(25, most))


def test_excerpts_are_of_many_lengths() -> None:
    document = Document(" ".join(["This one has five words."] * 20_000))
    lengths = [len(e.text.split()) for e in excerpts(document, 200, np.random.default_rng(0))]
    assert sum(lengths[:-1]) + lengths[-1] == 100_000
    assert min(lengths[:-1]) >= 25
    assert max(lengths) == 200
    # Log-uniform from 25 to 200: half are below the geometric mean.
    assert 0.45 < np.mean(np.array(lengths) <= np.sqrt(25 * 200)) < 0.55


# --- The command


def test_the_command_chooses_texts_by_their_fields_and_cuts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["One two three."] * 30)
    lines = [{"text": f"{long} End {source}.", "source": source} for source in ("wiki", "news@2025", "wiki@2025")]
    file, out = tmp_path / "t.jsonl", tmp_path / "set.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    call = ["data", "infilling", "sentence", str(file), "--out", str(out), "--seed", "3", "--excerpts", "30"]

    def ends(*more: str) -> set[str]:
        assert main([*call, *more]) == 0
        found = read_set(out)
        assert all(len(example.text.split()) <= 30 for example in found)
        return {word for example in found for word in example.text.split() if "wiki" in word or "news" in word}

    assert ends("--only", "source=*@2025") == {"news@2025.", "wiki@2025."}
    assert ends("--without", "source=*@2025") == {"wiki."}
    assert ends("--only", "source=*@2025", "--only", "source=wiki*") == {"wiki@2025."}
    assert ends() == {"wiki.", "news@2025.", "wiki@2025."}
    capsys.readouterr()
    assert main([*call, "--only", "source=none"]) == 2
    assert capsys.readouterr().err.endswith("t.jsonl: --only and --without leave none of 3 texts\n")


def test_the_command_takes_the_sentences_that_a_file_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "roc.jsonl", tmp_path / "set.jsonl"
    file.write_text(json.dumps({"text": " ".join(ROC), "sentences": ROC}) + "\n")
    assert main(["data", "infilling", "middle-three", str(file), "--out", str(out)]) == 0
    assert read_set(out)[0].removed == [" ".join(ROC[1:4])]
    file.write_text(json.dumps({"text": " ".join(ROC), "sentences": ROC[::-1]}) + "\n")
    capsys.readouterr()
    assert main(["data", "infilling", "third", str(file), "--out", str(out)]) == 2
    assert "roc.jsonl, line 1: expected sentences that stand in their text" in capsys.readouterr().err


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
        (
            ["first", "t.txt"],
            "argument KIND: expected one of single, several, middle, third, middle-three, phrase, sentence, "
            "got 'first'",
        ),
        (["single", "none.txt"], "none.txt: no such file; expected a .txt or .jsonl file"),
        (["single", "t.txt", "--count", "2"], "1 of 2 texts are long enough; expected 2"),
        (["several", "t.txt"], "0 of 2 texts are long enough; expected 1"),
        (
            ["single", "t.txt", "--only", "source"],
            "argument --only: expected FIELD=PATTERN such as source=wiki*, got 'source'",
        ),
        (["single", "t.txt", "--only", "a=b"], "--only, --without: t.txt has no fields; expected a .jsonl file"),
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
