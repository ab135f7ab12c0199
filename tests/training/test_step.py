"""Steps learn, are functions of their number, and cost the same however they are computed."""

from __future__ import annotations

import math
import shutil
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.packing import most_spare
from insertlm.data.order import Order
from insertlm.families.base import Noise
from insertlm.families.ilm import IlmConfig
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.star import Star
from insertlm.training.ledger import Ledger
from insertlm.training.step import TrainStep, capacity_for

CPU = torch.device("cpu")
TASK = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=8, train=40)
OPTIM = OptimConfig(learning_rate=3e-3, warmup=5, ema=0.9, ema_every=3)


def build(
    *,
    compiled: bool = False,
    optim: OptimConfig = OPTIM,
    prefix_lm: bool = False,
    seed: int = 1,
    precision: str = "auto",
    steps: int = 200,
) -> TrainStep:
    model = ModelConfig(layers=1, width=16, heads=2, hidden=32, dropout=0.1, prefix_lm=prefix_lm)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        family = IlmConfig().build(model, TASK.tokenizer).train()
    rows = family.rows(TASK.examples("train"))
    order = Order(len(rows.target), 8, seed)
    return TrainStep(family, rows, order, optim=optim, steps=steps, device=CPU, compiled=compiled, precision=precision)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


def weights(step: TrainStep) -> dict[str, Tensor]:
    return copied(dict(step.family.named_parameters()))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- Capacity


@given(st.integers(1, 1 << 24))
def test_capacities_hold_the_rows_and_little_more(visible: int) -> None:
    capacity = capacity_for(visible)
    assert visible <= capacity
    assert capacity - visible <= most_spare(capacity)
    assert capacity % 128 == 0
    assert capacity_for(capacity) == capacity
    assert capacity_for(visible + 1) >= capacity


def test_capacities_are_few() -> None:
    """One graph is captured for each."""
    assert len({capacity_for(visible) for visible in range(4000, 8001)}) <= 33


# --- Steps


def test_steps_reduce_the_loss() -> None:
    step = build()
    means = []
    for number in range(150):
        step(number)
        if number % 25 == 24:
            means.append(step.ledger.means(25)["loss"])
    assert all(math.isfinite(mean) for mean in means)
    assert means[-1] < 0.75 * means[0]


def test_means_are_those_of_the_steps_since_the_last_time() -> None:
    step, twin = build(), build()
    singles = []
    for number in range(6):
        step(number)
        twin(number)
        singles.append(twin.ledger.means(1))
        if number in {3, 5}:
            recent = singles[-(4 if number == 3 else 2) :]
            found = step.ledger.means(len(recent))
            assert found.keys() == {"loss", "token_loss", "stop_loss"}
            for name, value in found.items():
                assert value == pytest.approx(sum(single[name] for single in recent) / len(recent), rel=1e-5)


def test_a_ledger_is_read_when_it_is_full_and_names_the_first_bad_step() -> None:
    ledger = Ledger(rows=3)
    for value in (1.0, 2.0, 3.0, 4.0, math.inf, math.nan, 7.0):
        ledger.write({"loss": torch.tensor(value), "part": torch.tensor(2 * value)})
        ledger.count_step()
    assert not math.isfinite(ledger.means(7)["loss"])
    assert ledger.bad == 4
    ledger.write({"loss": torch.tensor(8.0), "part": torch.tensor(9.0)})
    ledger.count_step()
    assert ledger.means(1) == {"loss": 8.0, "part": 9.0}
    assert ledger.bad is None


def test_a_step_sees_the_examples_of_its_number() -> None:
    """Also across the blocks in which they are drawn, and when steps are skipped."""
    step = build()
    for number in (0, 1, 63, 64, 65, 200, 3):
        batch = step(number)
        example, epoch = (torch.from_numpy(part[0]) for part in step.order.batches(number, 1))
        assert torch.equal(batch.example, example)
        assert torch.equal(batch.epoch, epoch)
        noise = Noise(step.order.seed, example, epoch)
        assert batch.visible == int(step.family.visible(step.source.rows(example), noise).sum())


def test_steps_repeat_bit_for_bit_and_depend_on_the_seed() -> None:
    runs = [build(), build(), build(seed=2)]
    for step in runs:
        for number in range(4):
            step(number)
    first, again, other = map(weights, runs)
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_saved_state_goes_on_bit_for_bit(cut: int) -> None:
    whole, half, rest = build(), build(), build()
    for number in range(10):
        whole(number)
    for number in range(cut):
        half(number)
    rest.load({part: copied(tensors) for part, tensors in half.state().items()})
    for number in range(cut, 10):
        rest(number)
    assert same(weights(whole), weights(rest))
    for part in ("weights", "ema", "optimizer"):
        assert same(whole.state()[part], rest.state()[part])


