"""The filler without its sight or its positions. Without both it is a left-to-right model with fill-in-the-middle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from dense_filler import WORDS, blanks_at, examples, filler, noise_for, order_of, reference
from filled_texts import BOUNDED, IN_STEP, PROMPTS, SAMPLED, assert_exact, laid_of, summary, with_ends

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Noise
from insertlm.families.corruption.blanks import MOST
from insertlm.families.corruption.laid_out import Laid, lay_out
from insertlm.families.fill import FillConfig, Filler
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory

PLAIN = FillConfig(positions="plain", hints=0.0, in_step=0.0)
CAUSAL = FillConfig(sight="before", hints=0.0)
RIVAL = FillConfig(sight="before", positions="plain", learn="all", hints=0.0, in_step=0.0, everything=0.5)
GAPS = [(0, 1), (3, 3), (5, 7)]
BOS, BLANK, FILL, END = (getattr(WORDS.specials, name) for name in ("bos", "mask", "stop", "eos"))
UNHINTED = [replace(prompt, words={}) for prompt in PROMPTS]

VARIANTS = pytest.mark.parametrize("config", [PLAIN, CAUSAL, RIVAL], ids=["plain", "causal", "rival"])


def laid(model: Filler, *gaps: tuple[int, int], all_rows: bool = False) -> Laid:
    """The text 0, 1, … 6"""
    rows = model.rows(examples(1))
    rows = replace(rows, target=torch.arange(7)[None], target_length=torch.tensor([7]))
    return lay_out(rows, blanks_at(7, *gaps), noise_for(1), model.layout, all_rows=all_rows)


# --- What a row is


def test_numbers_tell_the_place_of_a_fill() -> None:
    model = filler(PLAIN)
    first = model.layout.marks
    assert first is not None and len(model.backbone.embedding.weight) == first + MOST
    one, two, three = range(first, first + 3)
    x = laid(model, *GAPS)
    assert x.tokens.tolist() == [BOS, one, 1, 2, two, 3, 4, three, one, 0, two, three, 5, 6]
    assert x.positions.tolist() == [*range(14)]
    assert x.words.tolist() == [0, END, END, 5, 6, END]
    assert order_of(x).tolist() == order_of(laid(filler(), *GAPS)).tolist()


def test_a_row_of_the_rival_is_one_text_from_left_to_right() -> None:
    model = filler(RIVAL)
    x = laid(model, *GAPS, all_rows=True)
    assert x.order is None
    fed, learnt = x.tokens[x.rows].tolist(), x.words.tolist()
    numbers = range(model.layout.marks or 0, 9999)
    given = [(numbers[0], 1), (1, 2), (numbers[1], 3), (3, 4)]  # neither <bos> nor 2 nor 4 learns that a blank comes
    fills = [(numbers[0], 0), (0, END), (numbers[1], END), (numbers[2], 5), (5, 6), (6, END)]
    assert list(zip(fed, learnt, strict=True)) == given + fills
    plain = laid(model, (0, 7), all_rows=True)
    assert plain.words.tolist() == [*range(7), END]
    late = laid(model, (6, 6), all_rows=True)
    assert list(zip(late.tokens[late.rows].tolist(), late.words.tolist(), strict=True)) == [
        (BOS, 0), *zip(range(5), range(1, 6), strict=True), (numbers[0], 6), (numbers[0], END),
    ]  # fmt: skip


@pytest.mark.parametrize("config", [CAUSAL, RIVAL], ids=["causal", "rival"])
def test_given_rows_see_nothing_behind_them(config: FillConfig) -> None:
    """A change reaches all rows from its own on, and none before."""
    model = filler(config)
    x = laid(model, (2, 4), (5, 6))
    every = replace(x, rows=torch.arange(len(x.tokens)))
    before = model.hidden(every, keys=None)
    for place in range(len(x.tokens)):
        tokens = x.tokens.clone()
        tokens[place] = (tokens[place] + 1) % 10
        after = model.hidden(replace(every, tokens=tokens), keys=None)
        same = torch.isclose(before, after, atol=1e-6).all(1).tolist()
        assert same == [row < place for row in range(len(x.tokens))]


def test_the_sight_is_all_that_a_causal_filler_lacks() -> None:
    both, causal = (laid(filler(config), *GAPS) for config in (FillConfig(), CAUSAL))
    for name in ("tokens", "positions", "rows", "words", "real"):
        assert getattr(both, name).tolist() == getattr(causal, name).tolist()


# --- What is learnt


@VARIANTS
def test_the_loss_is_the_mean_over_all_that_is_predicted(config: FillConfig) -> None:
    model, some = filler(config).double(), examples()
    rows, noise = model.rows(some), noise_for(len(some))
    with torch.no_grad():
        losses = model.losses(rows, noise)
        each = []
        for row in range(len(some)):
            one = torch.tensor([row])
            x = model.corrupted(rows.select(one), Noise(noise.seed, noise.example[one], noise.epoch[one]))
            each.append(dense(model, x) if config == RIVAL else reference(model, x))
    assert losses.total.item() == pytest.approx(torch.cat(each).mean().item(), rel=1e-9)
    capacity = 128 * (1 + int(model.visible(rows, noise).sum()) // 128)
    assert model.losses(rows, noise, capacity).total.item() == pytest.approx(losses.total.item(), rel=1e-9)


def dense(model: Filler, x: Laid) -> torch.Tensor:
    """−log P of what follows each row that predicts, by torch's own causal attention."""

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    hidden = model.backbone(x.tokens, torch.arange(len(x.tokens)), attention)
    return F.cross_entropy(model.unembedding(hidden[x.rows]), x.words, reduction="none")


