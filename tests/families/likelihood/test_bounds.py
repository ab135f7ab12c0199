"""Bounds and left-to-right likelihoods against plain definitions, for models so small that all orders can be listed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.noise import uniform
from insertlm.families.arm import ARM, ArmConfig
from insertlm.families.base import Family
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.likelihood import states as module
from insertlm.families.likelihood.insertions import Insertions
from insertlm.families.likelihood.masks import Masks
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods
from insertlm.families.mdm import MDM, MdmConfig, lay_out
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MODEL = ModelConfig(layers=2, width=8, heads=2, hidden=12)
WORDS = WordTokenizer(("0", "1", "2"), reserved=1)
TEXTS = [([], [0, 1, 2]), ([1, 2], [2, 2, 0]), ([2], [1, 1, 1, 0]), ([0], [1])]
CPU = torch.device("cpu")
EVERY = 1 << 30  # all states of an order


def log_likelihood(family: Family, given: Sequence[int], target: Sequence[int], effort: Effort) -> Estimate:
    [estimate] = log_likelihoods(family, [Completion.behind(given, target)], effort)
    return estimate


def terms(ilm: ILM, given: Sequence[int], target: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return Insertions(ilm, Completion.behind(given, target), 64).terms


def build(config: IlmConfig | ArmConfig | MdmConfig | ItConfig, scale: float = 0.1) -> Family:
    """In float64, with weights so large that orders matter."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        family: Family = config.build(MODEL, WORDS)
        for parameter in family.parameters():
            parameter.data += scale * torch.randn_like(parameter)
    return family.double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ilm() -> ILM:
    family = build(IlmConfig())
    assert isinstance(family, ILM)
    return family


@pytest.fixture(scope="module")
def mdm() -> MDM:
    family = build(MdmConfig(block=5), 0.4)
    assert isinstance(family, MDM)
    return family


