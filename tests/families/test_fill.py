"""The filler's layout, its mask, and what it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.blanks import MOST, Blanks
from insertlm.families.corruption.laid_out import HINTS, Laid, Layout, hint_of, lay_out
from insertlm.families.fill import FillConfig, Filler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer

BOS, BLANK, FILL, END, HINT = 99, -1, -2, -9, 200
WORDS = WordTokenizer((*"abcdefghij", ".", ","))
MODEL = ModelConfig(layers=2, width=32, heads=2, hidden=64)


def blanks_at(width: int, *gaps: tuple[int, int]) -> Blanks:
    spare = [(width, width)] * (MOST - len(gaps))
    begin, end = (torch.tensor([list(edge)]) for edge in zip(*gaps, *spare, strict=True))
    return Blanks(torch.tensor([len(gaps)]), begin, end, torch.tensor([False]))


def laid(
    *gaps: tuple[int, int],
    prefix: tuple[int, ...] = (),
    length: int = 7,
    padding: int = 0,
    words: tuple[int | None, ...] = (),
    in_step: bool = False,
) -> Laid:
    """A text 10, 11, … with these gaps. words: the hint of each"""
    given, target = torch.tensor([[*prefix, BOS]]), torch.arange(10, 10 + length)[None]
    rows = Rows(given, torch.tensor([given.shape[1]]), F.pad(target, (0, padding)), torch.tensor([length]))
    nobody = Noise(1, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    layout = Layout(100, BLANK, FILL, END, HINT, HINT + len(HINTS))
    openings = [layout.opening(number) for number in (*words, *[None] * (MOST - len(words)))]
    together, blanks = torch.tensor([in_step]), blanks_at(length, *gaps)
    return lay_out(rows, blanks, nobody, layout, openings=torch.tensor([openings]), in_step=together)


def filler(config: FillConfig | None = None, seed: int = 0) -> Filler:
    torch.manual_seed(seed)
    return (config or FillConfig()).build(MODEL, WORDS)


def changed(config: FillConfig, **changes: float) -> FillConfig:
    return msgspec.structs.replace(config, **changes)


def examples(count: int = 24, longest: int = 17) -> Examples:
    draw = np.random.default_rng(3)
    length = draw.integers(1, longest + 1, count).astype(np.int32)
    target = draw.integers(0, len(WORDS.words), (count, longest), dtype=np.int32)
    return Examples(np.zeros((count, 0), np.int32), np.zeros(count, np.int32), target, length)


def noise_for(count: int, epoch: int = 0) -> Noise:
    return Noise(1, torch.arange(count), torch.full((count,), epoch))


# --- Layout


@pytest.mark.parametrize(
    ("gaps", "tokens", "positions", "predicted"),
    [
        ([(2, 4)], [BOS, 10, 11, BLANK, 14, 15, 16, FILL, 12, 13], [0, 1, 2, 3, 104, 105, 106, 3, 4, 5], [12, 13, END]),
        (
            [(0, 1), (3, 3), (5, 7)],
            [BOS, BLANK, 11, 12, BLANK, 13, 14, BLANK, FILL, 10, FILL, FILL, 15, 16],
            [0, 1, 102, 103, 104, 205, 206, 207, 1, 2, 104, 207, 208, 209],
            [10, END, END, 15, 16, END],
        ),
        ([(0, 7)], [BOS, BLANK, FILL, *range(10, 17)], [0, 1, *range(1, 9)], [*range(10, 17), END]),
        ([(7, 7)], [BOS, *range(10, 17), BLANK, FILL], [*range(9), 8], [END]),
    ],
    ids=["one", "at the start, empty, at the end", "everything", "nothing is missing at the end"],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows(
    gaps: list[tuple[int, int]], tokens: list[int], positions: list[int], predicted: list[int], padding: int
) -> None:
    x = laid(*gaps, padding=padding)
    assert x.tokens.tolist() == tokens
    assert x.positions.tolist() == positions
    assert x.words.tolist() == predicted
    start = tokens.index(FILL)
    assert x.rows.tolist() == [*range(start, len(tokens))]


def test_one_blank_is_written_after_the_other_or_a_token_in_each_at_a_time() -> None:
    gaps = [(0, 1), (3, 3), (5, 7)]
    given = [0] * 8
    after, together = laid(*gaps).order.tolist(), laid(*gaps, in_step=True).order.tolist()
    assert after == sorted(after)
    assert after[:8] == given
    assert len({*after[8:]}) == 6
    assert together == [*given, 1, 2, 1, 1, 2, 3]  # <fill> 10, <fill>, <fill> 15 16


def test_a_fill_with_a_hint_begins_with_the_token_of_its_number() -> None:
    x = laid((0, 1), (3, 3), (5, 7), words=(1, None, 11))
    assert x.tokens[x.rows].tolist() == [HINT + 1, 10, FILL, HINT + 10, 15, 16]
    assert [HINTS[number] for number in hint_of(torch.tensor([0, 1, 10, 11, 12, 500])).tolist()] == [
        0,
        1,
        10,
        10,
        12,
        192,
    ]


def test_hints_count_the_words_of_each_gap() -> None:
    """Marks and the rest of a word are none."""
    model = filler()
    text = torch.tensor([WORDS.encode("a b , c . d")])
    blanks = blanks_at(6, (0, 3), (3, 5), (6, 6))
    assert blanks.words(text, model.traits).tolist()[0][:3] == [2, 1, 0]


def test_a_share_of_blanks_has_hints_and_a_share_of_examples_is_written_in_step() -> None:
    some = examples(400)
    for hints, in_step in ((0.0, 0.0), (1.0, 1.0), (0.5, 0.5)):
        model = filler(FillConfig(hints=hints, in_step=in_step))
        x = model.corrupted(model.rows(some), noise_for(400))
        first = x.tokens[x.rows]
        hinted = (first >= WORDS.size) & (first < model.layout.onward)
        opened = (first >= WORDS.size) | (first == model.specials.stop)
        assert (hinted.sum() / opened.sum()).item() == pytest.approx(hints, abs=0.06)
        texts = torch.split(x.order, x.packing.lengths.tolist())
        fills = [order[order > 0].tolist() for order in texts]
        several = [order for order in fills if order.count(1) > 1 or order != sorted(order)]
        assert bool(several) == bool(in_step)


def test_what_is_written_on_begins_with_a_token_of_its_own() -> None:
    some = examples(50)
    for config, expected in ((FillConfig(suffix=1.0, everything=0.0), "onward"), (FillConfig(suffix=0.0), "fill")):
        model = filler(changed(config, hints=0.0, in_step=1.0))
        x = model.corrupted(model.rows(some), noise_for(50))
        openings = x.tokens[x.rows][x.order[x.rows] == 1]
        assert len(openings) >= 50
        assert bool((openings == getattr(model.layout, expected)).all())


def test_a_prefix_comes_first() -> None:
    x = laid((1, 2), prefix=(5, 6), length=3)
    assert x.tokens.tolist() == [5, 6, BOS, 10, BLANK, 12, FILL, 11]
    assert x.positions.tolist() == [0, 1, 2, 3, 4, 105, 4, 5]


def test_the_trainer_knows_how_many_rows_there_will_be() -> None:
    model, some = filler(), examples()
    rows, noise = model.rows(some), noise_for(len(some))
    visible = model.visible(rows, noise)
    for row in range(len(some)):
        one = torch.tensor([row])
        part = Noise(noise.seed, noise.example[one], noise.epoch[one])
        x = model.corrupted(rows.select(one), part)
        assert x.packing.total == visible[row]


# --- Loss


class _Dense:
    """Every row's mask written out, in float64."""

    def __init__(self, sees: Tensor) -> None:
        self.sees = sees

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~self.sees, -torch.inf).softmax(-1), v)


