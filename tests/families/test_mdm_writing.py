"""The masked diffusion model writes what its predictions say: with right ones, right samples of a known distribution.

The reference decoder keeps one block as a list, runs the network densely in every step, and leaps over none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from itertools import product
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.noise import uniform
from insertlm.families import unmasking
from insertlm.families.mdm import MDM, MdmConfig, total_noise
from insertlm.families.unmasking import UnmaskingWriter
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Outcomes = dict[tuple[int, ...], float]

WORDS, BLOCK = 4, 5
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
batches = st.lists(st.builds(Prompt, st.lists(words, max_size=5), st.integers(0, 2**40)), min_size=1, max_size=4)
configs = st.builds(
    DecodeConfig,
    order=st.sampled_from(["certainty", "margin"]),
    parallel=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
) | st.builds(
    DecodeConfig,
    order=st.sampled_from(["auto", "random"]),
    max_steps=st.sampled_from([1, 2, 3, 8, 300]),
    temperature=st.sampled_from([0.0, 1.0]),
)


def tiny_mdm(words: int = WORDS, block: int = BLOCK) -> MDM:
    """In float64, with weights where a new model has zeros, and unsure of itself: pads are not rare."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ModelConfig(layers=2, width=8, heads=2, hidden=12)
        mdm = MdmConfig(block=block).build(model, WordTokenizer(tuple(map(str, range(words))))).double().eval()
        for parameter in mdm.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return mdm.requires_grad_(False)


# --- The reference


@dataclass
class Dense:
    """One text under way. steps: tau-leaping's draws"""

    mdm: MDM
    attention: Softmax
    prompt: Prompt
    settings: DecodeConfig
    steps: list[int]

    def __post_init__(self) -> None:
        self.block = [self.mdm.specials.mask] * BLOCK
        self.events: list[tuple[int, int, float]] = []  # rank, token, log-probability

    @property
    def masked(self) -> list[int]:
        return [cell for cell, token in enumerate(self.block) if token == self.mdm.specials.mask]

    def write(self) -> None:
        if self.settings.order in ("auto", "random"):
            count = self.settings.max_steps
            for k in range(count):
                self._unmask([cell for cell in range(BLOCK) if self.steps[cell] == k], 1 - k / count)
        else:
            while self.masked:
                time = len(self.masked) / BLOCK
                ordered = self.ask(time).exp().sort(-1, descending=True).values
                sure = ordered[:, 0] if self.settings.order == "certainty" else ordered[:, 0] - ordered[:, 1]
                best = sorted(self.masked, key=lambda cell: (-float(sure[cell]), cell))
                self._unmask(sorted(best[: self.settings.parallel or None]), time)

    def ask(self, time: float) -> Tensor:
        """log P(token) of every cell: [BLOCK, words and <pad>]"""
        assert self.mdm.time is not None and self.mdm.norm is not None
        row = torch.tensor([*self.prompt.prefix, self.mdm.specials.bos, *self.block])
        everyone = torch.ones(len(row), len(row), dtype=torch.bool)
        condition = self.mdm.time(total_noise(torch.tensor([max(time, 1e-3)]))), torch.zeros_like(row)
        x = self.mdm.backbone(
            row,
            torch.arange(len(row)),
            lambda layer, q, k, v: self.attention(q, k, v, everyone),
            condition=condition,
        )
        logits = self.mdm.norm(x, condition)[-BLOCK:] @ self.mdm.unembedding.weight.T
        expected: Tensor = logits[:, [*range(WORDS), self.mdm.specials.pad]].log_softmax(-1)
        return expected

    def _unmask(self, cells: list[int], time: float) -> None:
        log_p = self.ask(time)
        choices = {}
        for cell in cells:
            noise = uniform(1, torch.tensor(self.prompt.folded_seed), cell, torch.arange(WORDS + 1))
            gumbel = -(-noise.log()).log() if self.settings.temperature else torch.zeros(())
            choices[cell] = int((log_p[cell] + gumbel).argmax())
            self.block[cell] = [*range(WORDS), self.mdm.specials.pad][choices[cell]]
        written = [cell for cell, token in enumerate(self.block) if token < WORDS]
        self.events += [
            (written.index(cell), self.block[cell], float(log_p[cell, choice]))
            for cell, choice in choices.items()
            if choice < WORDS
        ]

    @property
    def text(self) -> list[int]:
        return [token for token in self.block if token < WORDS]


