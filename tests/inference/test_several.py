"""Several tokens in one step: what a prompt demands is kept all the same, by every family that inserts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replaced

from insertlm.families.base import Family
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.families.it import ItConfig
from insertlm.inference.constraints import RuledText
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

TinyIlm = Callable[..., ILM]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
runs = st.lists(words, min_size=1, max_size=3).map(tuple)


def untrained(config: IlmConfig | ItConfig, prefix_lm: bool) -> Family:
    """Whose slots differ in what they say, so that some are closed."""
    model = ModelConfig(layers=2, width=8, heads=2, hidden=12, prefix_lm=prefix_lm)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        family: Family = config.build(model, WordTokenizer(tuple("012345"), reserved=1))
    weight = family.get_parameter("stop.out.weight" if isinstance(config, IlmConfig) else "unembedding.weight")
    weight.data *= 4
    return family.double().eval()


CONFIGS: dict[str, IlmConfig | ItConfig] = {"text": IlmConfig(), "slots": IlmConfig(stop="slots"), "it": ItConfig()}
FAMILIES = {
    (name, prefix_lm): untrained(config, prefix_lm) for name, config in CONFIGS.items() for prefix_lm in (False, True)
}
families = st.sampled_from([*FAMILIES.values()])


def room_of(prompt: Prompt, gap: int) -> int:
    most = prompt.bounds.get(gap, Bounds()).most
    return 99 if most is None else most


def within(part: tuple[int, ...], line: tuple[int, ...]) -> bool:
    return any(line[k : k + len(part)] == part for k in range(len(line) - len(part) + 1))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prefix, start = draw(st.lists(words, max_size=2)), draw(st.lists(words, max_size=5))
    gaps = draw(st.frozensets(st.integers(0, len(start)), min_size=1))
    bounds = {}
    for gap in draw(st.frozensets(st.sampled_from(sorted(gaps)))):
        least = draw(st.integers(0, 3))
        bounds[gap] = Bounds(least, draw(st.none() | st.integers(least, 5)))
    banned = tuple(draw(st.lists(runs, max_size=5)))
    headed = draw(st.frozensets(st.sampled_from(sorted(gaps))))
    heads = draw(st.frozensets(words.filter(lambda word: (word,) not in banned), min_size=1))
    prompt = Prompt(prefix, draw(st.integers(0, 2**40)), start, gaps, bounds, banned, (), headed, heads)
    room = max(room_of(prompt, gap) for gap in gaps)
    possible = runs.filter(lambda run: len(run) <= room and not any(within(other, run) for other in banned))
    return replace(prompt, required=tuple(draw(st.lists(possible, max_size=3)))) if room else prompt


configs = st.builds(
    DecodeConfig,
    stop_threshold=st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
    order=st.sampled_from(["auto", "mass", "certainty", "margin"]),
    parallel=st.sampled_from([0, 0, 2, 3, 99]),
    confidence=st.sampled_from([0.0, 0.2, 1.0]),
    temperature=st.sampled_from([0.0, 1.5]),
    top_k=st.integers(0, 3),
    max_steps=st.integers(1, 12),
    max_tokens=st.none() | st.integers(1, 12),
    max_length=st.integers(24, 30),
)


def lines(written: Trajectory) -> list[list[tuple[int, int]]]:
    """The text after every step, as (token, step); -1 for given ones."""
    line, found = [(token, -1) for token in written.start], []
    for number, step in enumerate(written.steps):
        for event in step:
            line.insert(event.rank, (event.token, number))
        found.append([*line])
    return found


def fills(prompt: Prompt, line: list[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """What is in each gap."""
    found: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(prompt.start) + 1), ())
    gap = 0
    for token, step in line:
        gap += step < 0
        found[gap] += (token,) if step >= 0 else ()
    return found


def keeps_to(prompt: Prompt, written: Trajectory) -> None:
    """After every step; what is owed, in the end."""
    states = lines(written)
    for number, line in enumerate(states):
        found = fills(prompt, line)
        for gap, fill in found.items():
            assert not fill or gap in prompt.gaps
            assert len(fill) <= room_of(prompt, gap)
            heads = prompt.heads | {run[0] for run in prompt.required}
            assert not fill or gap not in prompt.headed or fill[0] in heads
        for run in prompt.banned:  # none that a token of this step is a part of
            for first in range(len(line) - len(run) + 1):
                part = line[first : first + len(run)]
                assert tuple(token for token, _ in part) != run or all(step != number for _, step in part)
    if written.complete:
        found = fills(prompt, states[-1] if states else [(token, -1) for token in prompt.start])
        assert all(len(found[gap]) >= least for gap, (least, _) in prompt.bounds.items())
        assert all(any(within(run, fill) for fill in found.values()) for run in prompt.required)


@given(families, st.lists(prompts(), min_size=1, max_size=4), configs)
@settings(HEAVY, max_examples=150)
def test_rules_are_kept(family: Family, batch: list[Prompt], config: DecodeConfig) -> None:
    for prompt, written in zip(batch, family.decode(batch, config), strict=True):
        assert written.start == prompt.start
        assert len(written.events) <= (config.max_tokens or 99)
        keeps_to(prompt, written)
        for step in written.steps[1 : -1 if written.limit else None]:
            assert step  # every step writes something
            assert config.parallel == 0 or len(step) <= config.parallel


@given(families, prompts(), configs, st.booleans())
@settings(HEAVY, max_examples=60)
def test_with_time_enough_what_is_owed_comes(family: Family, prompt: Prompt, config: DecodeConfig, eager: bool) -> None:
    """From a model that stops at once, and from one that never does."""
    rooms = [room_of(prompt, gap) for gap in prompt.gaps]
    longest = max(map(len, prompt.required), default=1)
    fit = sum(room // longest for room in rooms) >= len(prompt.required)
    prompt = replace(prompt, banned=(), headed=frozenset(), required=prompt.required if fit else ())
    threshold = 1.0 if eager else 0.0
    config = replaced(config, stop_threshold=threshold, temperature=0.0, max_steps=40, max_tokens=None, max_length=60)
    [written] = family.decode([prompt], config)
    found = fills(
        prompt, [(token, -1 if event < 0 else 0) for token, event in zip(written.ids, written.order, strict=True)]
    )
    assert all(len(found[gap]) >= least for gap, (least, _) in prompt.bounds.items())
    assert all(any(within(run, fill) for fill in found.values()) for run in prompt.required)
    assert written.complete == (not eager)


@given(families, st.lists(prompts(), min_size=1, max_size=3), configs)
@settings(HEAVY, max_examples=60)
def test_a_text_does_not_depend_on_its_batch_nor_on_who_joins(
    family: Family, batch: list[Prompt], config: DecodeConfig
) -> None:
    alone = [family.decode([prompt], config)[0] for prompt in batch]
    scheduler = Scheduler(family, 99, watched=True)
    ended = dict[int, Trajectory]()
    for prompt in batch:  # one begins with every step
        scheduler.submit([prompt], config)
        ended |= {each.key: each.ended for each in scheduler.advance() if each.ended is not None}
    while len(scheduler):
        ended |= {each.key: each.ended for each in scheduler.advance() if each.ended is not None}
    for together in (family.decode(batch, config), [ended[key] for key in sorted(ended)]):
        for a, b in zip(together, alone, strict=True):
            assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
            assert a.limit == b.limit


@given(families, prompts(), configs)
@settings(HEAVY, max_examples=60)
def test_rules_that_ask_for_nothing_change_nothing(family: Family, prompt: Prompt, config: DecodeConfig) -> None:
    free = Prompt(prompt.prefix, prompt.seed, prompt.start, prompt.open)
    ruled = replace(free, bounds={min(prompt.gaps): Bounds()})
    [a], [b] = (family.decode([each], config) for each in (free, ruled))
    assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
    assert a.complete == b.complete


@pytest.mark.parametrize("name", ["text", "slots"])
def test_zero_is_one_in_every_open_blank(name: str) -> None:
    """By gates; if the text is asked as a whole, in those where half as much is expected as in the best one."""
    prompt = Prompt([1], start=[2, 3, 4, 5], open=frozenset({0, 2, 4}), bounds={gap: Bounds(0, 3) for gap in (0, 2, 4)})
    config = DecodeConfig(parallel=0, stop_threshold=1.0, max_steps=9)
    [written] = FAMILIES[name, False].decode([prompt], config)
    assert len(written.events) == 9
    if name == "slots":
        assert [len(step) for step in written.steps] == [3, 3, 3]
    for line, number in zip(lines(written), range(9), strict=False):
        gaps = Counter(
            sum(step < 0 for _, step in line[:place]) for place, (_, step) in enumerate(line) if step == number
        )
        assert set(gaps.values()) == {1}


@pytest.mark.parametrize("name", ["text", "slots", "it"])
def test_beside_the_best_place_a_token_must_be_likely(name: str) -> None:
    family, prompts = FAMILIES[name, False], [Prompt([k], start=[1, 2, 3]) for k in range(6)]
    config = DecodeConfig(parallel=4, stop_threshold=1.0, max_steps=1)
    plain = family.decode(prompts, config)
    sizes = []
    for confidence in (0.1, 0.2, 0.3, 1.0):
        some = family.decode(prompts, replaced(config, confidence=confidence))
        for a, b in zip(some, plain, strict=True):
            assert {(e.token, e.log_probability) for e in a.events} <= {(e.token, e.log_probability) for e in b.events}
        sizes.append(sum(len(text.events) for text in some))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(prompts) < sum(len(text.events) for text in plain)


# --- The rules by themselves


def test_what_two_insertions_would_complete_together_is_not_written() -> None:
    text = RuledText(Prompt([], start=[1], banned=((4, 1, 5),)))
    text.move(False, 9)
    assert text.write_all([(1, 4), (2, 5), (-1, 0)]) == [True, False, False]


def test_room_is_counted_down_within_a_step() -> None:
    text = RuledText(Prompt([], start=[1, 2], bounds={0: Bounds(0, 1), 2: Bounds(2)}, required=((5, 4),)))
    text.move(False, 6)
    # Of six tokens four are owed; of the two to spare one goes into gap 1, and one into gap 0, which then is full.
    assert text.write_all([(2, 0), (1, 0), (3, 0)]) == [True, True, True]
    text = RuledText(Prompt([], start=[1, 2], bounds={2: Bounds(2)}))
    text.move(False, 3)
    assert text.write_all([(1, 0), (2, 0), (3, 0)]) == [True, False, True]


def test_closed_slots_are_for_what_is_owed_alone() -> None:
    text = RuledText(Prompt([], start=[1], bounds={1: Bounds(1)}))
    assert text.move(False, 9, {2}).slots == [1]
    assert text.move(False, 9, {1, 2}).slots == [2]  # all are closed, but the second gap is below its least
    text.write(2, 4)
    assert text.move(False, 9, {1, 2, 3}).complete
    assert not text.move(False, 9, {1, 2}).complete


def test_what_is_missed_inside_of_a_required_run_does_not_count() -> None:
    text = RuledText(Prompt([], required=((4, 5),)))
    text.write(1, 4)
    text.write(2, 5)
    assert text.move(False, 9, {1, 3}).complete
