"""Texts that come and go at random: each is written as if it were alone, and what is told of it adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replaced

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.nn.attention import PrefixCache
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

TinyIlm = Callable[..., ILM]
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
words = st.integers(0, 5)


@st.composite
def prompts(draw: st.DrawFn, ruled: bool = True) -> Prompt:
    prefix, start = draw(st.lists(words, max_size=4)), draw(st.lists(words, max_size=4))
    gaps = draw(st.none() | st.frozensets(st.integers(0, len(start)), min_size=1))
    prompt = Prompt(prefix, draw(st.integers(0, 2**40)), start, gaps)
    if not ruled or draw(st.booleans()):
        return prompt
    least = draw(st.integers(0, 2))
    bounds = {min(prompt.gaps): Bounds(least, least + 2)}
    run = draw(st.none() | st.tuples(words, words))
    required = () if run is None or (bounds[min(prompt.gaps)].most or 0) < 2 else (run,)
    return Prompt(prefix, prompt.seed, start, gaps, bounds, ((0, 1),) if run != (0, 1) else (), required)


def configs(**fixed: Any) -> st.SearchStrategy[DecodeConfig]:
    """Few enough for texts to meet others of their kind."""
    changes = {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "max_steps": st.integers(1, 6),
        "max_tokens": st.none() | st.integers(1, 4),
    }
    return st.builds(DecodeConfig, max_length=st.integers(14, 20), position_top_k=st.just(1), **(changes | fixed))


def same(written: Trajectory, alone: Trajectory) -> None:
    """Tokens, places and endings; probabilities to the last few bits."""
    assert [event[:3] for event in written.events] == [event[:3] for event in alone.events]
    assert (written.prefix, written.start, written.limit) == (alone.prefix, alone.start, alone.limit)
    numbers = [[t.stop_probability, *(x for event in t.events for x in event[3:])] for t in (written, alone)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


def come_and_go(
    family: Family, arrivals: list[tuple[int, list[Prompt], DecodeConfig]], leaving: dict[int, int], limit: int = 99
) -> int:
    """Texts are submitted before the step that each arrival names, and cancelled before the one that `leaving` names by
    key. Returns how many steps were taken."""
    scheduler = Scheduler(family, limit, watched=True)
    asked, told, done = dict[int, Any](), dict[int, list[Insertion]](), set[int]()
    number = 0
    while len(scheduler) or any(when >= number for when, *_ in arrivals):
        for _, batch, config in (arrival for arrival in arrivals if arrival[0] == number):
            for key, prompt in zip(scheduler.submit(batch, config), batch, strict=True):
                asked[key], told[key] = (prompt, config), []
        for key in [key for key, when in leaving.items() if when == number and key in asked]:
            scheduler.cancel(key)
            done.add(key)
        assert len(scheduler) == len(asked.keys() - done)
        scheduler.admit()
        assert scheduler.running == min(limit, len(scheduler))
        for key, events, ended in scheduler.advance():
            told[key] += events
            if ended is not None:
                [alone] = family.decode([asked[key][0]], asked[key][1])
                same(ended, alone)
                assert told[key] == ended.events
                done.add(key)
        number += 1
    assert done == asked.keys()
    return number


arrivals = st.lists(
    st.tuples(st.integers(0, 8), st.lists(prompts(), min_size=1, max_size=3), configs(stop_threshold=st.just(1.0))),
    max_size=6,
)


@given(arrivals, st.dictionaries(st.integers(0, 9), st.integers(0, 10), max_size=3), st.booleans())
@settings(HEAVY, max_examples=60)
def test_texts_are_written_as_if_alone(
    tiny_ilm: TinyIlm,
    arrivals: list[tuple[int, list[Prompt], DecodeConfig]],
    leaving: dict[int, int],
    prefix_lm: bool,
) -> None:
    come_and_go(tiny_ilm(prefix_lm=prefix_lm), arrivals, leaving)


ways = configs(
    stop_threshold=st.sampled_from([0.45, 0.5, 0.55]),
    joint=st.sampled_from([False, False, True]),
    order=st.sampled_from(["auto", "mass"]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.6]),
)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(prompts(), min_size=1, max_size=2), ways), max_size=5))
@settings(HEAVY, max_examples=30)
def test_settings_may_differ(tiny_ilm: TinyIlm, arrivals: list[tuple[int, list[Prompt], DecodeConfig]]) -> None:
    come_and_go(tiny_ilm(), arrivals, {})


def family(config: Any) -> Family:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(layers=1, width=8, heads=2, hidden=12, max_length=40)
        built: Family = config.build(model, WordTokenizer(tuple(map(str, range(6)))))
        for parameter in built.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return built.double().eval().requires_grad_(False)


def masked(prompt: Prompt) -> Prompt:
    if len(prompt.start) % 2:
        return Prompt(prompt.prefix, prompt.seed)
    bounds = {0: Bounds(2, 2), 1: Bounds(1, 1)} if prompt.start else {0: Bounds(3, 3)}
    return Prompt(prompt.prefix, prompt.seed, prompt.start[:2], frozenset(bounds), bounds, ((0,),))


sampling = {"top_k": st.sampled_from([0, 2]), "top_p": st.sampled_from([1.0, 0.6])}
EVERY = pytest.mark.parametrize(
    ("config", "fixed"),
    [
        (IlmConfig(), {"stop_threshold": st.sampled_from([0.45, 0.55])}),
        (ItConfig(), {"parallel": st.integers(0, 2), "stop_threshold": st.sampled_from([0.2, 0.5])}),
        (ArmConfig(), {}),
        (MdmConfig(block=5), {"order": st.sampled_from(["auto", "certainty"])}),
    ],
    ids=["ilm", "it", "arm", "mdm"],
)


@EVERY
@given(data=st.data())
@settings(HEAVY, max_examples=15)
def test_every_family(config: Any, fixed: dict[str, Any], data: st.DataObject) -> None:
    lists = st.lists(prompts(ruled=False), min_size=1, max_size=2)
    if isinstance(config, ArmConfig):
        lists = lists.map(lambda some: [replace(prompt, open=frozenset({len(prompt.start)})) for prompt in some])
    if isinstance(config, MdmConfig):  # from nothing, or into gaps of known lengths
        lists = lists.map(lambda some: [masked(prompt) for prompt in some])
    coming = data.draw(st.lists(st.tuples(st.integers(0, 4), lists, configs(**fixed, **sampling)), max_size=4))
    come_and_go(family(config), coming, {1: 2}, data.draw(st.sampled_from([2, 99])))


@EVERY
def test_texts_of_every_family_share_the_network(config: Any, fixed: dict[str, Any]) -> None:
    """Also if they begin at another time, are of another length and are drawn in another way."""
    model, calls = family(config), list[int]()
    model.backbone.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    scheduler = Scheduler(model, 9, watched=True)
    one, other = (1.0, 0.99) if model.abilities.stop_threshold else (0.5, 0.5)
    first = 26 if isinstance(config, ArmConfig) else 13  # a seed with which neither text ends at once
    ways = DecodeConfig(stop_threshold=one, max_steps=30, temperature=0.8)
    scheduler.submit([Prompt([1, 2, 3], first)], ways)
    scheduler.advance()
    scheduler.submit([Prompt([4], first + 1)], replaced(ways, stop_threshold=other, max_steps=40, temperature=0.9))
    calls.clear()
    scheduler.advance()
    joining = len(calls)
    calls.clear()
    told = scheduler.advance()
    assert ([ended for _, _, ended in told], len(calls)) == ([None, None], 1)
    assert joining <= 2  # an ARM reads what is given


def test_an_arm_that_never_rests_keeps_no_more_than_its_texts_need() -> None:
    """One text after the other joins one that is there; the cache has room for the longest, not for all steps."""
    arm = family(ArmConfig())
    scheduler, config = Scheduler(arm, 2, watched=True), DecodeConfig(max_steps=6, temperature=1.0)
    scheduler.submit([Prompt([1], seed) for seed in range(40)], config)
    ended = dict[int, Trajectory]()
    while len(scheduler):
        ended |= {key: whole for key, _, whole in scheduler.advance() if whole is not None}
        for batch in scheduler._batches:
            cache: PrefixCache = batch.writer.cache  # type: ignore[attr-defined]
            assert cache.longest <= cache.layers[0][0].shape[1] <= 16
    for key, whole in ended.items():
        same(whole, arm.decode([Prompt([1], key)], config)[0])


def test_texts_of_one_kind_share_the_network(tiny_ilm: TinyIlm) -> None:
    """Limits may differ, thresholds and how tokens are chosen too; a text that joins costs its rows and no call of its
    own. Not so with pairs of slot and token."""
    ilm, rows = tiny_ilm(), list[int]()
    ilm.backbone.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    scheduler = Scheduler(ilm, 9, watched=True)
    scheduler.submit([Prompt([], start=[1, 2])], DecodeConfig(stop_threshold=1.0, max_steps=3))
    scheduler.advance()
    scheduler.submit(
        [Prompt([], start=[3])], DecodeConfig(stop_threshold=0.99, max_steps=9, temperature=0.7, top_p=0.9)
    )
    scheduler.advance()
    scheduler.submit([Prompt([])], DecodeConfig(stop_threshold=0.99, joint=True, temperature=0.7))
    scheduler.advance()
    scheduler.submit([Prompt([])], DecodeConfig(stop_threshold=0.99, joint=True, temperature=0.8))
    scheduler.advance()
    assert rows == [4, 5 + 3, 6 + 4, 2, 7 + 5, 3, 2]


def test_a_threshold_that_is_just_reached_ends_a_text(tiny_ilm: TinyIlm) -> None:
    """Among texts of one setting, and of several."""
    ilm, same, other = tiny_ilm(), DecodeConfig(stop_threshold=0.5), DecodeConfig(stop_threshold=0.5, temperature=0.7)
    for parameter in ilm.stop.parameters():
        parameter.data.zero_()  # one half, whatever it reads
    for settings_ in ([same], [same, other]):
        scheduler = Scheduler(ilm, 9, watched=True)
        for each in settings_:
            scheduler.submit([Prompt([1])], each)
        assert [progress.ended is not None and progress.ended.complete for progress in scheduler.advance()] == [
            True
        ] * len(settings_)


def test_a_step_is_one_of_every_text(tiny_ilm: TinyIlm) -> None:
    """Also where texts of another kind, which were there before, end in it."""
    scheduler = Scheduler(tiny_ilm(), 9, watched=True)
    [first] = scheduler.submit([Prompt([1])], DecodeConfig(stop_threshold=1.0, max_steps=1))
    [second] = scheduler.submit([Prompt([1])], DecodeConfig(stop_threshold=1.0, joint=True))
    told = [[(key, len(events), ended is None) for key, events, ended in scheduler.advance()] for _ in range(2)]
    assert told == [[(first, 1, True), (second, 1, True)], [(first, 0, False), (second, 1, True)]]


def test_what_cannot_be_decoded_is_refused_and_leaves_no_trace(tiny_ilm: TinyIlm) -> None:
    scheduler = Scheduler(tiny_ilm(), 9, watched=True)
    with pytest.raises(InsertlmError, match="a prompt has the id 99"):
        scheduler.submit([Prompt([1]), Prompt([99])], DecodeConfig())
    assert len(scheduler) == 0
    assert scheduler.advance() == []
    assert scheduler.submit([], DecodeConfig()) == []
    scheduler.cancel(7)


def test_a_scheduler_that_could_begin_nothing_is_refused(tiny_ilm: TinyIlm) -> None:
    with pytest.raises(InsertlmError, match="expected 1 or more texts at once, got 0"):
        Scheduler(tiny_ilm(), 0, watched=True)


def test_a_text_is_named_the_limit_that_ended_it(tiny_ilm: TinyIlm) -> None:
    """The same at both paces, and the first of several that are reached at once."""
    ilm, endless = tiny_ilm(), DecodeConfig(stop_threshold=1.0, max_steps=3)
    cases = [
        (Prompt([1]), endless, "max_steps"),
        (Prompt([1]), replaced(endless, max_tokens=2), "max_tokens"),
        (Prompt([1]), replaced(endless, max_tokens=3), "max_tokens"),
        (Prompt([1, 2]), replaced(endless, max_length=6), "max_length"),
        (Prompt([1], bounds={0: Bounds(0, 1)}), endless, "blanks"),
        (Prompt([1], open=frozenset()), endless, "blanks"),
        (Prompt([1]), replaced(endless, stop_threshold=0.0), None),
    ]
    for prompt, config, limit in cases:
        scheduler = Scheduler(ilm, 1, watched=True)
        scheduler.submit([prompt], config)
        ended = None
        while ended is None:
            [*_, (_, _, ended)] = scheduler.advance()
        assert [ended.limit, ilm.decode([prompt], config)[0].limit] == [limit, limit]