def test_half_of_the_rivals_examples_are_plain_texts() -> None:
    model, some = filler(RIVAL), examples(400)
    rows = model.rows(some)
    x = model.corrupted(rows, noise_for(400))
    first = model.layout.marks
    assert first is not None
    second, third = (x.tokens[x.packing.starts + place] == first for place in (1, 2))
    long = rows.target_length > 2  # of which a blank leaves something
    assert (second & third)[long].float().mean().item() == pytest.approx(0.5, abs=0.08)


# --- What is written


@VARIANTS
def test_what_is_written_has_the_probability_that_learning_gives_it(config: FillConfig) -> None:
    """The cache is exact, also behind blanks that were cut back."""
    model = with_ends(filler(config, seed=4), 1.5)
    written = model.decode(UNHINTED, SAMPLED)
    assert all(text.complete for text in written) and any(len(text.events) > 6 for text in written)
    for prompt, text in zip(UNHINTED, written, strict=True):
        assert_exact(model, prompt, text)
    some = [replace(prompt, seed=seed) for prompt in BOUNDED for seed in range(4)]
    short = model.decode(some, msgspec.structs.replace(SAMPLED, max_tokens=9))
    assert any(not text.complete for text in short)
    for prompt, text in zip(some, short, strict=True):
        assert_exact(model, prompt, text)


def test_a_causal_filler_writes_in_step() -> None:
    model = with_ends(filler(CAUSAL, seed=4), 1.5)
    for prompt, text in zip(UNHINTED, model.decode(UNHINTED, IN_STEP), strict=True):
        assert_exact(model, prompt, text, in_step=True)


def test_the_rivals_likelihoods_are_those_of_one_causal_pass() -> None:
    model = with_ends(filler(RIVAL, seed=4), 1.5)
    completions = [
        Completion(Prompt([], start=[4, 5, 6], open=frozenset({0, 2, 3})), [[1, 2], [], [3]]),
        Completion.behind([], [1, 2, 3]),
    ]
    for completion, found in zip(completions, model.decisions(completions), strict=True):
        ranks = [rank for begin, end in completion.ranges for rank in range(begin, end)]
        events = [Insertion(0, rank, completion.text[rank], 0.0, None) for rank in ranks]
        written = Trajectory([], list(completion.prompt.start), events, None)
        x = laid_of(model, completion.prompt, written)
        expected = -reference(model, x, writing=True).detach()
        values = [value for each in found for value in (*each.tokens.tolist(), each.ends[-1].item())]
        torch.testing.assert_close(torch.tensor(values), expected.float(), rtol=1e-5, atol=1e-5)


def test_texts_join_and_leave_a_running_batch() -> None:
    model, found = with_ends(filler(RIVAL, seed=4), 1.5), dict[int, Trajectory]()
    scheduler, prompts, keys = Scheduler(model, 3, watched=True), [*UNHINTED, *BOUNDED], list[int]()
    for prompt in prompts:
        keys += scheduler.submit([prompt], SAMPLED)
        found.update({each.key: each.ended for each in scheduler.advance() if each.ended is not None})
    while len(scheduler):
        found.update({each.key: each.ended for each in scheduler.advance() if each.ended is not None})
    assert summary([found[key] for key in keys]) == summary([model.decode([prompt], SAMPLED)[0] for prompt in prompts])


# --- What cannot be


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"positions": "plain", "in_step": 0.0}, "expected hints: 0 and in_step: 0"),
        ({"positions": "plain", "hints": 0.0}, "expected hints: 0 and in_step: 0"),
        ({"learn": "all"}, "expected sight: before"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        FillConfig(**keys)


def test_without_positions_nothing_is_written_in_step() -> None:
    model = filler(PLAIN)
    assert not model.abilities.parallel and not model.abilities.takes_hints
    with pytest.raises(InsertlmError, match=r"decode\.parallel"):
        model.decode([PROMPTS[0]], DecodeConfig(parallel=0))
