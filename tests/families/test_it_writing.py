"""The Insertion Transformer writes what its slots say: which are closed, which come first, what, and when it ends.

The reference is written from the definition: one text at a time, with the whole table of probabilities, in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.insertion import InsertionWriter
from insertlm.families.it import IT
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory

Fits = Callable[[Tensor, Tensor], bool]
SlotRows = Callable[[IT, list[int], list[int]], Tensor]
TinyIt = Callable[..., IT]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
seeds = st.integers(0, 2**40)


@st.composite
def prompts(draw: st.DrawFn, shortest: int = 0) -> Prompt:
    """shortest: of the prefix"""
    prefix, start = draw(st.lists(words, min_size=shortest, max_size=5)), draw(st.lists(words, max_size=4))
    gaps = st.frozensets(st.integers(0, len(start)))
    return Prompt(prefix, draw(seeds), start, draw(st.none() | gaps))


configs = st.builds(
    DecodeConfig,
    stop_threshold=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.99]),
    order=st.sampled_from(["auto", "certainty", "margin", "mass"]),
    parallel=st.integers(0, 3),
    max_steps=st.integers(1, 5),
    max_length=st.integers(11, 20),
)
sampled = st.builds(
    msgspec.structs.replace,
    configs,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
)
batches = st.integers(0, 1).flatmap(lambda shortest: st.lists(prompts(shortest), min_size=1, max_size=4))
ENDLESS = DecodeConfig(stop_threshold=1.0, max_steps=4)  # an untrained model is never so sure


def settled(config: DecodeConfig, **changes: Any) -> DecodeConfig:
    return msgspec.structs.replace(config, **changes)


@dataclass
class Dense:
    """One text under way."""

    it: IT
    slot_rows: SlotRows
    prompt: Prompt
    config: DecodeConfig
    text: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)  # of <bos> and each token of the text

    def __post_init__(self) -> None:
        self.text = [*self.prompt.start]
        self.open = [self.prompt.open is None or gap in self.prompt.open for gap in range(len(self.text) + 1)]

    @torch.no_grad()
    def ask(self) -> tuple[list[list[float]], list[int], float | None]:
        """P(word or, last, <eos> | slot); the open slots that are not closed; the chance of the least sure to end."""
        hidden = self.slot_rows(self.it, self.prompt.prefix, self.text)
        chosen = [*range(WORDS), self.it.specials.eos]
        table = (hidden @ self.it.unembedding.weight[chosen].T).softmax(-1).tolist()
        ends = {slot: table[slot][-1] for slot in range(len(table)) if self.open[slot]}
        unsettled = [slot for slot, end in ends.items() if end < self.config.stop_threshold]
        return table, unsettled, min(ends.values(), default=None)

    @property
    def room(self) -> int:
        assert self.config.max_length is not None
        return self.config.max_length - 2 - len(self.prompt.prefix) - len(self.text)

    def once(self, tokens: dict[int, int]) -> dict[int, int]:
        """Without those left of a word like theirs, on the right of which the same is written."""
        left = {slot for slot, word in enumerate(self.text) if tokens.get(slot) == tokens.get(slot + 1) == word}
        return {slot: token for slot, token in tokens.items() if slot not in left}

    def write(self, tokens: dict[int, int]) -> list[int]:
        """Into these slots; the ranks, in reading order."""
        ranks = [slot + number for number, slot in enumerate(sorted(tokens))]
        for rank, slot in zip(ranks, sorted(tokens), strict=True):
            self.text.insert(rank, tokens[slot])
            self.open.insert(rank + 1, True)
        return ranks


def worth(row: list[float], order: str) -> float:
    *_, rival, best = sorted(row[:-1])
    return {"margin": best - max(rival, row[-1]), "mass": 1 - row[-1]}.get(order, best)


@given(batches, configs, st.booleans(), st.sampled_from([4.0, 16.0]))
@settings(HEAVY, max_examples=100)
def test_greedy_writing_by_hand(
    tiny_it: TinyIt, slot_rows: SlotRows, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool, sharp: float
) -> None:
    """Which slots are closed, which of the others are written to, what, and when it ends; with the cached prefix."""
    it = tiny_it(prefix_lm=prefix_lm, sharp=sharp)
    for prompt, written in zip(batch, it.decode(batch, config), strict=True):
        dense, events = Dense(it, slot_rows, prompt, config), []
        for number in range(config.max_steps + 1):
            table, unsettled, stop = dense.ask()
            if not unsettled or not dense.room or number == config.max_steps:
                break
            best = sorted(unsettled, key=lambda slot: -worth(table[slot], config.order))
            best = best[: min(config.parallel or len(best), dense.room)]
            tokens = dense.once({slot: int(np.argmax(table[slot][:-1])) for slot in best})
            for rank, slot in zip(dense.write(tokens), sorted(tokens), strict=True):
                events.append((number, rank, tokens[slot], math.log(table[slot][tokens[slot]]), stop))
        assert [event[:3] for event in written.events] == [event[:3] for event in events]
        assert [x for e in written.events for x in e[3:]] == pytest.approx([x for e in events for x in e[3:]])
        assert written.ids == dense.text
        assert written.stop_probability == (None if stop is None else pytest.approx(stop))
        assert written.complete == (stop is not None and not unsettled)


@given(batches, sampled, st.booleans())
@settings(HEAVY, max_examples=60)
def test_every_step_writes_one_token_into_each_of_the_slots_it_may(
    tiny_it: TinyIt, slot_rows: SlotRows, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool
) -> None:
    """However tokens are drawn: words only, into gaps that are open and not closed, no two into one. (A slot left of a
    word may leave it to the slot on its right.)"""
    it = tiny_it(prefix_lm=prefix_lm)
    for prompt, written in zip(batch, it.decode(batch, config), strict=True):
        dense = Dense(it, slot_rows, prompt, config)
        for number in range(max([event.step + 1 for event in written.events], default=0)):
            events = [event for event in written.events if event.step == number]
            table, unsettled, stop = dense.ask()
            tokens = {event.rank - i: event.token for i, event in enumerate(events)}
            most = min(config.parallel or len(unsettled), len(unsettled), dense.room)
            alike = [slot for slot, word in enumerate(dense.text) if slot not in tokens and word in tokens.values()]
            assert most - len(alike) <= len(tokens) == len(events) <= most
            assert tokens == dense.once(tokens)
            assert set(tokens) <= set(unsettled)
            assert set(tokens.values()) <= set(range(WORDS))
            for (slot, token), event in zip(tokens.items(), events, strict=True):
                assert event.log_probability == pytest.approx(math.log(table[slot][token]))
                assert event.stop_probability == pytest.approx(stop)
            assert dense.write(tokens) == [event.rank for event in events]
        assert (written.prefix, written.start, written.ids) == (prompt.prefix, prompt.start, dense.text)
        given_ = [token for token, event in zip(written.ids, written.order, strict=True) if event < 0]
        assert given_ == prompt.start


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    """The same tokens in the same places; probabilities to the last few bits."""
    for a, b in zip(left, right, strict=True):
        assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
        assert (a.prefix, a.start, a.complete) == (b.prefix, b.start, b.complete)
        numbers = [[t.stop_probability, *(x for e in t.events for x in e[3:])] for t in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


@given(batches, sampled, st.booleans(), st.randoms(use_true_random=False))
@settings(HEAVY, max_examples=60)
def test_a_text_does_not_depend_on_its_batch(
    tiny_it: TinyIt, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool, random: Any
) -> None:
    it = tiny_it(prefix_lm=prefix_lm)
    alone = [it.decode([prompt], config)[0] for prompt in batch]
    company = [*batch, *(Prompt([2, *prompt.prefix[1:]], prompt.seed + 1) for prompt in batch)]
    order = random.sample(range(len(company)), len(company))
    shuffled = it.decode([company[i] for i in order], config)
    assert_same([shuffled[order.index(i)] for i in range(len(batch))], alone)


@given(st.lists(prompts(1), min_size=1, max_size=4), sampled)
@settings(HEAVY, max_examples=30)
def test_a_cached_prefix_changes_nothing(tiny_it: TinyIt, batch: list[Prompt], config: DecodeConfig) -> None:
    it = tiny_it(prefix_lm=True)
    cached = it.decode(batch, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InsertionWriter, "_prefix_cache", lambda self: None)
        assert_same(it.decode(batch, config), cached)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"order": "auto"}, [0]),
        ({"order": "certainty"}, [0]),
        ({"order": "margin"}, [1]),
        ({"order": "mass"}, [2]),
        ({"order": "mass", "parallel": 2}, [1, 3]),
        ({"parallel": 0}, [1, 3]),  # not 0 as well: both sides of the 0 ask for a 0
        ({"parallel": 0, "stop_threshold": 0.3}, [1, 3]),
        ({"order": "certainty", "stop_threshold": 0.3}, [1]),
        ({"parallel": 0, "stop_threshold": 0.25}, [2]),
        ({"parallel": 0, "stop_threshold": 0.23}, []),
    ],
)
def test_orders_choose_the_surest_the_clearest_or_the_emptiest_slot(
    tiny_it: TinyIt, changes: dict[str, Any], ranks: list[int]
) -> None:
    """A model that only looks at the token before a slot: P(0), P(1) and P(<eos>) behind <bos>, 0 and 1."""
    it = tiny_it()
    heads = [0, 1, it.specials.eos]
    table = torch.zeros(it.vocabulary, 8, dtype=torch.float64)
    table[[it.specials.bos, 0, 1], :3] = torch.tensor([[50, 10, 40], [45, 30, 25], [40, 36, 24]]).double().log()
    table[:, 3] = -99
    it.unembedding.weight.data = torch.eye(8, dtype=torch.float64)[
        [heads.index(i) if i in heads else 3 for i in range(it.vocabulary)]
    ]
    it.backbone.register_forward_hook(lambda module, inputs, hidden: table[inputs[0]])
    [written] = it.decode([Prompt([], start=[0, 1])], settled(ENDLESS, max_steps=1, **changes))
    assert [event.rank for event in written.events] == ranks
    assert written.complete == (not ranks)
    assert all(event.stop_probability == pytest.approx(0.24) for event in written.events)


def test_a_step_may_write_to_every_slot_and_a_text_doubles(tiny_it: TinyIt) -> None:
    it = tiny_it()
    [all_, two, one] = [it.decode([Prompt([1])], settled(ENDLESS, parallel=n))[0] for n in (0, 2, 1)]
    assert [Counter(event.step for event in t.events) for t in (all_, two, one)] == [
        {0: 1, 1: 2, 2: 4, 3: 8},
        {0: 1, 1: 2, 2: 2, 3: 2},
        {0: 1, 1: 1, 2: 1, 3: 1},
    ]
    assert_same([all_], it.decode([Prompt([1])], settled(ENDLESS, parallel=99)))
    [short] = it.decode([Prompt([1])], settled(ENDLESS, parallel=0, max_length=8))
    assert Counter(event.step for event in short.events) == {0: 1, 1: 2, 2: 2}  # two of four slots have room
    assert not short.complete


def test_without_an_open_gap_nothing_is_written_and_nobody_is_asked(tiny_it: TinyIt) -> None:
    it, closed, other = tiny_it(), Prompt([1], start=[2, 3], open=frozenset()), Prompt([0, 1], start=[2])
    for parallel in (0, 1):
        config = settled(ENDLESS, parallel=parallel)
        [alone] = it.decode([closed], config)
        assert (alone.ids, alone.complete, alone.stop_probability) == ([2, 3], False, None)
        assert_same(it.decode([closed, other], config), [alone, *it.decode([other], config)])


@pytest.mark.parametrize("parallel", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_are_never_written_however_likely(tiny_it: TinyIt, parallel: int, temperature: float) -> None:
    it = tiny_it()
    it.unembedding.weight.data[WORDS:] *= 1e3
    it.unembedding.weight.data[it.specials.eos] = 0  # or slots would close
    config = settled(ENDLESS, parallel=parallel, temperature=temperature)
    for written in it.decode([Prompt([0, 1], seed) for seed in range(20)], config):
        assert len(written.ids) in ([4] if parallel else range(8, 16))
        assert set(written.ids) <= set(range(WORDS))
        assert all(event.log_probability > -30 for event in written.events)  # they take no mass either


def test_sampled_tokens_come_as_often_as_they_should_in_every_slot(
    tiny_it: TinyIt, slot_rows: SlotRows, fits: Fits
) -> None:
    """Also together: slots of one text draw independently."""
    it, start = tiny_it(sharp=1.0), [1]
    config = settled(ENDLESS, temperature=1.0, parallel=0, max_steps=1)
    table = torch.tensor(Dense(it, slot_rows, Prompt([], start=start), config).ask()[0])[:, :-1]
    counts = torch.zeros(WORDS, WORDS)
    for written in it.decode([Prompt([], seed, start) for seed in range(2000)], config):
        counts[written.ids[0], written.ids[-1]] += 1  # a 1 on both sides of the 1 is written once
    assert fits(counts, table[0][:, None] * table[1])


def test_steps_that_write_to_one_slot_draw_independently(tiny_it: TinyIt, slot_rows: SlotRows, fits: Fits) -> None:
    it, config = tiny_it(sharp=1.0), settled(ENDLESS, temperature=1.0, max_steps=2)
    counts, chances, same = torch.zeros(WORDS, WORDS), torch.zeros(WORDS, WORDS), set()
    for written in it.decode([Prompt([], seed) for seed in range(4000)], config):
        first, second = written.events
        counts[first.token, second.token] += 1
    for token in range(WORDS):
        text = Dense(it, slot_rows, Prompt([]), config)
        begun = text.ask()[0][0][token]
        text.write({0: token})
        table = text.ask()[0]
        slot = max(range(2), key=lambda slot: worth(table[slot], "certainty"))
        same.add(slot == 0)  # where the first token was written
        chances[token] = begun * torch.tensor(table[slot][:-1]) / sum(table[slot][:-1])
    assert True in same
    assert fits(counts, chances)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"joint": True}, "decode.joint: this family has no distribution over pairs; expected false, got true"),
        ({"position_top_k": 0}, "decode.position_top_k: this family draws no places; expected 1, got 0"),
        ({"order": "random"}, "decode.order: expected auto or certainty or margin or mass, got random"),
    ],
)
def test_what_it_cannot_do_is_named(tiny_it: TinyIt, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_it().decode([Prompt([1])], settled(ENDLESS, **changes))
    assert str(caught.value) == line
