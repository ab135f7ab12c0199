"""A filler at work: exact whatever is cached, as if alone whoever is beside it, and true to what a prompt demands."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from dense_filler import WORDS, filler
from filled_texts import (
    BOUNDED,
    IN_STEP,
    PROMPTS,
    SAMPLED,
    assert_exact,
    fills_of,
    laid_of,
    summary,
    surprise_of,
    with_ends,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.families import filling, fills
from insertlm.families.corruption.blanks import MOST
from insertlm.families.fill import FillConfig, Filler
from insertlm.families.filling import FillWriter
from insertlm.families.ilm import IlmConfig
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.score import Completion
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.nn import attention
from insertlm.nn.eight_bits import round_linears, supported
from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import Block

HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], deadline=None)  # shrinking would take minutes
LAST = len(WORDS.words) - 1
MODEL = with_ends(filler(seed=4), 1.5)
UNHINTED = with_ends(filler(FillConfig(hints=0.0), seed=4), 1.5)


# --- Exactness


@pytest.mark.parametrize(
    "way",
    [SAMPLED, msgspec.structs.replace(SAMPLED, temperature=0.4, top_p=0.9), IN_STEP],
    ids=["", "cooler", "in step"],
)
@pytest.mark.parametrize("seed", [0, 100])
def test_what_is_written_has_the_probability_that_learning_gives_it(way: DecodeConfig, seed: int) -> None:
    """The cache is exact: every token's probability is that of one pass over the finished row."""
    prompts = [replace(prompt, seed=prompt.seed + seed) for prompt in PROMPTS]
    written = MODEL.decode(prompts, way)
    assert all(text.complete for text in written)
    assert any(len(text.events) > 6 for text in written)
    for prompt, text in zip(prompts, written, strict=True):
        assert_exact(MODEL, prompt, text, in_step=way.parallel == 0)


@pytest.mark.skipif(not supported(), reason="this torch has no such kernel for this CPU")
@pytest.mark.parametrize("way", [SAMPLED, IN_STEP], ids=["", "in step"])
def test_in_eight_bits_probabilities_are_nearly_those_of_the_weights(way: DecodeConfig) -> None:
    rounded = with_ends(filler(seed=4), 1.5)
    round_linears(rounded.backbone.blocks)
    written = rounded.decode(PROMPTS, way)
    assert all(text.complete for text in written)
    for prompt, text in zip(PROMPTS, written, strict=True):
        tokens, ends = surprise_of(MODEL, prompt, text, in_step=way.parallel == 0)
        found = torch.tensor([text.events[event].log_probability for event in text.order if event >= 0])
        torch.testing.assert_close(found, -tokens.float(), rtol=0.02, atol=0.05)
        assert text.stop_probability == pytest.approx((-ends.sum()).exp().item(), rel=0.1)
        if way.parallel:  # one pass over the finished row, of more rows at once than a step has
            [decided] = rounded.decisions([Completion(prompt, fills_of(prompt, text))])
            together = torch.cat([each.tokens for each in decided] or [torch.empty(0)]).float()
            torch.testing.assert_close(together, found, rtol=0.02, atol=0.05)


def test_rows_that_were_cut_back_are_forgotten() -> None:
    """What is written after them, in this blank or another, has the probability it has without them."""
    some, short = [replace(prompt, seed=seed) for prompt in BOUNDED for seed in range(8)], {"max_tokens": 9}
    for changes in ({}, short, {"max_steps": 15}):
        written = UNHINTED.decode(some, msgspec.structs.replace(SAMPLED, **changes))
        assert any(not text.complete for text in written)
        for prompt, text in zip(some, written, strict=True):
            assert_exact(UNHINTED, prompt, text)


@pytest.mark.parametrize("way", [SAMPLED, IN_STEP], ids=["", "in step"])
def test_a_cache_grows_when_its_room_is_used_up(monkeypatch: pytest.MonkeyPatch, way: DecodeConfig) -> None:
    expected = [text.events for text in MODEL.decode(PROMPTS, way)]
    assert max(map(len, expected)) > 2 * MOST
    for module in (attention, filling):
        monkeypatch.setattr(module, "ROOM", 2)
    assert [text.events for text in MODEL.decode(PROMPTS, way)] == expected


