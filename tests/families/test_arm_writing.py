"""The left-to-right model writes what it would write if every step began from nothing.

The reference is written from the definition: one text at a time, without a cache, with the textbook's attention, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ARM
from insertlm.inference.sampling import choose, draws
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Insertion, Limit, Trajectory

Fits = Callable[[Tensor, Tensor], bool]
NextLogits = Callable[[ARM, list[int], list[int]], Tensor]
TinyArm = Callable[..., ARM]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
seeds = st.integers(0, 2**40)


@dataclass(frozen=True)
class Plain:
    """A loop that computes the whole row in every step."""

    arm: ARM
    next_logits: NextLogits

    def ask(self, prompt: Prompt, text: list[int]) -> Tensor:
        """Logits of words and then <eos>, [words + 1]"""
        logits = self.next_logits(self.arm, prompt.prefix, text)[-1]
        return torch.stack([logits[i] for i in [*range(len(self.arm.writable)), self.arm.specials.eos]])

    @torch.no_grad()
    def decode(self, prompt: Prompt, config: DecodeConfig) -> Trajectory:
        text, events, seed = [*prompt.start], list[Insertion](), torch.tensor([prompt.folded_seed])
        while True:
            logits = self.ask(prompt, text)
            log_probability = logits.log_softmax(-1)
            stop = float(log_probability[-1].exp())
            noise = draws(0, seed, len(events))
            word = int(choose(logits[None], noise, config.temperature, config.top_k, config.top_p))
            complete = word == len(logits) - 1
            row = len(prompt.prefix) + 1 + len(text)
            if complete or row == config.max_length or len(events) in (config.max_tokens, config.max_steps):
                reason: Limit = "max_length" if row == config.max_length else "max_steps"
                limit = None if complete else "max_tokens" if len(events) == config.max_tokens else reason
                return Trajectory(prompt.prefix, prompt.start, events, stop, limit)
            events.append(Insertion(len(events), len(text), word, float(log_probability[word]), stop))
            text.append(word)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prefix, start = draw(st.lists(words, max_size=5)), draw(st.lists(words, max_size=4))
    return Prompt(prefix, draw(seeds), start, draw(st.sampled_from([None, frozenset({len(start)})])))


configs = st.builds(
    DecodeConfig,
    max_tokens=st.sampled_from([None, None, 2, 4]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    max_steps=st.integers(1, 6),
    max_length=st.integers(10, 16),
)
batches = st.lists(prompts(), min_size=1, max_size=5)
GREEDY = DecodeConfig(max_steps=8)
HOT = DecodeConfig(max_steps=8, temperature=1.0)


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    """The same tokens in the same places; probabilities to the last few bits."""
    for a, b in zip(left, right, strict=True):
        assert [event[:3] for event in a.events] == [event[:3] for event in b.events]
        assert (a.prefix, a.start, a.complete) == (b.prefix, b.start, b.complete)
        numbers = [[t.stop_probability, *(x for e in t.events for x in e[3:])] for t in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


@given(batches, configs, st.integers(0, 3), st.booleans())
@settings(HEAVY, max_examples=60)
def test_a_cache_changes_no_token_and_no_probability(
    tiny_arm: TinyArm, next_logits: NextLogits, batch: list[Prompt], config: DecodeConfig, seed: int, prefix_lm: bool
) -> None:
    arm = tiny_arm(seed=seed, prefix_lm=prefix_lm)
    plain = Plain(arm, next_logits)
    written = arm.decode(batch, config)
    assert_same(written, [plain.decode(prompt, config) for prompt in batch])
    for prompt, trajectory in zip(batch, written, strict=True):
        assert trajectory.ids[: len(prompt.start)] == prompt.start
        assert set(trajectory.ids) <= set(range(WORDS))


@given(batches, configs, st.randoms(use_true_random=False), st.booleans())
@settings(HEAVY, max_examples=30)
def test_a_row_does_not_depend_on_its_batch(
    tiny_arm: TinyArm, batch: list[Prompt], config: DecodeConfig, random: Any, prefix_lm: bool
) -> None:
    arm = tiny_arm(prefix_lm=prefix_lm)
    together = arm.decode(batch, config)
    assert_same([arm.decode([prompt], config)[0] for prompt in batch], together)
    company = [
        *batch,
        *(replace(prompt, prefix=[2, *prompt.prefix[1:]], seed=prompt.folded_seed + 1) for prompt in batch),
    ]
    order = random.sample(range(len(company)), len(company))
    shuffled = arm.decode([company[i] for i in order], config)
    assert_same([shuffled[order.index(i)] for i in range(len(batch))], together)


def test_each_token_is_computed_once_and_finished_texts_leave(tiny_arm: TinyArm) -> None:
    arm, sizes = tiny_arm(), list[int]()
    arm.unembedding.weight.data[arm.specials.eos] = 0.0  # with logits of both signs beside it, never the largest
    arm.backbone.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    batch = [Prompt([0] * 1), Prompt([0] * 4, start=[1, 2]), Prompt([0] * 6)]
    written = arm.decode(batch, DecodeConfig(max_length=10))
    assert [len(t.events) for t in written] == [8, 3, 3]
    assert sizes == [2 + 7 + 7, 3, 3, 3, 1, 1, 1, 1, 1]


def test_special_tokens_are_never_written_however_likely(tiny_arm: TinyArm) -> None:
    arm = tiny_arm(words=3)
    special = torch.randn(arm.vocabulary - 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    special[arm.specials.eos - 3] = 0.0
    arm.unembedding.weight.data[3:] = 1e3 * special  # all but <eos>; of six, some are huge whatever the hidden row
    batch = [Prompt([0, 1], seed) for seed in range(50)]
    for trajectory in arm.decode(batch, HOT):
        assert set(trajectory.ids) <= {0, 1, 2}
        assert all(event.log_probability > -30 for event in trajectory.events)  # they take no mass either


def test_seeds_make_the_difference_only_where_something_is_drawn(tiny_arm: TinyArm) -> None:
    arm = tiny_arm()
    batch = [Prompt([1, 2], seed) for seed in range(20)]
    for config, several in ((GREEDY, False), (DecodeConfig(max_steps=8, temperature=1.0, top_k=1), False), (HOT, True)):
        written = arm.decode(batch, config)
        assert written == arm.decode(batch, config)
        assert (len({(*t.ids, t.complete) for t in written}) > 1) == several


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_texts_come_as_often_as_they_should(
    tiny_arm: TinyArm, next_logits: NextLogits, fits: Fits, temperature: float
) -> None:
    """Texts of at most two tokens: that <eos> is drawn like any word, and that the steps' draws are independent."""
    arm, prompt = tiny_arm(words=3, seed=1), Prompt([2], start=[1])
    plain = Plain(arm, next_logits)
    counts = dict.fromkeys([(), *product(range(3)), *product(range(3), repeat=2)], 0)
    for trajectory in arm.decode(
        [replace(prompt, seed=seed) for seed in range(6000)], DecodeConfig(max_steps=2, temperature=temperature)
    ):
        counts[tuple(event.token for event in trajectory.events)] += 1

    @torch.no_grad()
    def chance(text: tuple[int, ...]) -> float:
        steps = [(plain.ask(prompt, [1, *text[:n]]) / temperature).softmax(-1) for n in range(len(text) + 1)]
        found = float(torch.stack([p[word] for p, word in zip(steps, text, strict=False)]).prod()) if text else 1.0
        return found if len(text) == 2 else found * float(steps[-1][3])

    expected = [chance(text) for text in counts]
    assert sum(expected) == pytest.approx(1)
    assert fits(torch.tensor(list(counts.values())), torch.tensor(expected))