def drawn_steps(mdm: MDM, batch: list[Prompt], config: DecodeConfig) -> list[list[int]]:
    writer = mdm.writer(batch, config, 100)
    assert isinstance(writer, UnmaskingWriter)
    steps: list[list[int]] = writer.steps.tolist()
    return steps


@given(batches, configs)
@settings(HEAVY, max_examples=50)
def test_the_plain_loop_writes_the_same(softmax_attention: Softmax, batch: list[Prompt], config: DecodeConfig) -> None:
    """Whatever the order; in tau-leaping, leaping over steps at which nothing happens."""
    mdm = tiny_mdm()
    steps = drawn_steps(mdm, batch, config)
    for prompt, trajectory, row in zip(batch, mdm.decode(batch, config), steps, strict=True):
        dense = Dense(mdm, softmax_attention, prompt, config, row)
        dense.write()
        assert trajectory.ids == dense.text
        assert [event[1:3] for event in trajectory.events] == [event[:2] for event in dense.events]
        found = [event.log_probability for event in trajectory.events]
        assert found == pytest.approx([event[2] for event in dense.events], abs=1e-7)
        assert (trajectory.prefix, trajectory.complete, trajectory.stop_probability) == (prompt.prefix, True, None)


def test_the_untrained_model_writes_pads_and_words() -> None:
    """Else the tests here would test less than they say."""
    mdm = tiny_mdm()
    batch = [Prompt([1, 2], seed) for seed in range(50)]
    sizes = {len(text.ids) for text in mdm.decode(batch, DecodeConfig(temperature=1.0))}
    assert len(sizes) >= 3


@given(batches, configs)
@settings(HEAVY, max_examples=30)
def test_a_text_does_not_depend_on_its_batch(batch: list[Prompt], config: DecodeConfig) -> None:
    mdm = tiny_mdm()

    def shown(trajectory: Trajectory) -> list[tuple[int, int, int]]:
        return [event[:3] for event in trajectory.events]

    before = [[*prompt.prefix] for prompt in batch]
    together = mdm.decode(batch, config)
    assert [prompt.prefix for prompt in batch] == before
    for prompt, trajectory in zip(batch, together, strict=True):
        (alone,) = mdm.decode([prompt], config)
        assert shown(alone) == shown(trajectory)
        assert all(token < WORDS for token in trajectory.ids)


# --- Infilling


@st.composite
def blanks(draw: st.DrawFn) -> Prompt:
    """A text with gaps of known lengths that fills the block or less."""
    cells = draw(st.lists(words | st.none(), max_size=BLOCK))
    start = [cell for cell in cells if cell is not None]
    gap = [sum(cell is not None for cell in cells[:k]) for k, cell in enumerate(cells) if cell is None]
    bounds = {rank: Bounds(gap.count(rank), gap.count(rank)) for rank in gap}
    prefix, seed = draw(st.lists(words, max_size=4)), draw(st.integers(0, 2**40))
    heads, banned = draw(st.sets(words, min_size=1, max_size=2)), draw(st.sets(words, max_size=2))
    headed = draw(st.frozensets(st.sampled_from(gap))) if gap and heads - banned else frozenset()
    runs = tuple((word,) for word in banned)
    return Prompt(prefix, seed, start, frozenset(gap), bounds, runs, (), headed, frozenset(heads))


@given(st.lists(blanks(), min_size=1, max_size=4), configs)
@settings(HEAVY, max_examples=50)
def test_every_gap_gets_the_tokens_it_is_to_get(batch: list[Prompt], config: DecodeConfig) -> None:
    mdm = tiny_mdm()
    for prompt, written in zip(batch, mdm.decode(batch, config), strict=True):
        assert written.complete
        inserted = [order >= 0 for order in written.order]
        assert [token for token, new in zip(written.ids, inserted, strict=True) if not new] == prompt.start
        ranks = [sum(not new for new in inserted[:k]) for k, new in enumerate(inserted) if new]
        assert {rank: ranks.count(rank) for rank in ranks} == {
            rank: least for rank, (least, _) in prompt.bounds.items()
        }
        assert not any((event.token,) in prompt.banned for event in written.events)
        for rank in prompt.headed:
            assert written.ids[rank + sum(other < rank for other in ranks)] in prompt.heads
        assert all(event.token < WORDS for event in written.events)
        [alone] = mdm.decode([prompt], config)
        assert [event[:3] for event in alone.events] == [event[:3] for event in written.events]


