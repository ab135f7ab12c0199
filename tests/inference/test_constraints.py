"""What a prompt demands is kept, whatever the model would rather do: checked on what was written, not on the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.families.ilm import ILM
from insertlm.inference.constraints import RuledText
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory

TinyIlm = Callable[..., ILM]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
runs = st.lists(words, min_size=1, max_size=3).map(tuple)
LONG = DecodeConfig(max_steps=40, max_length=60)
EAGER, LAZY = msgspec.structs.replace(LONG, stop_threshold=1.0), msgspec.structs.replace(LONG, stop_threshold=0.0)


def room_of(prompt: Prompt, gap: int) -> int:
    most = prompt.bounds.get(gap, Bounds()).most
    return 99 if most is None else most


@st.composite
def prompts(draw: st.DrawFn, shortest: int = 0) -> Prompt:
    prefix, start = draw(st.lists(words, min_size=shortest, max_size=3)), draw(st.lists(words, max_size=4))
    gaps = draw(st.frozensets(st.integers(0, len(start)), min_size=1))
    bounds = {}
    for gap in draw(st.frozensets(st.sampled_from(sorted(gaps)))):
        least = draw(st.integers(0, 3))
        bounds[gap] = Bounds(least, draw(st.none() | st.integers(least, 5)))
    banned = tuple(draw(st.lists(runs, max_size=3)))
    headed = draw(st.frozensets(st.sampled_from(sorted(gaps))))
    heads = draw(st.frozensets(words.filter(lambda word: (word,) not in banned), min_size=1))
    prompt = Prompt(prefix, draw(st.integers(0, 2**40)), start, gaps, bounds, banned, (), headed, heads)
    room = max(room_of(prompt, gap) for gap in gaps)
    possible = runs.filter(lambda run: len(run) <= room and not any(within(other, run) for other in banned))
    return replace(prompt, required=tuple(draw(st.lists(possible, max_size=3)))) if room else prompt


configs = st.builds(
    DecodeConfig,
    stop_threshold=st.sampled_from([0.0, 0.45, 0.5, 0.55, 1.0]),
    joint=st.booleans(),
    position_top_k=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.5]),
    top_k=st.integers(0, 3),
    max_steps=st.integers(1, 20),
    max_length=st.integers(24, 30),
)
batches = st.integers(0, 1).flatmap(lambda shortest: st.lists(prompts(shortest), min_size=1, max_size=4))


def within(part: tuple[int, ...], line: tuple[int, ...]) -> bool:
    return any(line[k : k + len(part)] == part for k in range(len(line) - len(part) + 1))


def fills(prompt: Prompt, written: Trajectory) -> dict[int, tuple[int, ...]]:
    """What went into each gap."""
    found: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(prompt.start) + 1), ())
    gap = 0
    for token, event in zip(written.ids, written.order, strict=True):
        if event < 0:
            gap += 1
        else:
            found[gap] = (*found[gap], token)
    return found


def met(prompt: Prompt, written: Trajectory) -> bool:
    """Whether nothing is owed."""
    found = fills(prompt, written)
    enough = all(len(found[gap]) >= least for gap, (least, _) in prompt.bounds.items())
    return enough and all(any(within(run, fill) for fill in found.values()) for run in prompt.required)


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    for a, b in zip(left, right, strict=True):
        assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
        assert a.complete == b.complete


@given(batches, configs, st.booleans())
@settings(HEAVY, max_examples=80)
def test_rules_are_kept(tiny_ilm: TinyIlm, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool) -> None:
    for prompt, written in zip(batch, tiny_ilm(prefix_lm=prefix_lm).decode(batch, config), strict=True):
        found = fills(prompt, written)
        assert written.start == prompt.start
        for gap, fill in found.items():
            assert not fill or gap in prompt.gaps
            most = prompt.bounds.get(gap, Bounds()).most
            assert most is None or len(fill) <= most
            begun = any(tuple(fill[: len(run)]) == run[: len(fill)] for run in prompt.required)
            assert not fill or gap not in prompt.headed or fill[0] in prompt.heads or begun
        line = [*prompt.start]
        for event in written.events:  # no insertion completes a banned run
            line.insert(event.rank, event.token)
            for run in prompt.banned:
                ends = range(event.rank + 1, event.rank + len(run) + 1)
                assert not any(end >= len(run) and tuple(line[end - len(run) : end]) == run for end in ends)
        assert not written.complete or met(prompt, written)


@given(batches, configs, st.booleans(), st.randoms(use_true_random=False))
@settings(HEAVY, max_examples=20)
def test_a_text_does_not_depend_on_its_batch(
    tiny_ilm: TinyIlm, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool, random: Any
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    free = [Prompt(prompt.prefix, prompt.seed, prompt.start, prompt.open) for prompt in batch]
    alone = [ilm.decode([prompt], config)[0] for prompt in [*batch, *free]]
    order = random.sample(range(len(alone)), len(alone))
    company = ilm.decode([[*batch, *free][i] for i in order], config)
    assert_same([company[order.index(i)] for i in range(len(alone))], alone)


@given(prompts(), st.sampled_from([EAGER, LAZY]))
@settings(HEAVY, max_examples=40)
def test_with_time_enough_what_is_owed_comes(tiny_ilm: TinyIlm, prompt: Prompt, config: DecodeConfig) -> None:
    """From a model that stops at once, and from one that never does."""
    rooms = [room_of(prompt, gap) for gap in prompt.gaps]
    longest = max(map(len, prompt.required), default=1)
    fit = sum(room // longest for room in rooms) >= len(prompt.required)
    prompt = replace(prompt, banned=(), headed=frozenset(), required=prompt.required if fit else ())
    [written] = tiny_ilm().decode([prompt], config)
    assert met(prompt, written)
    assert written.complete == (config is LAZY)


@pytest.mark.parametrize("prefix_lm", [False, True])
def test_a_limit_on_length_cuts_what_is_owed(tiny_ilm: TinyIlm, prefix_lm: bool) -> None:
    prompt = Prompt([1], start=[2], required=((3, 4, 5),))
    [written] = tiny_ilm(prefix_lm=prefix_lm).decode([prompt], msgspec.structs.replace(LAZY, max_length=6))
    assert [event.token for event in written.events] == [3, 4]
    assert not written.complete


def test_rules_that_ask_for_nothing_change_nothing(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm()
    config = DecodeConfig(stop_threshold=0.5, temperature=1.0, position_top_k=0, max_steps=12)
    plain = [Prompt([1, 2], seed, [3, 4], frozenset({0, 1})) for seed in range(20)]
    ruled = [replace(prompt, bounds={0: Bounds()}) for prompt in plain]
    assert_same(ilm.decode(plain, config), ilm.decode(ruled, config))


# --- The rules by themselves: what is in play next


def test_the_model_may_do_as_it_likes_until_it_would_stop() -> None:
    text = RuledText(Prompt([], start=[1], bounds={0: Bounds(1), 1: Bounds(0, 1)}, required=((5,),)))
    assert text.move(False, 9)[:3] == (False, [1, 2], None)
    assert text.move(True, 9)[:3] == (False, [1], None)  # gap 0 is below its least
    text.write(1, 4)
    move = text.move(True, 9)
    assert (move.slots, move.words) == ([1, 3, 2], [5])  # then the required id, anywhere
    text.write(2, 5)
    assert text.move(True, 9).complete
    assert text.move(False, 9).slots == [1, 3]  # gap 1 is full


def test_room_is_kept_for_what_is_required() -> None:
    text = RuledText(Prompt([], start=[1], open=frozenset({0}), bounds={0: Bounds(0, 3)}, required=((4, 5),)))
    text.write(1, 0)
    assert text.move(False, 9).words == [4]
    text.write(3, 4)
    assert text.move(True, 9)[:3] == (False, [4], [5])
    text.write(4, 5)
    assert text.move(False, 9).slots == []
    assert text.move(True, 9).complete


def test_a_required_run_stays_in_one_piece() -> None:
    text = RuledText(Prompt([], required=((4, 5),)))
    text.write(1, 4)
    text.write(2, 5)  # the model's own doing
    assert text.move(True, 9).complete
    assert text.move(False, 9).slots == [1, 3]


def test_room_is_kept_gap_by_gap() -> None:
    """Three places in all, but only the second gap takes a run of two."""
    bounds = {0: Bounds(0, 1), 1: Bounds(0, 2)}
    text = RuledText(Prompt([], start=[1], bounds=bounds, required=((4, 5),)))
    assert text.move(False, 9)[:3] == (False, [1], None)


def test_a_required_run_goes_where_the_least_is_missing() -> None:
    text = RuledText(Prompt([], start=[1], bounds={1: Bounds(2)}, required=((4, 5),)))
    assert text.move(True, 2)[:3] == (False, [2], [4])


def test_the_longest_that_is_missing_comes_first() -> None:
    text = RuledText(Prompt([], required=((4,), (5, 6), (7, 6))))
    assert sorted(text.move(True, 9).words or ()) == [5, 7]


def test_what_is_required_twice_is_owed_once() -> None:
    text = RuledText(Prompt([], bounds={0: Bounds(0, 3)}, required=((4, 5), (4, 5))))
    assert text.move(False, 3).words is None  # one place is to spare


def test_limits_make_haste() -> None:
    text = RuledText(Prompt([], start=[1], bounds={1: Bounds(2)}))
    assert text.move(False, 3).slots == [1, 2]
    assert text.move(False, 2).slots == [2]


def test_what_is_required_comes_before_the_least_where_only_it_fits() -> None:
    text = RuledText(Prompt([], bounds={0: Bounds(2)}, required=((4, 5, 6),)))
    assert text.move(True, 4).words is None  # the least first: there is time for both
    assert text.move(True, 3).words == [4]
    text.write(1, 4)
    text.write(2, 5)
    text.write(3, 6)
    assert text.move(True, 9).complete  # and the run is enough for the least


def test_what_would_complete_a_banned_run_is_barred() -> None:
    text = RuledText(Prompt([], start=[1, 3], banned=((1, 2), (2, 3), (1, 4, 3), (5,))))
    assert text.move(False, 9).barred == [(2, 2), (2, 2), (2, 4)]
    assert text.move(False, 9).never == {5}


def test_a_required_run_may_begin_a_headed_gap() -> None:
    text = RuledText(Prompt([], start=[1], headed=frozenset({1}), heads=frozenset({4}), required=((5, 6),)))
    assert text.move(False, 9).edges == [2]
    assert (text.move(True, 9).words, text.move(True, 9).edges) == ([5], [])


def test_heads_are_for_the_edge_of_their_gap() -> None:
    text = RuledText(Prompt([], start=[1], headed=frozenset({1}), heads=frozenset({4})))
    assert (text.move(False, 9).edges, text.move(False, 9).heads) == ([2], frozenset({4}))
    text.write(2, 4)
    assert (text.move(False, 9).slots, text.move(False, 9).edges) == ([1, 2, 3], [2])


def test_heads_that_cannot_be_written_do_no_harm(tiny_ilm: TinyIlm) -> None:
    prompt = Prompt([1], start=[2], open=frozenset({1}), headed=frozenset({1}), heads=frozenset({3, WORDS + 1}))
    [written] = tiny_ilm().decode([prompt], msgspec.structs.replace(EAGER, max_steps=1))
    assert written.ids == [2, 3]


# --- What cannot be demanded


@pytest.mark.parametrize(
    ("demands", "line"),
    [
        ({"bounds": {0: Bounds(1)}}, "a prompt has bounds for gap 0, which is not open"),
        (
            {"bounds": {1: Bounds(3, 2)}},
            "a gap must get at least 3 and at most 2 tokens; expected 0 <= least <= most",
        ),
        ({"bounds": {1: Bounds(7)}}, "the gaps of a prompt must get at least 7 tokens; there is room for 6"),
        (
            {"headed": frozenset({1}), "heads": frozenset({9})},
            "headed gaps: expected open ones, and heads that can be written and are not banned",
        ),
        (
            {"headed": frozenset({1}), "heads": frozenset({3}), "banned": ((3,),)},
            "headed gaps: expected open ones, and heads that can be written and are not banned",
        ),
        ({"banned": ((),)}, "banned and required: expected ids that can be written, got []"),
        ({"required": ((1, 6),)}, "banned and required: expected ids that can be written, got [1, 6]"),
        ({"required": ((1, 2),), "banned": ((2,),)}, "the ids [2] are banned and required"),
        ({"required": ((1, 2),), "bounds": {1: Bounds(0, 1)}}, "the required ids [1, 2] do not fit into any gap"),
        ({"banned": tuple((word,) for word in range(WORDS))}, "all that can be written is banned"),
    ],
)
def test_impossible_demands_are_named(tiny_ilm: TinyIlm, demands: dict[str, Any], line: str) -> None:
    prompt = Prompt([1], start=[2], open=frozenset({1}), **demands)
    with pytest.raises(InsertlmError) as caught:
        tiny_ilm().decode([prompt], DecodeConfig(max_length=10))
    assert str(caught.value) == line