@pytest.mark.parametrize(
    ("start", "gaps", "expected"), [([2], {0}, "[1]"), ([2], {0, 1}, "[1]"), ([2, 3], set(), "[2]"), ([], set(), "[0]")]
)
def test_only_the_end_may_be_open(tiny_arm: TinyArm, start: list[int], gaps: set[int], expected: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_arm().decode([Prompt([1, 2, 3]), Prompt([1], start=start, open=frozenset(gaps))], GREEDY)
    reason = f"this family writes at the end of the text alone, expected {expected}"
    assert str(caught.value) == f"a prompt opens the gaps {sorted(gaps)}; {reason}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"order": "mass"}, "decode.order: expected auto, got mass"),
        ({"parallel": 2}, "decode.parallel: this family writes one token a step, got 2"),
        ({"joint": True}, "decode.joint: this family has no distribution over pairs; expected false, got true"),
        ({"position_top_k": 0}, "decode.position_top_k: this family draws no places; expected 1, got 0"),
        ({"stop_threshold": 0.3}, "decode.stop_threshold: this family ends without one; expected 0.5, got 0.3"),
    ],
)
def test_what_it_cannot_do_is_named(tiny_arm: TinyArm, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_arm().decode([Prompt([1])], DecodeConfig(**changes))
    assert str(caught.value) == line
