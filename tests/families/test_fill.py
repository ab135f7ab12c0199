"""The filler's layout, its mask, and what it learns."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from dense_filler import WORDS, blanks_at, examples, filler, noise_for, order_of, reference

from insertlm.families.base import Noise, Rows
from insertlm.families.corruption.blanks import MOST
from insertlm.families.corruption.laid_out import HINTS, Laid, Layout, hint_of, lay_out
from insertlm.families.fill import FillConfig

BOS, BLANK, FILL, END, HINT = 99, -1, -2, -9, 200


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


def changed(config: FillConfig, **changes: float) -> FillConfig:
    return msgspec.structs.replace(config, **changes)


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
    after, together = order_of(laid(*gaps)).tolist(), order_of(laid(*gaps, in_step=True)).tolist()
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
        texts = torch.split(order_of(x), x.packing.lengths.tolist())
        fills = [order[order > 0].tolist() for order in texts]
        several = [order for order in fills if order.count(1) > 1 or order != sorted(order)]
        assert bool(several) == bool(in_step)


def test_what_is_written_on_begins_with_a_token_of_its_own() -> None:
    some = examples(50)
    for config, expected in ((FillConfig(suffix=1.0, everything=0.0), "onward"), (FillConfig(suffix=0.0), "fill")):
        model = filler(changed(config, hints=0.0, in_step=1.0))
        x = model.corrupted(model.rows(some), noise_for(50))
        openings = x.tokens[x.rows][order_of(x)[x.rows] == 1]
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