def test_the_optimisers_state_is_named_after_the_parameters() -> None:
    step = build()
    step(0)
    names = {name for name, _ in step.family.named_parameters()}
    expected = {f"{name}/{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    assert step.state()["optimizer"].keys() == expected


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradients_are_clipped_if_asked_for(clip: float) -> None:
    """The first moment after one step is a tenth of the gradient."""
    step = build(optim=OptimConfig(clip=clip))
    step(0)
    moments = [x for name, x in step.state()["optimizer"].items() if name.endswith("/exp_avg")]
    norm = 10 * float(torch.stack([moment.norm() for moment in moments]).norm())
    assert norm == pytest.approx(clip, rel=1e-3) if clip else norm > 0.1


def test_the_average_follows_the_weights() -> None:
    step = build()
    for number in range(6):
        before = weights(step)
        average = copied(step.state()["ema"])
        step(number)
        assert not same(before, weights(step))
        assert same(average, step.state()["ema"]) == bool((number + 1) % OPTIM.ema_every)


# --- Compiled


def value_and_gradients(step: TrainStep, capacity: int | None) -> list[Tensor]:
    example, epoch = (torch.from_numpy(part[0]) for part in step.order.batches(0, 1))
    found = step._losses(example, epoch, capacity)
    gradients = torch.autograd.grad(found.total, list(step.family.parameters()))
    return [found.total.detach(), *found.parts.values(), *gradients]


def assert_compiled_is_eager(prefix_lm: bool) -> None:
    step = build(prefix_lm=prefix_lm)
    expected, visible = value_and_gradients(step, None), step(0).visible
    compiled = build(compiled=True, prefix_lm=prefix_lm)
    for a, b in zip(value_and_gradients(compiled, capacity_for(visible)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("prefix_lm", [False, True])
def test_traced_losses_are_eager_ones(monkeypatch: pytest.MonkeyPatch, prefix_lm: bool) -> None:
    """All of torch.compile but its code generator, which is slow."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert_compiled_is_eager(prefix_lm)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_losses_are_eager_ones() -> None:
    assert_compiled_is_eager(prefix_lm=False)


# --- Precision


def test_bfloat16_is_close_to_float32_and_not_the_same() -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        step = build(precision=precision)
        for number in range(3):
            step(number)
        losses[precision] = step.ledger.means(3)["loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.parametrize(("precision", "bf16"), [("auto", False), ("float32", False), ("bfloat16", True)])
def test_a_cpu_computes_in_float32_unless_told(precision: str, bf16: bool) -> None:
    step = build(precision=precision)
    halves = {name for name, p in step.family.named_parameters() if p.dtype == torch.bfloat16}
    linears = {f"backbone.blocks.0.{name}" for name in ("qkv.weight", "out.weight", "up.weight", "up.bias")}
    assert halves == (linears | {f"backbone.blocks.0.down.{part}" for part in ("weight", "bias")} if bf16 else set())
    assert all(x.dtype == torch.float32 for part in step.state().values() for x in part.values())


def test_what_the_network_multiplies_in_bfloat16_is_the_rounded_weight() -> None:
    step = build(precision="bfloat16")
    for number in range(3):
        step(number)
    saved = {part: copied(tensors) for part, tensors in step.state().items()}
    for fresh in (step, build(precision="bfloat16")):
        fresh.load(saved)
        for name, parameter in fresh.family.named_parameters():
            assert torch.equal(parameter, saved["weights"][name].to(parameter.dtype))


def test_the_average_of_a_short_run_is_not_its_beginning() -> None:
    step = build(steps=2)  # fewer steps than lie between updates of the average
    before = copied(step.state()["ema"])
    step(0)
    assert same(step.state()["ema"], before)
    step(1)
    assert not same(step.state()["ema"], before)


def test_an_example_is_corrupted_anew_in_every_epoch() -> None:
    step, example = build(), torch.arange(8)
    one, again, other = (step._losses(example, torch.full_like(example, epoch), None).total for epoch in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_averaged_is_the_model_with_its_average_for_a_while() -> None:
    step = build()
    for number in range(6):
        step(number)
    before = weights(step)
    with step.averaged() as family:
        held = copied(dict(family.named_parameters()))
    assert same(held, copied(step.state()["ema"]))
    assert not same(held, before)
    assert same(weights(step), before)


def test_muon_is_for_all_matrices_of_the_blocks_and_for_them_alone() -> None:
    step = build(optim=OptimConfig(matrices="muon"))
    found = {name.partition("/")[0] for name in step.state()["optimizer"] if name.endswith("/momentum")}
    assert found == {f"backbone.blocks.0.{layer}.weight" for layer in ("qkv", "out", "up", "down")}