def test_infilling_sets_out_from_the_share_of_masks() -> None:
    mdm = tiny_mdm()
    spy = watched(mdm)
    prompt = Prompt([1], start=[2, 3], open=frozenset({1}), bounds={1: Bounds(2, 2)})
    mdm.decode([prompt], DecodeConfig(max_steps=1))
    mdm.decode([prompt], DecodeConfig(order="certainty"))
    torch.testing.assert_close(torch.cat(spy.times), total_noise(torch.tensor([2, 2, 1]) / BLOCK))


# --- Sampling, with predictions that are exactly right


# A distribution over blocks of three cells with three tokens each: two words and <pad>.
JOINT = 0.05 + torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(5)).double() ** 4
JOINT /= JOINT.sum()


def marginals(known: dict[int, int]) -> Tensor:
    """[3 cells, 3 tokens], given some."""
    possible = torch.zeros_like(JOINT)
    possible[tuple(known.get(cell, slice(None)) for cell in range(3))] = 1
    table = JOINT * possible
    each = [table.sum([axis for axis in range(3) if axis != cell]) for cell in range(3)]
    return torch.stack(each) / table.sum()


def predict_exactly(writing: Any, time: Tensor, cell: Tensor) -> Tensor:
    """Stands in for the network."""
    index = {int(token): number for number, token in enumerate(writing.family.words)}
    rows = [tuple(index.get(token, -1) for token in block) for block in writing.tokens.tolist()]
    tables = {row: marginals({at: token for at, token in enumerate(row) if token >= 0}) for row in set(rows)}
    everywhere = torch.stack([tables[row] for row in rows])
    return everywhere.gather(1, cell[:, :, None].expand(-1, -1, 3)).log()


def truth() -> Outcomes:
    """Texts and their chances."""
    outcomes: Outcomes = {}
    for block in product(range(3), repeat=3):
        outcomes[text_of(block)] = outcomes.get(text_of(block), 0.0) + float(JOINT[block])
    return outcomes


def leaps(count: int) -> Outcomes:
    """The same, as tau-leaping writes them: every cell's step is any of `count`."""
    outcomes = dict.fromkeys(truth(), 0.0)
    for steps in product(range(count), repeat=3):
        for block in product(range(3), repeat=3):
            chance = count**-3.0
            for cell in range(3):
                known = {other: block[other] for other in range(3) if steps[other] < steps[cell]}
                chance *= float(marginals(known)[cell, block[cell]])
            outcomes[text_of(block)] += chance
    return outcomes


def text_of(block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token for token in block if token < 2)


def sampled(monkeypatch: pytest.MonkeyPatch, config: DecodeConfig, count: int = 6000) -> Outcomes:
    """How often each text was written."""
    monkeypatch.setattr(UnmaskingWriter, "predict", partialmethod(predict_exactly))
    counts: Outcomes = {}
    for trajectory in tiny_mdm(2, 3).decode([Prompt([], seed) for seed in range(count)], config):
        text = tuple(trajectory.ids)
        counts[text] = counts.get(text, 0) + 1
    return counts


