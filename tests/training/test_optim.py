"""The schedule, what is decayed, and the average of the weights."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from insertlm.training.optim import Ema, OptimConfig, build_optimizer

CPU = torch.device("cpu")
STEPS = 1000


def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))


# --- Schedule


def rates(**keys: float) -> list[float]:
    config = msgspec.convert({"learning_rate": 2.0, **keys}, OptimConfig, strict=False)
    return [config.rate(step, STEPS) for step in range(STEPS)]


def test_warm_up_then_constant() -> None:
    found = rates(warmup=100)
    assert found[:100] == pytest.approx([2.0 * (step + 1) / 100 for step in range(100)])
    assert found[99:] == [2.0] * (STEPS - 99)


def test_no_warm_up() -> None:
    assert rates(warmup=0) == [2.0] * STEPS


def test_cooldown_falls_straight_to_nearly_nothing() -> None:
    found = rates(warmup=10, cooldown=0.2)
    assert found[9:801] == [2.0] * (801 - 9)
    assert found[800:] == pytest.approx([2.0 * (STEPS - step) / 200 for step in range(800, STEPS)])
    assert found[-1] == pytest.approx(2.0 / 200)


@given(st.integers(0, 2000), st.floats(0, 1), st.integers(1, 500))
def test_rates_never_leave_their_range_nor_jump(warmup: int, cooldown: float, steps: int) -> None:
    config = OptimConfig(learning_rate=1.0, warmup=warmup, cooldown=cooldown)
    found = [config.rate(step, steps) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in found)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


# --- Optimiser


def test_only_matrices_decay() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, OptimConfig(weight_decay=0.5), CPU)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"].fill_(0.1)
    optimizer.step()
    assert {name for name, p in module.named_parameters() if torch.equal(p, before[name])} == {
        "1.bias",
        "2.weight",
        "2.bias",
    }
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(module.get_parameter(name).detach(), before[name] * (1 - 0.1 * 0.5))


def test_every_parameter_is_optimised_once_with_the_betas_asked_for() -> None:
    module = small()
    optimizer = build_optimizer(module, OptimConfig(beta1=0.8, beta2=0.95), CPU)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, module.parameters()))
    assert all(group["betas"] == (0.8, 0.95) for group in optimizer.param_groups)


def test_the_rate_is_read_at_every_step() -> None:
    module = small()
    optimizer = build_optimizer(module, OptimConfig(), CPU)
    before = [p.detach().clone() for p in module.parameters()]
    for rate in (0.0, 0.01):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
        assert moved == [rate > 0] * len(moved)


# --- Average


@given(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=40)
def test_the_average_is_the_published_one(decay: float, every: int, steps: int) -> None:
    """Against a loop over numbers. Between updates nothing moves; an update makes up for the steps it stands for."""
    module = nn.Linear(1, 1, bias=False).double()
    parameter = module.weight
    parameter.data.fill_(3.0)
    ema = Ema(module, decay, every)
    average = 3.0
    for step in range(steps):
        parameter.data.fill_(float((step * 7) % 11))
        ema.update(step)
        done = step + 1
        if done % every == 0:
            keep = min(decay, (1 + done) / (10 + done)) ** every
            average = keep * average + (1 - keep) * float(parameter.data)
        assert float(ema.average["weight"]) == pytest.approx(average, rel=1e-12)


def test_the_average_starts_at_the_weights_and_is_a_copy() -> None:
    module = small()
    ema = Ema(module, 0.9, 1)
    assert all(torch.equal(ema.average[name], p) for name, p in module.named_parameters())
    next(module.parameters()).data.add_(1)
    assert not torch.equal(ema.average["0.weight"], module.get_parameter("0.weight"))


def test_applied_puts_the_average_in_place_and_gives_the_weights_back() -> None:
    module = small()
    ema = Ema(module, 0.9, 1)
    for parameter in module.parameters():
        parameter.data.mul_(2).add_(1)
    live = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    average = {name: value.clone() for name, value in ema.average.items()}

    def apply(fail: bool) -> None:
        with ema.applied():
            assert all(torch.equal(p, average[name]) for name, p in module.named_parameters())
            assert all(p.data_ptr() == live[name][0] for name, p in module.named_parameters())
            if fail:
                raise RuntimeError("validation broke")

    apply(fail=False)
    with pytest.raises(RuntimeError):
        apply(fail=True)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, live[name][1])
        assert torch.equal(ema.average[name], average[name])
        assert parameter.requires_grad
