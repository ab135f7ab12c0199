"""The code that goes with an export does what the package does: the same numbers, and the same texts for a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from insertlm.core import noise
from insertlm.core.errors import InsertlmError
from insertlm.core.packing import Packing
from insertlm.families.ilm import ILM
from insertlm.model import Model, load
from insertlm.nn.attention import PackedAttention
from insertlm.nn.fused import rotate
from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import rotations
from insertlm.release import modeling_insertlm as remote
from insertlm.release import writing_insertlm as writing
from insertlm.release.folder import export
from insertlm.text.blanks import parse_blanks

TEXTS = [
    "The cat ___ the mat.",
    "___",
    "The ___ sat on ___ mat___",
    "___ dogs sat. ___",
    "The dog___ the\n___ mat. \\___ <bos> [CLS]",
    '"___," said the cat (___).',
]
SEED = (3 << 32) + 5
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "position_top_k": 0, "stop_threshold": 0.75},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "position_top_k": 3, "stop_threshold": 1.0},
    {"joint": True, "temperature": 1.0, "top_p": 0.95},
    {"joint": True},
    {"order": "certainty", "stop_threshold": 1.0},
    {"order": "margin", "temperature": 1.5, "stop_threshold": 1.0, "max_steps": 9},
    {"min_length": 3, "max_length": 5, "temperature": 1.0},
    {"min_length": 0, "stop_threshold": 0.2},
    {"max_length": 0},
    {"temperature": 1e-40, "joint": True},
    {"temperature": 1.0, "top_p": 1e-50},
]


class Both(NamedTuple):
    package: Model
    remote: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def both(exported: Path, text_run: Path) -> Both:
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    return Both(load(text_run, "cpu"), remote.InsertlmModel.from_pretrained(exported).eval(), tokenizer)


LLAMA = {
    "norm": "rms",
    "final_norm": True,
    "feed_forward": "swiglu",
    "feed_forward_bias": False,
    "tied": True,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 6,
    "rotary_dims": 4,
    "rotary_base": 99.0,
    "norm_epsilon": 0.01,
}


@pytest.mark.parametrize(
    "keys", [LLAMA, {**LLAMA, "tied": False, "feed_forward": "gelu", "attention_bias": True}], ids=str
)
def test_other_transformers_than_the_papers_are_exported_too(
    tmp_path: Path, make_run: Callable[..., Path], keys: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run", model=keys)
    export(load(run, "cpu"), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert ("unembedding.weight" in weights) is not keys["tied"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    model = remote.InsertlmModel.from_pretrained(tmp_path / "out").eval()
    assert (model.unembedding.weight is model.backbone.embedding.weight) is keys["tied"]
    both = Both(load(run, "cpu"), model, tokenizer)
    test_logits_are_those_of_the_package(both)
    test_texts_are_those_of_the_package(both, {"temperature": 1.0})
    again = load(tmp_path / "out", "cpu")
    assert again.infill(TEXTS[0], seed=SEED)[0].text == both.package.infill(TEXTS[0], seed=SEED)[0].text


def rows_of(both: Both) -> list[list[int]]:
    """Rows of <stop> <bos> text."""
    specials, encode = both.package.text_tokenizer.specials, both.package.text_tokenizer.encode
    texts = ("", "the cat sat", "The dogs number 17 sat on the mat.")
    return [[specials.stop, specials.bos, *encode(text)] for text in texts]


@torch.no_grad()
def test_logits_are_those_of_the_package(both: Both) -> None:
    family = both.package.family
    assert isinstance(family, ILM)
    for row in rows_of(both):
        ids = torch.tensor(row)
        attention = PackedAttention(Packing(torch.ones(1, len(row), dtype=torch.bool)).segments)
        hidden = family.backbone(ids, torch.arange(len(row)), attention)
        found = both.remote(ids[None])
        torch.testing.assert_close(found.logits[0], family.unembedding(hidden), atol=1e-5, rtol=0)
        torch.testing.assert_close(found.stop_logits, family.stop(hidden[:1]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_changes_nothing(both: Both) -> None:
    rows = rows_of(both)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    together = both.remote(input_ids=ids, attention_mask=seen)
    for b, row in enumerate(rows):
        alone = both.remote(torch.tensor([row]))
        torch.testing.assert_close(together.logits[b, : len(row)], alone.logits[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together.stop_logits[b], alone.stop_logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=json.dumps)
def test_texts_are_those_of_the_package(both: Both, settings: dict[str, Any]) -> None:
    for text in TEXTS:
        theirs = both.package.infill(text, samples=3, seed=SEED, **settings)
        for number, expected in enumerate(theirs):
            found = both.remote.infill(text, both.tokenizer, seed=SEED + number, **settings)
            assert found == (expected.text, expected.fills, expected.complete)


def test_sampling_differs_from_seed_to_seed(both: Both) -> None:
    """So the test above compares different texts, some ended by the model and some by a limit."""
    found = [
        both.remote.infill(text, both.tokenizer, seed=seed, temperature=1.0, position_top_k=0, stop_threshold=enough)
        for text in TEXTS
        for enough in (0.75, 1.0)
        for seed in range(3)
    ]
    assert len({each.text for each in found}) > len(TEXTS) * 2
    assert {each.complete for each in found} == {True, False}


def test_the_length_that_a_recipe_allows_is_kept(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", max_length=10, stop_threshold=1.0)
    export(load(run, "cpu"), tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported", trust_remote_code=False)
    short = remote.InsertlmModel.from_pretrained(tmp_path / "exported").eval()
    for least in (None, 8):  # two of the ten are special
        [expected] = load(run, "cpu").infill("___", min_length=least)
        assert len(expected.trajectory.ids) == 8
        assert short.infill("___", tokenizer, min_length=least) == (expected.text, expected.fills, expected.complete)
    with pytest.raises(ValueError, match="need 11 tokens; the model takes 10"):
        short.infill("___", tokenizer, min_length=9)


# --- Other families than the paper's ILM

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gates": ("ilm", {"stop": "slots"}, {}),
    "it": ("it", {}, {}),
    "arm": ("arm", {}, {}),
    "fill": ("fill", {}, {"max_length": 150}),
    "both": ("both", {}, {"max_length": 150}),
    "llama": ("fill", {"hints": 0.0}, {**LLAMA, "max_length": 150}),
}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "gates": [
        {},
        {"temperature": 1.0},
        {"stop_threshold": 0.6, "min_length": 2},
        {"temperature": 0.8, "max_length": 3},
    ],
    "it": [{"stop_threshold": 0.01}, {"temperature": 1.0}, {"order": "margin"}, {"order": "mass", "max_length": 3}],
    "arm": [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.7, "max_tokens": 3}],
}
FILLS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "max_length": 3},
    {"temperature": 1.0, "max_length": 1},
    {"temperature": 1.0, "min_length": 4, "max_length": 9},
    {"temperature": 1.0, "min_length": 0, "stop_threshold": 0.1},
    {"stop_threshold": 0.02, "max_length": 5},
    {"temperature": 1.0, "max_tokens": 4},
    {"temperature": 1.0, "max_tokens": 4, "max_steps": 3},
    {"max_steps": 40, "temperature": 1.0, "max_length": 2},
    {"max_steps": 100, "temperature": 1.0},
    {"max_steps": 2, "min_length": 3},
]


@pytest.fixture(scope="module", params=KINDS)
def other(request: pytest.FixtureRequest, make_run: Callable[..., Path], tmp_path_factory: Any) -> Both:
    family, keys, model = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    run = make_run(folder / "run", family, keys=keys, model=model)
    # Ends neither at once nor never, so that limits act on some texts and not on others.
    weights = load_file(run / "model.safetensors")
    eos = load(run, "cpu").text_tokenizer.specials.eos
    name = "unembedding.weight" if "unembedding.weight" in weights else "backbone.embedding.weight"
    weights[name][eos] *= 3.0
    save_file(weights, run / "model.safetensors")
    export(load(run, "cpu"), folder / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out", trust_remote_code=False)
    return Both(load(run, "cpu"), remote.InsertlmModel.from_pretrained(folder / "out").eval(), tokenizer)


def test_other_families_write_what_the_package_writes(other: Both, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["other"]
    steps: list[dict[str, Any]] = [{"parallel": 1}, {"parallel": 0}] if kind in ("fill", "both", "llama") else [{}]
    texts = ["___", "The cat ___"] if kind == "arm" else TEXTS
    complete = set()
    for settings in OTHERS.get(kind, FILLS):
        for more in steps:
            for text in texts:
                theirs = other.package.infill(text, samples=3, seed=SEED, **settings, **more)
                for number, expected in enumerate(theirs):
                    found = other.remote.infill(text, other.tokenizer, seed=SEED + number, **settings, **more)
                    assert found == (expected.text, expected.fills, expected.complete), (settings, more, text, number)
                    complete.add(found.complete)
    assert complete == {True, False}


def test_lengths_may_differ_from_blank_to_blank(both: Both) -> None:
    text, least, most = "The ___ sat on ___ mat.", [2, 0], [2, 1]
    [expected] = both.package.infill(text, min_length=least, max_length=most)
    found = both.remote.infill(text, both.tokenizer, min_length=least, max_length=most)
    assert found.fills == expected.fills


@pytest.mark.parametrize(
    ("text", "arguments", "complaint"),
    [
        ("no blank", {}, "no blank"),
        ("a ___", {"temprature": 1}, "unknown setting temprature; expected one of stop_threshold"),
        ("a ___", {"best_of": 2}, "unknown setting best_of"),
        ("a ___", {"order": "random"}, "order: expected one of auto"),
        ("a ___", {"order": "margin", "joint": True}, "expected joint=False"),
        ("a ___", {"top_p": 0.0}, "0 < top_p"),
        ("a ___", {"min_length": 3, "max_length": 2}, "min_length <= max_length"),
        ("a ___", {"min_length": [1, 2]}, "one for each of the 1 blanks"),
        ("a ___", {"min_length": 100}, "the model takes 60"),
        ("a ___", {"min_length": 9, "max_tokens": 5}, "max_tokens: expected at least 9"),
        ("a ______ ___", {}, None),
        ("a ___\\_____ ___", {}, None),
        ("___ ___", {}, None),
        ("a\x00___", {}, "U\\+0000"),
        ("a ___", {"max_steps": 0}, "max_steps >= 1"),
        ("a ___", {"top_k": -1}, "top_k >= 0"),
        ("a ___", {"position_top_k": -1}, "position_top_k >= 0"),
        ("a ___", {"order": "margin", "position_top_k": 0}, "expected joint=False and position_top_k=1"),
        ("a ___", {"temperature": -1.0}, "temperature >= 0"),
        ("a ___", {"top_p": 1.5}, "top_p <= 1"),
        ("a ___", {"stop_threshold": 2}, "stop_threshold <= 1"),
        ("a ___", {"stop_threshold": -1}, "0 <= stop_threshold"),
        ("a ___", {"min_length": -1}, "0 <= min_length"),
        ("a\udcff___", {}, "U\\+DCFF"),
        ("a ___", {"seed": -1}, "0 <= seed"),
        ("a ___", {"seed": 1 << 62}, "seed < 2\\^62"),
    ],
)
def test_mistakes_are_named(both: Both, text: str, arguments: dict[str, Any], complaint: str | None) -> None:
    if complaint is None:  # as the package has it
        try:
            [expected] = both.package.infill(text)
        except InsertlmError as error:
            complaint = str(error)
        else:
            assert both.remote.infill(text, both.tokenizer).text == expected.text
            return
    with pytest.raises(ValueError, match=complaint):
        both.remote.infill(text, both.tokenizer, **arguments)


@given(st.text(st.sampled_from("a_\\ é\n\x01"), min_size=1, max_size=12))
def test_blanks_are_read_as_the_package_reads_them(text: str) -> None:
    def outcome(parse: Callable[[str], list[str]]) -> list[str] | None:
        try:
            pieces = parse(text)
        except (InsertlmError, ValueError):
            return None
        return pieces if len(pieces) > 1 else None

    assert outcome(writing.parse_blanks) == outcome(parse_blanks)


@given(st.integers(0, 1), st.integers(0, 1 << 62), st.integers(0, 1 << 20))
def test_noise_is_that_of_the_package(stream: int, seed: int, number: int) -> None:
    cells = torch.arange(50)
    assert writing.uniform(stream, seed, number, cells).equal(noise.uniform(stream, seed, number, cells))


@pytest.mark.parametrize("head_dim", [8, 64, 96])
def test_positions_turn_what_they_turn_in_the_package(head_dim: int) -> None:
    """Of large heads only a part."""
    qkv = torch.randn(5, 6, head_dim, generator=torch.Generator().manual_seed(0))
    config = ModelConfig(layers=1, width=2 * head_dim, heads=2, hidden=1, max_length=5)
    expected, *_ = rotate(qkv, 2, *rotations(config), torch.arange(5))
    theirs = remote.InsertlmConfig(hidden_size=2 * head_dim, num_attention_heads=2)
    found = remote._rotate(qkv[None, :, :2].transpose(1, 2), *remote._rotations(torch.arange(5), theirs, qkv))
    torch.testing.assert_close(found[0].transpose(0, 1), expected)


class Spelling(NamedTuple):
    """A tokenizer that only decodes."""

    pieces: list[str]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_what_may_begin_a_word_depends_on_the_tokenizer() -> None:
    """Words, else spaces, else anything; a model may meet several tokenizers."""
    model = remote.InsertlmModel(remote.InsertlmConfig(vocab_size=5, reserved=[0]))
    for pieces, heads in [
        ([" <bos>", " a", "b", " ", " c"], [True, False, False, True]),
        ([" <bos>", "a", "b", " ", "c"], [False, False, True, False]),
        ([" <bos>", "a", "b", "c", "d"], [True] * 4),
    ]:
        assert model._first_words(Spelling(pieces)).tolist() == heads


def test_one_space_is_hidden_and_no_more(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.remote, "_heads", None)
    monkeypatch.setattr(both.tokenizer, "decode", lambda ids, **_: "  sat")
    assert both.remote.infill("The cat ___.", both.tokenizer)[:2] == ("The cat  sat.", [" sat"])


def test_the_tokenizer_is_that_of_the_package(both: Both) -> None:
    for text in ("The cats sat.", "<bos> and [CLS]", "Ünïcode 猫\n\n  spaces"):
        ids = both.package.text_tokenizer.encode(text)
        assert both.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
        written = [i for i in ids if i in both.package.text_tokenizer.writable]
        assert both.tokenizer.decode(written) == both.package.decode(written)
    specials = both.package.text_tokenizer.specials
    assert both.tokenizer.cls_token_id == specials.stop
    assert both.remote.config.bos_token_id == specials.bos


def test_it_can_be_saved_again(both: Both, tmp_path: Path) -> None:
    both.remote.save_pretrained(tmp_path / "again")
    again = remote.InsertlmModel.from_pretrained(tmp_path / "again")
    assert again.infill(TEXTS[0], both.tokenizer) == both.remote.infill(TEXTS[0], both.tokenizer)


def test_half_precision_works(exported: Path, both: Both) -> None:
    half = remote.InsertlmModel.from_pretrained(exported, dtype=torch.bfloat16)
    assert half.infill(TEXTS[0], both.tokenizer, seed=1, temperature=1.0).text.startswith("The cat ")