def counted(counts: Outcomes, chances: Outcomes) -> tuple[Tensor, Tensor]:
    assert counts.keys() <= chances.keys()
    return torch.tensor([counts.get(text, 0) for text in chances]), torch.tensor(list(chances.values()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_leaps_sample_products_of_marginals(fits: Fits, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """All cells at once if there is one step, else in as many groups, of every split with its chance."""
    found = sampled(monkeypatch, DecodeConfig(temperature=1.0, max_steps=count))
    assert fits(*counted(found, leaps(count)))
    assert not fits(*counted(found, truth()))  # the test can tell


def test_many_leaps_sample_the_distribution_itself(fits: Fits, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampled(monkeypatch, DecodeConfig(temperature=1.0, max_steps=100_000))
    assert fits(*counted(found, truth()))


@pytest.mark.parametrize("config", [DecodeConfig(order="certainty"), DecodeConfig(order="margin")])
def test_one_token_a_step_samples_the_distribution_in_any_order(
    fits: Fits, monkeypatch: pytest.MonkeyPatch, config: DecodeConfig
) -> None:
    found = sampled(monkeypatch, msgspec.structs.replace(config, temperature=1.0))
    assert fits(*counted(found, truth()))


@pytest.mark.parametrize(
    ("order", "parallel", "first"),
    [("certainty", 1, {0}), ("certainty", 2, {0, 1}), ("margin", 1, {1}), ("margin", 2, {1, 2})],
)
def test_certainty_and_margin_begin_elsewhere(
    monkeypatch: pytest.MonkeyPatch, order: Literal["certainty", "margin"], parallel: int, first: set[int]
) -> None:
    table = torch.tensor([[0.50, 0.48, 0.02], [0.45, 0.30, 0.25], [0.40, 0.36, 0.24]]).log()
    monkeypatch.setattr(UnmaskingWriter, "predict", lambda _, time, cell: table[cell])
    settings = DecodeConfig(order=order, parallel=parallel)
    mdm = tiny_mdm(2, 3)
    step = mdm.writer([Prompt([])], settings, mdm.check([Prompt([])], settings)).step(0)
    assert {*step.place[0].tolist()} == first


def test_temperature_top_k_and_top_p_act_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest = text_of(tuple(marginals({}).argmax(1).tolist()))
    for config in (DecodeConfig(), DecodeConfig(temperature=1.0, top_k=1), DecodeConfig(temperature=1.0, top_p=1e-6)):
        assert list(sampled(monkeypatch, msgspec.structs.replace(config, max_steps=1), 20)) == [likeliest]


# --- When the network runs


@dataclass
class Spy:
    """The times the network was asked for."""

    times: list[Tensor]

    def __call__(self, module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.times.append(inputs[0])


def watched(mdm: MDM) -> Spy:
    assert mdm.time is not None
    spy = Spy([])
    mdm.time.register_forward_hook(spy)
    return spy


def test_the_network_runs_once_for_every_step_of_a_text_and_at_its_time() -> None:
    mdm, config = tiny_mdm(), DecodeConfig(max_steps=40)
    prompt = Prompt([1], 7)
    (steps,) = drawn_steps(mdm, [prompt], config)
    spy = watched(mdm)
    mdm.decode([prompt], config)
    expected = total_noise(torch.tensor([1 - k / 40 for k in sorted(set(steps))]))
    torch.testing.assert_close(torch.cat(spy.times), expected)


@pytest.mark.parametrize(("count", "last"), [(1, 1.0), (4, 0.25), (100_000, 1e-3)])
def test_the_last_step_has_the_noise_that_is_left(monkeypatch: pytest.MonkeyPatch, count: int, last: float) -> None:
    """But no less than in training. All cells wait for the last step here."""
    monkeypatch.setattr(unmasking, "randint", lambda high, *counters: (high - 1).expand(1, BLOCK))
    mdm = tiny_mdm()
    spy = watched(mdm)
    mdm.decode([Prompt([1])], DecodeConfig(max_steps=count))
    torch.testing.assert_close(torch.cat(spy.times), total_noise(torch.tensor([last])))


@pytest.mark.parametrize(("parallel", "left"), [(1, [5, 4, 3, 2, 1]), (2, [5, 3, 1]), (0, [5])])
def test_adaptive_orders_know_the_masked_share(parallel: int, left: list[int]) -> None:
    mdm = tiny_mdm()
    spy = watched(mdm)
    mdm.decode([Prompt([1])], DecodeConfig(order="certainty", parallel=parallel))
    torch.testing.assert_close(torch.cat(spy.times), total_noise(torch.tensor(left) / BLOCK))


def test_a_limit_on_steps_cuts_an_adaptive_order_short() -> None:
    (text,) = tiny_mdm().decode([Prompt([1])], DecodeConfig(order="margin", max_steps=3))
    assert not text.complete
    assert len(text.ids) <= 3