class Reference:
    """An ILM as the definition reads, one text at a time."""

    def __init__(self, family: ILM, given: Sequence[int], attend: Attend) -> None:
        self.family, self.given = family, list(given)
        self.attend = attend
        self.state = cache(self._state)

    def _state(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Logarithms: of ending and going on [2], and of every slot and word [slots, 3]."""
        specials = self.family.specials
        row = torch.tensor([specials.stop, specials.bos, *self.given, *text])
        everything = torch.ones(len(row), len(row), dtype=torch.bool)
        hidden = self.family.backbone(
            row, torch.arange(len(row)), lambda layer, q, k, v: self.attend(q, k, v, everything)
        )
        stop = self.family.stop(hidden[:1])[0].log_softmax(0)
        logits = hidden[1 + len(self.given) :] @ self.family.unembedding.weight[:3].T
        return stop, logits - logits.logsumexp((0, 1))

    def weight(self, target: Sequence[int], order: Sequence[int]) -> float:
        """log w(σ)"""
        total, there = 0.0, list[int]()
        for cell in order:
            stop, pairs = self.state(tuple(target[i] for i in sorted(there)))
            total += float(stop[1] + pairs[sum(i < cell for i in there), target[cell]])
            there.append(cell)
        return total

    def weights(self, target: Sequence[int]) -> Tensor:
        orders = itertools.permutations(range(len(target)))
        return torch.tensor([self.weight(target, order) for order in orders], dtype=torch.float64)


def exact_and_bound(reference: Reference, target: Sequence[int]) -> tuple[float, float]:
    weights = reference.weights(target)
    end = float(reference.state(tuple(target))[0][0])
    return end + float(weights.logsumexp(0)), end + math.log(len(weights)) + float(weights.mean())


@pytest.mark.parametrize(("given", "target"), TEXTS)
def test_the_bound_of_an_ilm_is_that_of_all_orders(
    ilm: ILM, softmax_attention: Attend, given: list[int], target: list[int]
) -> None:
    exact, bound = exact_and_bound(Reference(ilm, given, softmax_attention), target)
    found = log_likelihood(ilm, given, target, Effort(exact=0, orders=8))
    assert found[:2] == pytest.approx((bound, 0.0), abs=1e-9)
    if len(target) == 1:  # one order: the bound is no bound but the thing itself
        assert found.exact and bound == pytest.approx(exact, abs=1e-9)
    else:
        assert not found.exact and bound < exact - 1e-3


@pytest.mark.parametrize("states", [1, 2, EVERY])
@pytest.mark.parametrize(("given", "target"), TEXTS)
def test_sampling_states_has_the_bound_as_its_mean(ilm: ILM, given: list[int], target: list[int], states: int) -> None:
    look, effort = terms(ilm, given, target), Effort(orders=600, states=states)
    bound = module._all_states(look, len(target), CPU, effort)
    value, error = module._some_states(look, len(target), CPU, effort)
    assert abs(value - bound) <= 4 * error + 1e-9
    assert error < 0.15


def test_a_long_text_is_sampled(ilm: ILM) -> None:
    """What all of its 2047 states say is what some of them say, within the error."""
    target = [2, 0, 1, 1, 2, 0, 2, 1, 0, 0, 1]
    every = log_likelihood(ilm, [1], target, Effort(exact=0, orders=1000))
    some = log_likelihood(ilm, [1], target, Effort(exact=0, orders=32, states=4))
    assert every.error == 0 < some.error < 1
    assert abs(every.value - some.value) <= 4 * some.error


def test_an_ilm_is_a_distribution(ilm: ILM, softmax_attention: Attend) -> None:
    """All texts of up to three words, and what is still going on after them, are everything that can happen."""
    reference = Reference(ilm, [1], softmax_attention)
    ended, going = 0.0, 0.0
    for length in range(4):
        for text in itertools.product(range(3), repeat=length):
            reached = float(reference.weights(text).exp().sum())
            stop, _ = reference.state(text)
            ended += reached * float(stop[0].exp())
            going += reached * float(stop[1].exp()) if length == 3 else 0.0
    assert ended + going == pytest.approx(1.0, abs=1e-9)


def test_it_is_the_distribution_of_the_decoder(ilm: ILM, softmax_attention: Attend) -> None:
    """The probability that decoding records for each insertion is the reference's."""
    reference = Reference(ilm, [1, 2], softmax_attention)
    settings = DecodeConfig(joint=True, temperature=1.0, max_steps=5, stop_threshold=1.0)
    [trajectory] = ilm.decode([Prompt([], 3, [1, 2], frozenset({2}))], settings)
    assert len(trajectory.events) == 5
    text: list[int] = []
    for event in trajectory.events:
        stop, pairs = reference.state(tuple(text))
        assert event.stop_probability == pytest.approx(float(stop[0].exp()), abs=1e-9)
        assert event.log_probability == pytest.approx(float(pairs[event.rank - 2, event.token]), abs=1e-9)
        text.insert(event.rank - 2, event.token)


def test_the_error_is_that_of_the_mean(ilm: ILM) -> None:
    """Over many seeds the values scatter as the errors say."""
    found = [log_likelihood(ilm, [], [0, 2, 1, 1, 0], Effort(exact=0, orders=6, seed=seed)) for seed in range(150)]
    scatter = torch.tensor([each.value for each in found]).std()
    said = torch.tensor([each.error**2 for each in found]).mean().sqrt()
    assert 0.8 < float(scatter / said) < 1.25


def test_of_nothing_only_the_end_counts(ilm: ILM, softmax_attention: Attend) -> None:
    stop, _ = Reference(ilm, [1, 0], softmax_attention).state(())
    for exact in (0, 12):
        found = log_likelihood(ilm, [1, 0], [], Effort(exact=exact))
        assert found[:3] == pytest.approx((float(stop[0]), 0.0, True), abs=1e-9)


def test_texts_that_cannot_be_written_have_no_chance(ilm: ILM, mdm: MDM) -> None:
    unknown = WORDS.specials.unk
    for family in (ilm, mdm, build(ArmConfig())):
        for effort in (Effort(), Effort(exact=0, orders=2, states=1)):  # all states are looked at, or some
            estimate = log_likelihood(family, [0], [1, unknown], effort)
            assert (estimate.value, estimate.error) == (-math.inf, 0.0)
        assert math.isfinite(log_likelihood(family, [unknown], [1, 0], Effort()).value)


def test_the_batch_does_not_matter(ilm: ILM, mdm: MDM) -> None:
    for family, exact in ((ilm, 0), (ilm, 12), (mdm, 0)):
        efforts = [Effort(exact=exact, batch_size=size) for size in (3, 1000)]
        one, many = (log_likelihood(family, [0], [1, 2, 1], effort) for effort in efforts)
        assert one.value == pytest.approx(many.value, abs=1e-9)
        assert one == log_likelihood(family, [0], [1, 2, 1], efforts[0])


@pytest.mark.parametrize(("given", "target"), TEXTS)
def test_the_likelihood_of_an_arm_is_exact(softmax_attention: Attend, given: list[int], target: list[int]) -> None:
    arm = build(ArmConfig())
    assert isinstance(arm, ARM)
    total, words = 0.0, [0, 1, 2, arm.specials.eos]
    for length, expected in enumerate([*target, arm.specials.eos]):
        row = torch.tensor([arm.specials.bos, *given, *target[:length]])
        mask = torch.ones(len(row), len(row)).tril().bool()
        hidden = arm.backbone(
            row, torch.arange(len(row)), lambda layer, q, k, v, mask=mask: softmax_attention(q, k, v, mask)
        )
        logits = arm.unembedding(hidden[-1])[words]
        total += float(logits.log_softmax(0)[words.index(expected)])
    assert log_likelihood(arm, given, target, Effort())[:3] == pytest.approx((total, 0.0, True), abs=1e-9)


def test_the_bound_of_an_mdm_is_that_of_all_orders(mdm: MDM) -> None:
    """Every order of unmasking, one cell at a time; the pads tell the length."""
    given, target = [2], [0, 1]
    look = Masks(mdm, Completion.behind(given, target))
    sets = torch.tensor(list(itertools.product((False, True), repeat=4)))
    terms = {tuple(missing): _right(look, missing) for missing in sets.tolist() if any(missing)}
    logs = []
    for order in itertools.permutations(range(4)):
        left, total = [True] * 4, 0.0
        for cell in order:
            total += terms[tuple(left)][cell]
            left[cell] = False
        logs.append(total)
    paths = torch.tensor(logs, dtype=torch.float64)
    exact, bound = float(paths.logsumexp(0)) - math.log(24), float(paths.mean())
    found = log_likelihood(mdm, given, target, Effort())
    assert found[:3] == pytest.approx((bound, 0.0, False), abs=1e-6)  # float32 time
    assert bound < exact - 1e-3
    value, error = module._some_states(look, 4, CPU, Effort(orders=600, states=2))
    assert abs(value - bound) <= 4 * error


def _right(look: Masks, missing: list[bool]) -> list[float]:
    """The logarithm of what is right in each cell, by the model's own hidden rows."""
    family, mask = look.family, look.family.specials.mask
    given, *cells = look.block.tolist()
    block = [given, *(mask if gone else token for gone, token in zip(missing, cells, strict=True))]
    x = lay_out(torch.tensor([[family.specials.bos]]), torch.tensor([1]), torch.tensor([block]))
    hidden = family.hidden(x, torch.tensor([sum(missing) / 5]), x.cells.flatten())
    words = family.words.tolist()
    expected = (hidden @ family.unembedding.weight[words].T).log_softmax(-1)
    return [float(expected[place, words.index(token)]) for place, token in enumerate(cells, start=1)]


def test_an_mdm_has_its_block(mdm: MDM) -> None:
    with pytest.raises(InsertlmError, match="a text of 6 tokens; the block has 5"):
        log_likelihood(mdm, [0, 1], [1, 1, 2, 0], Effort())


def test_others_are_refused() -> None:
    with pytest.raises(InsertlmError, match="expected a model of the family ilm, arm, fill or mdm"):
        log_likelihood(build(ItConfig()), [], [1], Effort())


@pytest.mark.parametrize(
    ("effort", "message"),
    [
        (Effort(orders=1), "expected 2 orders or more"),
        (Effort(exact=17), "expected exact from 0 to 16 tokens, got 17"),
        (Effort(states=0), "expected 1 state and a batch of 1 or more, got 0 and 64"),
        (Effort(batch_size=-1), "expected 1 state and a batch of 1 or more, got 32 and -1"),
    ],
)
def test_effort_has_its_limits(ilm: ILM, effort: Effort, message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        log_likelihood(ilm, [], [1, 0], effort)


def test_noise_of_states_and_cells_is_apart() -> None:
    assert not uniform(0, 0, module._START).equal(uniform(0, 0, 0))


def test_estimates_are_plain_numbers(ilm: ILM) -> None:
    found = log_likelihood(ilm, [], [1, 0, 1], Effort())
    assert isinstance(found, Estimate) and all(isinstance(part, float) for part in found[:2])


def test_the_table_on_the_page_is_right(ilm: ILM, softmax_attention: Attend) -> None:
    page = (Path(__file__).parents[3] / "docs" / "harness.md").read_text(encoding="utf-8").replace("−", "-")
    lines = re.findall(r"^\| (?:–|`([\d ]+)`), `([\d ]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(lines) == 4
    for given, target, numbers in lines:
        text = [int(word) for word in target.split()]
        reference = Reference(ilm, [int(word) for word in given.split()], softmax_attention)
        exact, bound = exact_and_bound(reference, text)
        look = terms(ilm, reference.given, text)
        rest = bound - module._all_states(look, len(text), CPU, Effort())
        found = [exact, bound]
        for orders in (8, 600):
            value, error = module._some_states(look, len(text), CPU, Effort(orders=orders))
            found += [rest + value, error]
        assert [float(number) for number in re.findall(r"[-\d.]+", numbers)] == pytest.approx(found, abs=6e-3)