def reference(model: Filler, x: Laid, *, writing: bool = False) -> Tensor:
    """−log P of every prediction of one example, with nothing packed or cached. [P]

    writing: special tokens but <eos> are not in play
    """
    fills = torch.isin(torch.arange(len(x.tokens)), x.rows)
    row = torch.arange(len(x.tokens))
    starts = (x.tokens >= WORDS.size) | (x.tokens == model.specials.stop)
    age = row - torch.where(fills & starts, row, 0).cummax(0).values  # of a row in its fill
    together = bool((x.order[fills & starts] == 1).all())
    earlier = age[None] <= age[:, None] if together else row[None] <= row[:, None]
    sees = ~fills[None] | (fills[:, None] & earlier)
    hidden = model.backbone(x.tokens, x.positions, _Dense(sees))
    logits = model.unembedding(hidden[x.rows])
    if writing:
        out = torch.ones(logits.shape[1], dtype=torch.bool)
        out[[*WORDS.writable, WORDS.specials.eos]] = False
        logits = logits.masked_fill(out, -torch.inf)
    return F.cross_entropy(logits, x.words, reduction="none")


def test_the_loss_is_the_mean_over_all_that_is_predicted() -> None:
    model, some = filler().double(), examples()
    rows, noise = model.rows(some), noise_for(len(some))
    with torch.no_grad():
        losses = model.losses(rows, noise)
        each, words = [], []
        for row in range(len(some)):
            one = torch.tensor([row])
            x = model.corrupted(rows.select(one), Noise(noise.seed, noise.example[one], noise.epoch[one]))
            each.append(reference(model, x))
            words.append(x.words)
    surprise, ends = torch.cat(each), torch.cat(words) == WORDS.specials.eos
    assert losses.total.item() == pytest.approx(surprise.mean().item(), rel=1e-9)
    assert losses.parts["end_loss"].item() == pytest.approx(surprise[ends].mean().item(), rel=1e-9)
    assert losses.parts["token_loss"].item() == pytest.approx(surprise[~ends].mean().item(), rel=1e-9)
    assert losses.over is not None
    assert losses.over["loss"].item() == len(surprise)


