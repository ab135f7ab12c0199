"""Text to ids and back: any string, whatever it looks like."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.text.subwords import LEAST_SIZE, SubwordTokenizer, load_tokenizer, train_bpe
from insertlm.text.tokenizers import Specials, Tokenizer

TEXTS = ["Once upon a time, Tim's dog ran.", "The dog saw a CAT!", "Once upon a day they ran and ran."] * 20
BPE = train_bpe(TEXTS, 290)
PIECES = [
    "[PAD]",
    "[unused0]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[",
    "]",
    "mask",
    "the",
    "cat",
    "##s",
    ".",
    "[BOS]",
]

with TemporaryDirectory() as place:
    (Path(place) / "vocab.txt").write_text("\n".join(["[UNK]", *"abcdehst.'", *(f"##{x}" for x in "abcdehst")]))
    WORD_PIECES = load_tokenizer(place)


# A tokenizer.json like SmolLM2's: single digits, and of our special tokens an end only.
inner = tokenizers.Tokenizer(tokenizers.models.BPE())
inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(False)]
)
inner.decoder = tokenizers.decoders.ByteLevel()
inner.train_from_iterator(
    [*TEXTS, "2024 12 days"] * 3,
    tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    ),
)
SINGLE_DIGITS = SubwordTokenizer(inner)


def bert(folder: Path, pieces: list[str] = PIECES) -> Path:
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return folder / "vocab.txt"


# --- Our own


@given(st.text())
@example("<bos><stop> <mask>\r\n\t\x00  café 👩‍👩‍👧 ﷽ \ufeff")
@settings(max_examples=200)
def test_any_string_comes_back(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert set(ids) <= set(BPE.writable)


def test_ids_are_specials_then_bytes_then_merges() -> None:
    tokenizer: Tokenizer = BPE
    assert tokenizer.specials == Specials(0, 1, 2, 3, 4, 5)
    assert tokenizer.size == 290
    assert tokenizer.writable == list(range(6, 290))


def test_training_is_deterministic() -> None:
    assert train_bpe(TEXTS, 290).json == BPE.json
    assert train_bpe(TEXTS, 290).fingerprint == BPE.fingerprint
    assert train_bpe(TEXTS, 280).fingerprint != BPE.fingerprint


def test_a_vocabulary_without_a_single_merge() -> None:
    tokenizer = train_bpe([], LEAST_SIZE)
    assert tokenizer.size == LEAST_SIZE
    assert tokenizer.decode(tokenizer.encode("né")) == "né"


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused() -> None:
    with pytest.raises(InsertlmError, match="a vocabulary of 261 is too small; expected at least 262"):
        train_bpe(TEXTS, LEAST_SIZE - 1)


def test_special_tokens_are_named() -> None:
    ids = BPE.encode("a dog")
    specials = BPE.specials
    assert (
        BPE.decode([specials.stop, specials.bos, *ids, specials.mask, specials.mask]) == "<stop><bos>a dog<mask><mask>"
    )
    assert BPE.decode([]) == ""


def test_lone_surrogates_do_not_fail() -> None:
    assert BPE.decode(BPE.encode("a\ud800b")) == "a?b"


def test_many_are_encoded_as_each_alone() -> None:
    assert BPE.encode_many(TEXTS[:3]) == [BPE.encode(text) for text in TEXTS[:3]]


blanks = st.lists(
    st.sampled_from(
        ["a", "the cat", "2", " 12", " ", "\n", "  ", "\t", "\r", "\u00a0", "\u3000", "\x1c", "É", ".", "'s"]
    )
)


@given(st.one_of(blanks.map("".join), st.text()))
@settings(max_examples=300)
def test_words_have_the_ids_they_have_in_the_whole(text: str) -> None:
    for tokenizer in (BPE, WORD_PIECES, SINGLE_DIGITS):
        assert tokenizer._words is not None
        assert tokenizer.encode(text) == tokenizer._encode_whole([text])[0]


def test_known_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insertlm.text.subwords._MOST_WORDS", 3)
    tokenizer = train_bpe(TEXTS, 290)
    assert tokenizer.decode(tokenizer.encode("a b c d e f g a b")) == "a b c d e f g a b"
    assert tokenizer._words is not None
    assert len(tokenizer._words) <= 3


def test_tokenizers_that_look_across_blanks_are_left_to_the_library() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    assert SubwordTokenizer(inner)._words is None
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert SubwordTokenizer(inner)._words is None
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert SubwordTokenizer(inner)._words is not None
    inner.add_tokens(["New York"])
    assert SubwordTokenizer(inner)._words is None


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    for source in (tmp_path / "tokenizer.json", tmp_path):
        again = load_tokenizer(str(source))
        assert again.fingerprint == BPE.fingerprint
        assert again.encode("<bos> dog") == BPE.encode("<bos> dog")
        assert again.specials == BPE.specials


# --- Those of others


def test_a_pretrained_vocabulary_keeps_its_ids_and_grows_by_what_it_lacks() -> None:
    specials = SINGLE_DIGITS.specials
    assert (specials.eos, sorted(specials)) == (0, [0, 1, *range(280, 284)])
    assert SINGLE_DIGITS.size == 284
    assert SINGLE_DIGITS.writable == list(range(2, 280))  # neither its own special tokens nor ours
    text = "On 12 days in 2024, <|im_start|> they ran.\n\n  É"
    assert SINGLE_DIGITS.decode(SINGLE_DIGITS.encode(text)) == text
    assert SINGLE_DIGITS.encode("12") == SINGLE_DIGITS.encode("1") + SINGLE_DIGITS.encode("2")


def test_bert_gets_what_it_lacks_behind_its_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bert(tmp_path, PIECES[:-1])))
    assert tokenizer.specials == Specials(stop=3, bos=13, eos=14, unk=2, pad=0, mask=5)
    assert tokenizer.size == 15
    assert tokenizer.writable == list(range(6, 13))  # neither [unused0] nor [SEP]
    assert tokenizer.encode("The cats. [MASK]") == [9, 10, 11, 12, 6, 8, 7]
    assert tokenizer.decode([9, 10, 11, 12]) == "the cats."
    assert tokenizer.decode([13, 9, 14]) == "<bos>the<eos>"
    again = SubwordTokenizer.from_json(tokenizer.json)
    assert (again.specials, again.size, again.writable) == (tokenizer.specials, tokenizer.size, tokenizer.writable)


def test_bert_may_have_what_we_add_elsewhere(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bert(tmp_path)))
    assert (tokenizer.specials.bos, tokenizer.specials.eos, tokenizer.size) == (13, 14, 15)


def test_bert_keeps_case_where_its_settings_say_so(tmp_path: Path) -> None:
    bert(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("The") == [9]
    cased = tmp_path / "cased"
    cased.mkdir()
    bert(cased)
    (cased / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 512}')
    assert load_tokenizer(str(cased)).encode("The") == [2]


def test_special_tokens_that_a_file_marks_are_not_read_from_text(tmp_path: Path) -> None:
    """As in the tokenizer.json of BERT on the hub."""
    tokenizer = load_tokenizer(str(bert(tmp_path)))
    tokenizer._inner.add_special_tokens(["[MASK]", "[SEP]"])
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).encode("[MASK]") == [6, 8, 7]


def test_a_new_file_is_read_anew(tmp_path: Path) -> None:
    place = tmp_path / "tokenizer.json"
    BPE.save(place)
    assert load_tokenizer(str(place)).size == 290
    train_bpe(TEXTS, 280).save(place)
    assert load_tokenizer(str(place)).size == 280


def test_writable_is_fast_for_large_vocabularies(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bert(tmp_path, [*PIECES, *(f"word{i}" for i in range(30_000))])))
    started = time.perf_counter()
    assert len(tokenizer.writable) == 30_007
    assert time.perf_counter() - started < 1.0
    assert tokenizer.writable is tokenizer.writable


@pytest.mark.parametrize(
    ("content", "line"),
    [("{", "not a tokenizer"), ('{"a": 1}', "not a tokenizer"), (None, "no such tokenizer; make one with")],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path: Path, content: str | None, line: str) -> None:
    place = tmp_path / "tokenizer.json"
    if content is not None:
        place.write_text(content)
    with pytest.raises(InsertlmError, match=line) as caught:
        load_tokenizer(str(place))
    assert "\n" not in str(caught.value)


def test_other_places_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InsertlmError, match=r"expected a folder with tokenizer\.json or vocab\.txt"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(InsertlmError, match=r"not a BERT vocabulary: it has no \[UNK\]"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", None)
    with pytest.raises(InsertlmError, match=r"tokenizer 'no-such-owner/model': neither a file here nor one the hub"):
        load_tokenizer("no-such-owner/model")


def test_special_tokens_of_other_names_are_not_written() -> None:
    inner = tokenizers.Tokenizer.from_str(train_bpe(["a cat"], 270).json)
    inner.add_special_tokens(["<|im_start|>"])
    found = SubwordTokenizer(inner)
    assert inner.token_to_id("<|im_start|>") not in found.writable
