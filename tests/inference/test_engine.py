"""What decoding promises: nothing given changes, nothing special is written, no row depends on its batch, and every
event is what the model, computed densely and one sequence at a time, says.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.ilm import ILM
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TinyIlm = Callable[..., ILM]

WORDS = 6
words = st.integers(0, WORDS - 1)
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
ENDLESS = DecodeConfig(stop_threshold=1.0, max_steps=6)  # an untrained model is never so sure


@st.composite
def prompts(draw: st.DrawFn, shortest: int = 0) -> Prompt:
    """shortest: of the prefix"""
    prefix, start = draw(st.lists(words, min_size=shortest, max_size=5)), draw(st.lists(words, max_size=4))
    gaps = st.frozensets(st.integers(0, len(start)))
    return Prompt(prefix, draw(st.integers(0, 2**40)), start, draw(st.none() | gaps))


configs = st.builds(
    DecodeConfig,
    stop_threshold=st.sampled_from([0.0, 0.45, 0.5, 0.55, 1.0]),
    joint=st.booleans(),
    position_top_k=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    max_steps=st.integers(1, 6),
    max_length=st.integers(11, 18),
)
batches = st.integers(0, 1).flatmap(lambda shortest: st.lists(prompts(shortest), min_size=1, max_size=5))


# --- The model, densely


@dataclass
class Dense:
    """One sequence under way, in reading order: <stop> prefix <bos> text."""

    ilm: ILM
    attention: Softmax
    prompt: Prompt
    text: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)  # of <bos> and each token of the text

    def __post_init__(self) -> None:
        self.text = [*self.prompt.start]
        gaps = self.prompt.open
        self.open = [gaps is None or gap in gaps for gap in range(len(self.text) + 1)]

    def insert(self, rank: int, token: int) -> None:
        assert self.open[rank]
        self.text.insert(rank, token)
        self.open.insert(rank + 1, True)

    @torch.no_grad()
    def ask(self) -> tuple[Tensor, float]:
        """log P(rank, token) over all ranks and words, −inf where closed: [ranks, words]; and the chance to stop."""
        special, prefix = self.ilm.specials, self.prompt.prefix
        row = torch.tensor([special.stop, *prefix, special.bos, *self.text])
        place = torch.arange(len(row))
        inside = (place >= 1) & (place <= len(prefix))
        mask = ~inside[:, None] | inside | torch.tensor(not self.ilm.model.prefix_lm)
        hidden = self.ilm.backbone(row, place, lambda layer, q, k, v: self.attention(q, k, v, mask))
        logits = (hidden[1 + len(prefix) :] @ self.ilm.unembedding.weight.T)[:, : len(self.ilm.writable)]
        logits = logits.masked_fill(~torch.tensor(self.open)[:, None], -torch.inf)
        return logits - logits.logsumexp((0, 1)), float(self.ilm.stop(hidden[:1]).softmax(-1)[0, 0])


def settled(settings: DecodeConfig, **changes: Any) -> DecodeConfig:
    return msgspec.structs.replace(settings, **changes)


def choices(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    return [(event.step, event.rank, event.token) for event in trajectory.events]


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    """The same tokens in the same places; probabilities to the last few bits."""
    for a, b in zip(left, right, strict=True):
        assert choices(a) == choices(b)
        assert (a.prefix, a.start, a.complete) == (b.prefix, b.start, b.complete)
        numbers = [[t.stop_probability, *(x for e in t.events for x in e[3:])] for t in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


@given(batches, configs, st.booleans())
@settings(HEAVY, max_examples=60)
def test_every_probability_is_the_dense_one(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool
) -> None:
    """With `prefix_lm` this is also: the cached prefix is the computed one."""
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    for prompt, trajectory in zip(batch, ilm.decode(batch, config), strict=True):
        dense = Dense(ilm, softmax_attention, prompt)
        for event in trajectory.events:
            joint, stop = dense.ask()
            assert event.log_probability == pytest.approx(float(joint[event.rank, event.token]), abs=1e-9)
            assert event.stop_probability == pytest.approx(stop, abs=1e-9)
            dense.insert(event.rank, event.token)
        assert trajectory.stop_probability == pytest.approx(dense.ask()[1], abs=1e-9)
        assert trajectory.ids == dense.text


@given(batches, st.booleans(), st.booleans())
@settings(HEAVY, max_examples=40)
def test_greedy_takes_the_largest(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, batch: list[Prompt], prefix_lm: bool, joint: bool
) -> None:
    """Two-step: the slot of the largest mass, then its likeliest token. Joint: the likeliest pair."""
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    written = ilm.decode(batch, settled(ENDLESS, joint=joint))
    assert written == ilm.decode(batch, settled(ENDLESS, joint=joint))
    for prompt, trajectory in zip(batch, written, strict=True):
        dense = Dense(ilm, softmax_attention, prompt)
        for event in trajectory.events:
            table = dense.ask()[0]
            rank = int((table.max(1).values if joint else table.logsumexp(1)).argmax())
            assert (event.rank, event.token) == (rank, int(table[rank].argmax()))
            dense.insert(rank, event.token)


def worth(row: Tensor, order: str) -> float:
    """What a slot offers, from log P(token | slot)."""
    best, second, *_ = map(float, row.exp().sort(descending=True).values)
    return best if order == "certainty" else best - second


@pytest.mark.parametrize("order", ["certainty", "margin"])
@given(batches, st.booleans())
@settings(HEAVY, max_examples=20)
def test_other_orders_take_the_surest_of_the_slots_in_play(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, order: str, batch: list[Prompt], prefix_lm: bool
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    with torch.no_grad():
        ilm.unembedding.weight *= 20  # so that some slots have little mass
    written = ilm.decode(batch, settled(ENDLESS, order=order))
    for prompt, trajectory in zip(batch, written, strict=True):
        dense = Dense(ilm, softmax_attention, prompt)
        for event in trajectory.events:
            table = dense.ask()[0]
            mass = table.logsumexp(1)
            slots = [rank for rank in range(len(table)) if mass[rank].exp() >= 0.5 * mass.max().exp()]
            rank = max(slots, key=lambda slot: worth(table[slot] - mass[slot], order))
            assert (event.rank, event.token) == (rank, int(table[rank].argmax()))
            assert event.log_probability == pytest.approx(float(table[rank].max()), abs=1e-9)
            dense.insert(rank, event.token)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "certainty", "joint": True}, "decode.joint: expected false with decode.order certainty, got true"),
        ({"order": "margin", "position_top_k": 0}, "decode.position_top_k: expected 1 with decode.order margin"),
        ({"order": "random"}, "decode.order: expected auto or mass or certainty or margin, got random"),
    ],
)
def test_settings_that_do_not_go_together(tiny_ilm: TinyIlm, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        tiny_ilm().decode([Prompt([1])], DecodeConfig(**changes))


# --- Promises


@given(batches, configs, st.booleans())
@settings(HEAVY, max_examples=80)
def test_what_was_given_stays_and_only_words_go_into_open_gaps(
    tiny_ilm: TinyIlm, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool
) -> None:
    for prompt, written in zip(batch, tiny_ilm(prefix_lm=prefix_lm).decode(batch, config), strict=True):
        assert (written.prefix, written.start) == (prompt.prefix, prompt.start)
        pairs = list(zip(written.ids, written.order, strict=True))
        assert [token for token, event in pairs if event < 0] == prompt.start
        gap = 0
        for token, event in pairs:
            gap += event < 0
            assert event < 0 or (0 <= token < WORDS and (prompt.open is None or gap in prompt.open))


@given(batches, configs, st.booleans())
@settings(HEAVY, max_examples=60)
def test_limits_and_threshold_end_a_sequence_and_nothing_else(
    tiny_ilm: TinyIlm, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool
) -> None:
    for prompt, written in zip(batch, tiny_ilm(prefix_lm=prefix_lm).decode(batch, config), strict=True):
        length = len(prompt.prefix) + 2 + len(written.ids)
        assert config.max_length is not None
        assert length <= config.max_length
        assert [event.step for event in written.events] == list(range(len(written.events)))
        *stops, last = [e.stop_probability or 0.0 for e in written.events] + [written.stop_probability or 0.0]
        assert all(stop < config.stop_threshold for stop in stops)
        assert written.complete == (last >= config.stop_threshold)
        closed = prompt.open is not None and not prompt.open
        full = length == config.max_length or len(written.events) == config.max_steps
        assert written.complete or full or closed
        assert not (closed and written.events)


def test_the_limit_of_the_model_holds_whatever_is_asked(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm()
    ilm.model = msgspec.structs.replace(ilm.model, max_length=7)
    [written] = ilm.decode([Prompt([1, 2])], settled(ENDLESS, max_length=50))
    assert (len(written.ids), written.complete) == (3, False)


def test_rows_that_leave_take_their_prefix_along(tiny_ilm: TinyIlm) -> None:
    """The first, the last and the middle one leave in turn: the longer the prefix, the earlier."""
    ilm, config = tiny_ilm(prefix_lm=True), settled(ENDLESS, max_length=10, max_steps=50)
    prefixes = [[0, 1, 2, 3, 4, 5], [1, 1], [3, 4, 5, 0], [2], [5, 4, 3, 2, 1]]
    batch = [Prompt(prefix) for prefix in prefixes]
    together = ilm.decode(batch, config)
    assert [len(trajectory.ids) for trajectory in together] == [2, 6, 4, 7, 3]
    assert_same([ilm.decode([prompt], config)[0] for prompt in batch], together)


@given(batches, configs, st.booleans(), st.randoms(use_true_random=False))
@settings(HEAVY, max_examples=60)
def test_a_row_does_not_depend_on_its_batch(
    tiny_ilm: TinyIlm, batch: list[Prompt], config: DecodeConfig, prefix_lm: bool, random: Any
) -> None:
    ilm = tiny_ilm(prefix_lm=prefix_lm)
    together = ilm.decode(batch, config)
    assert_same([ilm.decode([prompt], config)[0] for prompt in batch], together)
    company = [*batch, *(replace(prompt, prefix=[2, *prompt.prefix[1:]], seed=prompt.seed + 1) for prompt in batch)]
    order = random.sample(range(len(company)), len(company))
    shuffled = ilm.decode([company[i] for i in order], config)
    assert_same([shuffled[order.index(i)] for i in range(len(batch))], together)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_are_never_written_however_likely(tiny_ilm: TinyIlm, joint: bool, temperature: float) -> None:
    ilm = tiny_ilm(words=3)
    generator = torch.Generator().manual_seed(0)
    special = torch.randn(ilm.vocabulary - 3, 8, generator=generator, dtype=torch.float64)
    ilm.unembedding.weight.data[3:] = 1e3 * special  # of seven, some are huge whatever the hidden row
    config = settled(ENDLESS, joint=joint, temperature=temperature, position_top_k=0)
    batch = [Prompt([0, 1], seed) for seed in range(50)]
    logits: list[Tensor] = []
    ilm.backbone.register_forward_hook(lambda module, inputs, hidden: logits.append(hidden @ ilm.unembedding.weight.T))
    for trajectory in ilm.decode(batch, config):
        assert len(trajectory.ids) == config.max_steps
        assert set(trajectory.ids) <= {0, 1, 2}
        assert all(event.log_probability > -30 for event in trajectory.events)  # they take no mass either
    assert all(bool((rows[:, 3:].max(1).values > 100 + rows[:, :3].max(1).values).all()) for rows in logits)


@pytest.mark.parametrize("joint", [False, True])
def test_without_an_open_gap_nothing_is_written(tiny_ilm: TinyIlm, joint: bool) -> None:
    ilm, config = tiny_ilm(), settled(ENDLESS, joint=joint)
    closed, other = Prompt([1], start=[2, 3], open=frozenset()), Prompt([0, 1], start=[2])
    (alone,) = ilm.decode([closed], config)
    assert (alone.ids, alone.complete) == ([2, 3], False)
    assert_same(ilm.decode([closed, other], config), [alone, *ilm.decode([other], config)])
    assert_same(ilm.decode([other, closed], config), [*ilm.decode([other], config), alone])


def test_seeds_make_the_difference_only_where_something_is_drawn(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm()
    batch = [Prompt([1, 2], seed) for seed in range(20)]
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"joint": True}, False),
        ({"joint": True, "position_top_k": 0}, False),  # of two steps alone
        ({"top_k": 1, "temperature": 1.0}, False),
        ({"position_top_k": 0}, True),
        ({"temperature": 1.0}, True),
        ({"joint": True, "temperature": 1.0}, True),
    ]
    for changes, several in cases:
        outcomes = {tuple(choices(t)) for t in ilm.decode(batch, settled(ENDLESS, **changes))}
        assert (len(outcomes) > 1) == several


# --- Sampling


@dataclass(frozen=True)
class Tree:
    """The exact distribution of a few insertions."""

    dense: Dense
    pick: Callable[[Tensor], Tensor]  # log-probabilities [ranks, words] to those that are drawn from

    def outcomes(self, steps: int) -> dict[tuple[tuple[int, int], ...], float]:
        if steps == 0:
            return {(): 1.0}
        found = {}
        table = self.pick(self.dense.ask()[0]).exp()
        for rank, token in table.nonzero().tolist():
            after = deepcopy(self.dense)
            after.insert(rank, token)
            for rest, chance in replace(self, dense=after).outcomes(steps - 1).items():
                found[((rank, token), *rest)] = chance * float(table[rank, token])
        return found


def cooled(table: Tensor, temperature: float) -> Tensor:
    return (table / temperature).flatten().log_softmax(0).view_as(table)


def best_slot(table: Tensor) -> Tensor:
    best = table.logsumexp(1, keepdim=True) == table.logsumexp(1).max()
    return table.log_softmax(1).masked_fill(~best, -torch.inf)


@pytest.mark.parametrize(
    ("changes", "pick"),
    [
        ({"joint": True, "temperature": 1.0}, lambda table: table),
        ({"joint": True, "temperature": 2.0}, lambda table: cooled(table, 2.0)),
        ({"position_top_k": 0, "temperature": 1.0}, lambda table: table),
        ({"position_top_k": 1, "temperature": 1.0}, best_slot),
    ],
    ids=["joint", "joint, hot", "two steps", "two steps, best slot"],
)
def test_sequences_come_as_often_as_they_should(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, fits: Fits, changes: dict[str, Any], pick: Callable[[Tensor], Tensor]
) -> None:
    """Two insertions into a text of one token: slots and tokens, and that the steps' draws are independent."""
    ilm = tiny_ilm(words=3, seed=1)
    prompt = Prompt([], start=[1])
    exact = Tree(Dense(ilm, softmax_attention, prompt), pick).outcomes(2)
    assert sum(exact.values()) == pytest.approx(1)
    names = list(exact)
    counts = torch.zeros(len(names))
    batch = [replace(prompt, seed=seed) for seed in range(6000)]
    for trajectory in ilm.decode(batch, settled(ENDLESS, max_steps=2, **changes)):
        counts[names.index(tuple((event.rank, event.token) for event in trajectory.events))] += 1
    assert len(names) > 3
    assert fits(counts, torch.tensor(list(exact.values())))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_only_the_best_places_are_in_play(tiny_ilm: TinyIlm, softmax_attention: Softmax, k: int) -> None:
    ilm = tiny_ilm()
    prompt = Prompt([0, 1], start=[2, 3, 4])
    mass = Dense(ilm, softmax_attention, prompt).ask()[0].logsumexp(1)
    batch = [replace(prompt, seed=seed) for seed in range(300)]
    written = ilm.decode(batch, settled(ENDLESS, max_steps=1, position_top_k=k))
    assert {t.events[0].rank for t in written} == set(mass.topk(k).indices.tolist())


# --- What cannot be decoded


def test_no_prompts_no_sequences(tiny_ilm: TinyIlm) -> None:
    assert tiny_ilm().decode([], ENDLESS) == []


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (Prompt([1] * 5, start=[2] * 4), "a prompt has 11 tokens, 2 of them special; 10 are allowed"),
        (Prompt([1, 13]), "a prompt has the id 13; the vocabulary has 13"),
        (Prompt([1], start=[-1]), "a prompt has the id -1; the vocabulary has 13"),
        (Prompt([1], start=[2], open=frozenset({2})), "a prompt opens gap 2; its text of 1 tokens has gaps 0 … 1"),
        (Prompt([1], start=[2], open=frozenset({-1})), "a prompt opens gap -1; its text of 1 tokens has gaps 0 … 1"),
    ],
)
def test_impossible_prompts_are_named(tiny_ilm: TinyIlm, prompt: Prompt, line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_ilm().decode([Prompt([1, 2, 3], start=[0] * 5), prompt], settled(ENDLESS, max_length=10))
    assert str(caught.value) == line