@pytest.mark.parametrize("count", [24, 300])
def test_a_static_buffer_changes_nothing(count: int) -> None:
    """Nor does it that of many texts only half of the rows may predict."""
    model, some = filler(), examples(count)
    rows, noise = model.rows(some), noise_for(len(some))
    capacity = -(-int(model.visible(rows, noise).sum()) // 128) * 128
    exact, padded = model.losses(rows, noise), model.losses(rows, noise, capacity)
    torch.testing.assert_close(exact.total, padded.total)
    exact.total.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    padded.total.backward()  # type: ignore[no-untyped-call]
    again = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(gradients, again)


def test_given_rows_see_both_sides_and_no_fill() -> None:
    """What a fill says changes no row that came before it."""
    model = filler()
    rows, noise = model.rows(examples(1)), noise_for(1)
    x = lay_out(rows, blanks_at(rows.target.shape[1], (2, 4)), noise, model.layout)
    before = model.hidden(x, keys=None)
    changed = x.tokens.clone()
    changed[x.rows[1]] = (changed[x.rows[1]] + 1) % 10
    after = model.hidden(Laid(**{**vars(x), "tokens": changed}), keys=None)
    same = torch.isclose(before, after, atol=1e-6).all(1).tolist()
    assert same == [True, False, False]
    changed = x.tokens.clone()
    changed[x.rows[0] - 1] = (changed[x.rows[0] - 1] + 1) % 10  # the last given token, behind the blank
    after = model.hidden(Laid(**{**vars(x), "tokens": changed}), keys=None)
    assert not torch.isclose(before, after, atol=1e-6).all(1).any()


# --- Writing


def blanks_of(prompt: Prompt, written: Trajectory) -> Blanks:
    """Where the gaps of a prompt are in the text that was written."""
    order, edges = written.order, list[tuple[int, int]]()
    given = [place for place, event in enumerate(order) if event < 0]
    for gap in sorted(prompt.gaps):
        begin = given[gap - 1] + 1 if gap else 0
        end = given[gap] if gap < len(given) else len(order)
        edges.append((begin, end))
    return blanks_at(len(order), *edges)


PROMPTS = [
    Prompt([], 5, [0, 1, 2, 3], frozenset({2})),
    Prompt([], 6, [4, 5], frozenset({0, 1, 2})),
    Prompt([], 7),
    Prompt([], 8, [3, 3, 1], frozenset({3}), {3: Bounds(2, 4)}),
    Prompt([], 9, [3, 1, 1], frozenset({0, 3}), {0: Bounds(1, 2), 3: Bounds(0, 0)}),
]
SAMPLED = DecodeConfig(temperature=1.0, max_steps=40)


@pytest.mark.parametrize("settings", [SAMPLED, DecodeConfig(temperature=0.4, top_p=0.9, max_steps=80)])
def test_what_is_written_has_the_probability_that_learning_gives_it(settings: DecodeConfig) -> None:
    """The cache is exact: every token's probability is that of one pass over the finished row."""
    model = filler(seed=4).eval()
    written = model.decode(PROMPTS, settings)
    assert all(text.complete for text in written)
    assert any(len(text.events) > 3 for text in written)
    for prompt, text in zip(PROMPTS, written, strict=True):
        ids = torch.tensor([text.ids], dtype=torch.int64).view(1, -1)
        rows = Rows(torch.tensor([[model.specials.bos]]), torch.tensor([1]), ids, torch.tensor([ids.shape[1]]))
        x = lay_out(rows, blanks_of(prompt, text), noise_for(1), model.layout)
        expected = -reference(model, x, writing=True)[x.words != model.specials.eos]
        order = sorted(text.events, key=lambda event: (event.step, event.rank))
        found = torch.tensor([event.log_probability for event in order])
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_text_is_that_of_a_lone_request() -> None:
    model = filler(seed=4).eval()
    together = model.decode(PROMPTS, SAMPLED)
    alone = [model.decode([prompt], SAMPLED)[0] for prompt in PROMPTS]
    assert [text.ids for text in together] == [text.ids for text in alone]


def test_bounds_are_kept_and_given_tokens_stay() -> None:
    model = filler(seed=4).eval()
    for seed in range(30):
        prompt = replace(PROMPTS[3], seed=seed)
        [text] = model.decode([prompt], SAMPLED)
        assert 2 <= len(text.events) <= 4
        assert text.ids[:3] == prompt.start


def test_ends_are_drawn_as_often_as_they_are_likely() -> None:
    """Whatever the temperature of words is."""
    model = filler(seed=4).eval()
    prompts = [Prompt([], seed, [0, 1], frozenset({1})) for seed in range(600)]
    for temperature in (1.0, 0.3):
        written = model.decode(prompts, msgspec.structs.replace(SAMPLED, temperature=temperature, max_steps=200))
        rows = Rows(torch.tensor([[model.specials.bos]]), torch.tensor([1]), torch.tensor([[0, 1]]), torch.tensor([2]))
        end = (
            (-reference(model, lay_out(rows, blanks_at(2, (1, 1)), noise_for(1), model.layout), writing=True)[0])
            .exp()
            .item()
        )
        empty = sum(not text.events for text in written) / len(written)
        assert empty == pytest.approx(end, abs=3.5 * math.sqrt(end * (1 - end) / len(written)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt([], 0, [0, 1, 2, 3, 4, 5]), "a filler has learnt texts with up to 6 blanks; got 7"),
        (Prompt([], 0, [0], frozenset({1}), required=((2,),)), "kept from writing single tokens; a word is required"),
        (Prompt([], 0, [0], frozenset({1}), banned=((2, 3),)), "kept from writing single tokens"),
    ],
    ids=["too many blanks", "a required word", "a banned word of two tokens"],
)
def test_what_it_cannot_do_is_refused(prompt: Prompt, message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        filler().decode([prompt], SAMPLED)


def test_a_banned_word_is_never_written() -> None:
    model = filler(seed=4).eval()
    banned = [replace(prompt, banned=((9,), (0,))) for prompt in PROMPTS]
    for text in model.decode(banned, SAMPLED):
        assert not {0, 9} & {event.token for event in text.events}