def test_in_step_rows_that_were_cut_back_leave_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the end it holds the rows of the finished text and no others. (Keys of the first layer depend on nothing but a
    row's token and position.)"""
    writers, read = list[FillWriter](), FillWriter._read

    def recorded(writer: FillWriter, prompts: list[Prompt]) -> Any:
        writers.append(writer)
        return read(writer, prompts)

    monkeypatch.setattr(FillWriter, "_read", recorded)
    backbone, limited = UNHINTED.backbone, 0
    block = next(block for block in backbone.modules() if isinstance(block, Block))
    for seed in range(20):
        prompt = Prompt([], seed, [1, 2], frozenset({0, 1, 2}), {0: Bounds(0, 3), 1: Bounds(0, 5), 2: Bounds(9)})
        [text] = UNHINTED.decode([prompt], IN_STEP)
        x = laid_of(UNHINTED, prompt, text)
        with torch.no_grad():
            rotation = backbone.cos, backbone.sin, x.positions
            expected = block.project(backbone.embedding(x.tokens), rotation, None)[1].flatten(1)
        writers[-1]._forget()  # what ended in the last step
        cache = writers[-1].cache
        found = cache.layers[0][0][0, : int(cache.length)].flatten(1)
        assert len(found) == len(expected)
        order = torch.cdist(expected, found).argmin(1)
        assert len({*order.tolist()}) == len(found)
        torch.testing.assert_close(found[order], expected, rtol=1e-5, atol=1e-5)
        limited += text.limit == "blanks"
    assert limited > 3


def test_in_step_every_open_blank_gets_a_token_a_step() -> None:
    prompts = [replace(PROMPTS[3], seed=seed) for seed in range(30)]
    for prompt, text in zip(prompts, MODEL.decode(prompts, IN_STEP), strict=True):
        sizes = [len(fill) for fill in fills_of(prompt, text)]
        expected = [sum(size > step for size in sizes) for step in range(max(sizes))]
        assert [len(events) for events in text.steps] == expected


def test_each_row_is_computed_once() -> None:
    """What is given and the first opening together, then a row for each token and each further opening."""
    sizes, prompt = list[int](), PROMPTS[3]
    handle = MODEL.backbone.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    try:
        [text] = MODEL.decode([prompt], SAMPLED)
        [in_step] = MODEL.decode([prompt], IN_STEP)
    finally:
        handle.remove()
    given = len(prompt.prefix) + 1 + len(prompt.start) + 4
    rows = len(text.events) + 3
    assert sizes[: rows + 1] == [given + 1, *[1] * rows]
    together = sizes[rows + 1 :]
    assert together[0] == given + 4
    assert sum(together) == given + 4 + len(in_step.events)


# --- Company


words = st.integers(0, LAST)
runs = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


def within(part: tuple[int, ...], line: tuple[int, ...]) -> bool:
    return any(line[k : k + len(part)] == part for k in range(len(line) - len(part) + 1))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Few different words, so that runs meet."""
    few = st.integers(0, 4)
    start = draw(st.lists(few, max_size=5))
    gaps = draw(st.frozensets(st.integers(0, len(start)), min_size=1, max_size=MOST))
    bounds = {}
    for gap in draw(st.frozensets(st.sampled_from(sorted(gaps)))):
        least = draw(st.integers(0, 3))
        bounds[gap] = Bounds(least, draw(st.none() | st.integers(least, 6)))
    banned = tuple(draw(st.lists(runs, max_size=4)))
    headed = draw(st.frozensets(st.sampled_from(sorted(gaps))))
    heads = draw(st.frozensets(words.filter(lambda word: (word,) not in banned), min_size=1))
    hints = draw(st.dictionaries(st.sampled_from(sorted(gaps)), st.integers(0, 20), max_size=2))
    prompt = Prompt(draw(st.lists(few, max_size=2)), draw(st.integers(0, 2**40)), start, gaps, bounds, banned)
    prompt = replace(prompt, headed=headed, heads=heads, words=hints)
    mosts = [bounds.get(gap, Bounds()).most for gap in gaps]
    room = 9 if None in mosts else max(most for most in mosts if most is not None)
    possible = runs.filter(lambda run: len(run) <= room and not any(within(other, run) for other in banned))
    return replace(prompt, required=tuple(draw(st.lists(possible, max_size=2)))) if room else prompt


ways = st.builds(
    DecodeConfig,
    stop_threshold=st.sampled_from([0.05, 0.1, 0.5]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.5, 1.0]),
    parallel=st.sampled_from([0, 1]),
    max_steps=st.sampled_from([40, 60, 200]),
    max_tokens=st.sampled_from([None, 16, 30]),
)


@given(st.lists(prompts(), min_size=1, max_size=4), ways, st.randoms(use_true_random=False))
@settings(HEAVY, max_examples=40)
def test_a_text_is_that_of_a_lone_request(batch: list[Prompt], way: DecodeConfig, random: Any) -> None:
    alone = [MODEL.decode([prompt], way)[0] for prompt in batch]
    assert summary(MODEL.decode(batch, way)) == summary(alone)
    order = random.sample(range(len(batch)), len(batch))
    shuffled = MODEL.decode([batch[place] for place in order], way)
    assert summary([shuffled[order.index(place)] for place in range(len(batch))]) == summary(alone)


@given(st.lists(st.tuples(prompts(), ways, st.integers(0, 6)), min_size=2, max_size=5), st.sampled_from([0, 1]))
@settings(HEAVY, max_examples=40)
def test_texts_join_and_leave_a_running_batch(arrivals: list[tuple[Prompt, DecodeConfig, int]], parallel: int) -> None:
    """Whatever their settings are, and however often others come and go."""
    arrivals = [(prompt, msgspec.structs.replace(way, parallel=parallel), wait) for prompt, way, wait in arrivals]
    scheduler, found = Scheduler(MODEL, 8, watched=True), dict[int, Trajectory]()

    def advance() -> None:
        found.update({each.key: each.ended for each in scheduler.advance() if each.ended is not None})

    keys = list[int]()
    for prompt, way, wait in arrivals:
        keys += scheduler.submit([prompt], way)
        for _ in range(wait):
            advance()
    while len(scheduler):
        advance()
    alone = [MODEL.decode([prompt], way)[0] for prompt, way, _ in arrivals]
    assert summary([found[key] for key in keys]) == summary(alone)


def test_all_texts_are_one_batch_and_its_cache_does_not_grow_for_ever() -> None:
    scheduler, sizes = Scheduler(MODEL, 4, watched=True), list[int]()
    for seed in range(40):
        prompt, way = replace(PROMPTS[seed % 5], seed=seed), [SAMPLED, DecodeConfig(max_steps=80)][seed % 2]
        scheduler.submit([replace(prompt, prefix=[1] * (seed % 7))], way)
    while len(scheduler):
        scheduler.advance()
        assert len(scheduler._batches) <= 1
        sizes += [batch.writer.cache.cells for batch in scheduler._batches]  # type: ignore[attr-defined]
    assert max(sizes) < 300 + 40


# --- Constraints


@given(st.lists(prompts(), min_size=1, max_size=3), ways)
@settings(HEAVY, max_examples=150)
def test_rules_are_kept(batch: list[Prompt], way: DecodeConfig) -> None:
    """On a model that has learnt nothing."""
    for prompt, written in zip(batch, MODEL.decode(batch, way), strict=True):
        found = fills_of(prompt, written)
        assert [token for token, event in zip(written.ids, written.order, strict=True) if event < 0] == prompt.start
        assert written.complete or written.limit in ("blanks", "max_tokens", "max_steps")
        assert way.max_tokens is None or len(written.events) <= way.max_tokens
        for gap, fill in zip(sorted(prompt.gaps), found, strict=True):
            least, most = prompt.bounds.get(gap, Bounds())
            # A limit on all tokens that is below what the blanks ask for together ends the text before that.
            bound = written.limit not in ("max_tokens", "max_steps")
            assert (least if bound else 0) <= len(fill) <= (999 if most is None else most)
            begun = any(fill[: len(run)] == run[: len(fill)] for run in prompt.required)
            assert not fill or gap not in prompt.headed or fill[0] in prompt.heads or begun
        for run in prompt.banned:
            assert not any(run == (event.token,) for event in written.events)
        if written.complete:
            assert all(any(within(run, fill) for fill in found) for run in prompt.required)
            assert not any(crossing(run, written) for run in prompt.banned)


def crossing(run: tuple[int, ...], written: Trajectory) -> bool:
    """Whether a banned run is there that was not given as it is."""
    line, order = tuple(written.ids), written.order
    for place in range(len(line) - len(run) + 1):
        if line[place : place + len(run)] == run and any(event >= 0 for event in order[place : place + len(run)]):
            return True
    return False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_run_is_not_completed_across_an_edge(temperature: float) -> None:
    """Neither by a token nor by an end, though each alone is allowed."""
    way = msgspec.structs.replace(SAMPLED, temperature=temperature, stop_threshold=0.05)
    prompt = Prompt([], 0, [1, 2], frozenset({1}), banned=((1, 2), *((1, word) for word in range(2, LAST + 1))))
    for seed in range(20):
        [text] = MODEL.decode([replace(prompt, seed=seed)], way)
        [fill] = fills_of(prompt, text)
        assert text.complete or temperature == 0.0  # which may go round in circles
        assert fill[0] in (0, 1)  # it may not stay empty, and 1 may be followed by 0 and 1 alone
        assert fill[-1] != 1
        assert not any(crossing(run, text) for run in prompt.banned)


def test_required_runs_are_written_in_the_last_blank_that_can_take_them() -> None:
    required = ((5, 6, 7), (8,), (6, 2))
    bounds = {0: Bounds(0, 2), 1: Bounds(0, 2), 2: Bounds(1, 4)}
    prompt = Prompt([], 0, [0, 1], frozenset({0, 1, 2}), bounds, required=required)
    written = MODEL.decode([replace(prompt, seed=seed) for seed in range(30)], SAMPLED)
    for text in written:
        found = fills_of(prompt, text)
        assert all(any(within(run, fill) for fill in found) for run in required)
        assert within((5, 6, 7), found[2])
    assert len({text.ids[0] for text in written}) > 1


def test_what_the_model_began_of_a_required_run_is_not_written_twice() -> None:
    prompt = Prompt(
        [],
        0,
        [0],
        frozenset({1}),
        {1: Bounds(0, 3)},
        required=((5, 5, 6),),
        headed=frozenset({1}),
        heads=frozenset({5}),
    )
    for text in MODEL.decode([replace(prompt, seed=seed) for seed in range(20)], SAMPLED):
        assert fills_of(prompt, text) == [(5, 5, 6)]


# --- Ends and limits


def test_ends_are_drawn_as_often_as_they_are_likely() -> None:
    """Whatever the temperature of words is."""
    model = filler(seed=4).eval()
    some = [Prompt([], seed, [0, 1], frozenset({1})) for seed in range(600)]
    empty = Trajectory([], [0, 1], [], None)
    end = (-surprise_of(model, some[0], empty)[1][0]).exp().item()
    for temperature in (1.0, 0.3):
        written = model.decode(some, msgspec.structs.replace(SAMPLED, temperature=temperature))
        found = sum(not text.events for text in written) / len(written)
        assert found == pytest.approx(end, abs=3.5 * math.sqrt(end * (1 - end) / len(written)))


def chances(model: Filler, prompt: Prompt, fill: tuple[int, ...]) -> list[float]:
    """Of an end behind the first 0, 1, … tokens of a fill of the only blank."""
    [gap] = prompt.gaps
    found = []
    for size in range(len(fill) + 1):
        ids = [*prompt.start[:gap], *fill[:size], *prompt.start[gap:]]
        events = [fills_event(gap + place, token) for place, token in enumerate(fill[:size])]
        written = Trajectory(prompt.prefix, prompt.start, events, None)
        assert written.ids == ids
        found.append((-surprise_of(model, prompt, written)[1][0]).exp().item())
    return found


def fills_event(rank: int, token: int) -> Any:
    from insertlm.inference.trajectory import Insertion

    return Insertion(0, rank, token, 0.0, None)


@pytest.mark.parametrize(
    ("name", "changes"), [("blanks", {}), ("max_tokens", {"max_tokens": 7}), ("max_steps", {"max_steps": 8})]
)
def test_a_fill_that_meets_its_limit_is_cut_back_to_its_likeliest_end(name: str, changes: dict[str, int]) -> None:
    greedy = msgspec.structs.replace(DecodeConfig(stop_threshold=1.0), **changes)
    for first in range(10):
        start, gaps = [first, 1, 2], frozenset({2})
        bounds = {} if changes else {2: Bounds(1, 7)}
        [text] = UNHINTED.decode([Prompt([], 0, start, gaps, bounds)], greedy)
        [whole] = UNHINTED.decode([Prompt([], 0, start, gaps, {2: Bounds(7, 7)})], DecodeConfig(stop_threshold=1.0))
        [fill], [longer] = fills_of(Prompt([], 0, start, gaps), text), fills_of(Prompt([], 0, start, gaps), whole)
        assert len(longer) == 7
        offered = chances(UNHINTED, Prompt([], 0, start, gaps), longer)
        if bounds:
            offered[0] = -1.0
        best = max(range(8), key=offered.__getitem__)
        assert fill == longer[:best]
        assert text.limit == name
        assert text.stop_probability == pytest.approx(offered[best], rel=1e-4)


def test_a_blank_that_ends_by_itself_at_its_most_is_complete() -> None:
    prompt = Prompt([], 0, [0], frozenset({1}), {1: Bounds(2, 2)})
    written = MODEL.decode([replace(prompt, seed=seed) for seed in range(60)], SAMPLED)
    assert {text.limit for text in written} == {None, "blanks"}
    assert all(len(text.events) == 2 for text in written)


def test_a_limit_on_all_tokens_leaves_every_blank_its_least() -> None:
    bounds = {0: Bounds(1), 1: Bounds(3), 2: Bounds(2)}
    prompt = Prompt([], 0, [0, 1], frozenset({0, 1, 2}), bounds)
    for way, seed in itertools.product((SAMPLED, IN_STEP), range(20)):
        [text] = MODEL.decode([replace(prompt, seed=seed)], msgspec.structs.replace(way, max_tokens=8))
        sizes = [len(fill) for fill in fills_of(prompt, text)]
        assert sum(sizes) <= 8
        assert all(size >= bound.least for size, bound in zip(sizes, bounds.values(), strict=True))


def test_a_blank_without_a_fair_end_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attempts that of the likeliest end is kept, wherever it was made."""
    some = [Prompt([], seed, [0, 1], frozenset({1}), {1: Bounds(1, 3)}) for seed in range(40)]

    def decode(fair: float) -> list[Trajectory]:
        monkeypatch.setattr(fills, "FAIR", fair)
        return UNHINTED.decode(some, msgspec.structs.replace(SAMPLED, stop_threshold=1.0))

    once, thrice = decode(0.0), decode(2.0)
    limited = [(a, b) for a, b in zip(once, thrice, strict=True) if not a.complete and not b.complete]
    assert len(limited) > 5
    assert all(a.stop_probability <= b.stop_probability + 1e-6 for a, b in limited)  # type: ignore[operator]
    same = [a.ids == b.ids for a, b in limited]
    assert any(same)
    assert not all(same)
    for prompt, text in zip(some, thrice, strict=True):
        assert_exact(UNHINTED, prompt, text)


def test_a_limited_text_streams_what_cannot_be_cut_back() -> None:
    scheduler = Scheduler(MODEL, 1, watched=True)
    scheduler.submit([Prompt([], 1)], DecodeConfig(stop_threshold=1.0, max_tokens=48))
    sizes = list[int]()
    while len(scheduler):
        sizes += [len(each.events) for each in scheduler.advance() if each.ended is None]
    early = 48 - fills.TAIL
    assert sizes[:early] == [1] * early
    assert sizes[early : early + fills.TAIL] == [0] * fills.TAIL
    assert len(sizes) <= 48 + 1  # what is left of these comes at once


# --- Bad input


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (Prompt([], 0, [0, 1, 2, 3, 4, 5]), {}, "a filler has learnt texts with up to 6 blanks; got 7"),
        (Prompt([], 0, [0] * 2000, frozenset({3})), {}, "needs 2,066 positions; the model has 2,048"),
        (Prompt([], 0, [0], frozenset({1}), words={0: 3}), {}, "a hint for gap 0, which is not open"),
        (Prompt([], 0, [0], frozenset({1}), words={1: -1}), {}, "a hint of -1 words for gap 1; expected 0 or more"),
        (
            Prompt([], 0, [0], frozenset({1})),
            {"parallel": 2},
            r"a token a step \(1\), or one in every open blank \(0\)",
        ),
    ],
    ids=["too many blanks", "no room for jumps", "a hint for what is given", "fewer than no words", "two at a time"],
)
def test_what_it_cannot_do_is_refused(prompt: Prompt, changes: dict[str, int], message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        MODEL.decode([prompt], msgspec.structs.replace(SAMPLED, **changes))


def test_hints_are_for_models_that_have_learnt_them() -> None:
    prompt = Prompt([], 0, [0], frozenset({1}), words={1: 3})
    plain = IlmConfig().build(ModelConfig(layers=1, width=32, heads=2, hidden=64), WORDS)
    for model in (UNHINTED, plain):
        with pytest.raises(InsertlmError, match="has not learnt hints"):
            model.decode([prompt], DecodeConfig())


def test_in_step_is_for_models_that_have_learnt_it() -> None:
    with pytest.raises(InsertlmError, match=r"decode\.parallel: this family writes one token a step, got 0"):
        filler(FillConfig(in_step=0.0)).decode([PROMPTS[0]], IN_STEP)


def test_a_text_grows_as_far_as_there_are_positions() -> None:
    """Behind the last blank; and that is named."""
    torch.manual_seed(0)
    model = FillConfig(jump=8).build(ModelConfig(layers=1, width=32, heads=2, hidden=64, max_length=48), WORDS).eval()
    way, prompt = DecodeConfig(stop_threshold=1.0), Prompt([], 0, [0] * 25, frozenset({1, 25}), {25: Bounds(2)})
    for seed in range(5):
        [text] = model.decode([replace(prompt, seed=seed)], way)
        assert text.limit == "max_length"
        assert len(fills_of(prompt, text)[1]) >= 2
