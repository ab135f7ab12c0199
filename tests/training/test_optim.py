"""The schedule, what is decayed, and the average of the weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from insertlm.core.errors import InsertlmError
from insertlm.recipe import OptimConfig
from insertlm.training.optim import Ema, Optimizer, freeze, orthogonal, rate_factors

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


def driven(config: OptimConfig, steps: int, bf16: Collection[str] = ()) -> tuple[nn.Module, Optimizer]:
    """A module after some steps with gradients that depend on nothing but the step."""
    module = small()
    optimizer = Optimizer(module, config, STEPS, bf16)
    for step in range(steps):
        push(module, step)
        optimizer.set_step(step)
        optimizer.step()
    return module, optimizer


def push(module: nn.Module, step: int) -> None:
    for number, parameter in enumerate(module.parameters()):
        noise = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_torch(clip: float) -> None:
    config = OptimConfig(learning_rate=0.01, warmup=4, beta1=0.8, beta2=0.95, weight_decay=0.1, clip=clip)
    found, _ = driven(config, 300)  # more than the rates sent to the device at once
    expected = small()
    matrices, vectors = ([p for p in expected.parameters() if (p.dim() >= 2) == two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95))
    for step in range(300):
        push(expected, step)
        for group in reference.param_groups:
            group["lr"] = config.rate(step, STEPS)
        if clip:
            nn.utils.clip_grad_norm_(expected.parameters(), clip)
        reference.step()
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_only_matrices_decay() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, warmup=0, weight_decay=0.5), STEPS)
    optimizer.set_step(0)
    optimizer.step()  # without any gradient
    still = {name for name, p in module.named_parameters() if torch.equal(p, before[name])}
    assert still == {"1.bias", "2.weight", "2.bias"}
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(module.get_parameter(name).detach(), before[name] * (1 - 0.1 * 0.5))


# --- Muon

HIDDEN: dict[str, list[int]] = {"0.qkv.weight": [8, 8, 8], "0.out.weight": [], "0.up.weight": [], "0.down.weight": []}


class Layer(nn.Module):
    """Matrices that are square, stand and lie, and three in one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


def layers() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Layer(), nn.Linear(8, 5))


def test_hidden_matrices_learn_by_muon_as_torch_has_it() -> None:
    """And all else by AdamW, with the same rate and decay."""
    config = OptimConfig(matrices="muon", learning_rate=0.01, warmup=4, weight_decay=0.1, clip=0.5)
    found, expected = layers(), layers()
    optimizer = Optimizer(found, config, STEPS, hidden=HIDDEN)
    thirds = [nn.Parameter(part.clone()) for part in expected.get_parameter("0.qkv.weight").detach().chunk(3)]
    whole = [expected.get_parameter(name) for name in list(HIDDEN)[1:]]
    rest = {name: p for name, p in expected.named_parameters() if name not in HIDDEN}
    muon = torch.optim.Muon([*thirds, *whole], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in rest.values()],
    )
    for step in range(20):
        push(found, step)
        optimizer.set_step(step)
        optimizer.step()
        push(expected, step)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        gradient = expected.get_parameter("0.qkv.weight").grad
        assert gradient is not None
        for third, part in zip(thirds, gradient.chunk(3), strict=True):
            third.grad = part
        for reference in (muon, adam):
            for group in reference.param_groups:
                group["lr"] = config.rate(step, STEPS)
            reference.step()  # type: ignore[no-untyped-call]
    wanted = {name: p.detach() for name, p in expected.named_parameters()}
    wanted["0.qkv.weight"] = torch.cat([third.detach() for third in thirds])
    before = dict(layers().named_parameters())
    for name, parameter in found.named_parameters():
        assert float((parameter - before[name]).detach().abs().mean()) > 0.01
        torch.testing.assert_close(parameter.detach(), wanted[name], rtol=0, atol=2e-3)  # products in bfloat16


def test_matrices_that_are_stacked_learn_each_for_itself() -> None:
    """Such as many queries and few keys and values in one layer."""
    module = nn.Linear(8, 16, bias=False)
    before, gradient = module.weight.detach().clone(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    config = OptimConfig(matrices="muon", learning_rate=1.0, warmup=0, weight_decay=0.0, clip=0.0)
    optimizer = Optimizer(module, config, STEPS, hidden={"weight": [8, 4, 4]})
    module.weight.grad = gradient
    optimizer.set_step(0)
    optimizer.step()
    expected = torch.cat([orthogonal(part) for part in torch.split(gradient, [8, 4, 4])]) * 0.2 * 8**0.5
    torch.testing.assert_close(before - module.weight.detach(), expected, rtol=0, atol=5e-2)  # in bfloat16


def test_what_muon_remembers_is_named_and_is_not_twice_the_weights() -> None:
    module = layers()
    moments = Optimizer(module, OptimConfig(matrices="muon"), STEPS, hidden=HIDDEN).moments()
    kinds = {name: {key.partition("/")[2] for key in moments if key.startswith(f"{name}/")} for name in HIDDEN}
    assert kinds == {name: {"momentum"} for name in HIDDEN}
    assert moments["0.up.bias/exp_avg_sq"].shape == (32,)


@pytest.mark.parametrize("shape", [(6, 6), (4, 40), (3, 5, 9)])
def test_singular_values_become_alike_and_vectors_stay(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    assert float(s.max() / s.min()) > 1.5
    found = u.mT @ orthogonal(x) @ v.mT
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert 0.5 < float(diagonal.min()) <= float(diagonal.max()) < 1.4
    torch.testing.assert_close(found, torch.diag_embed(diagonal), rtol=0, atol=0.06)


def test_without_muon_hidden_matrices_are_like_others() -> None:
    module = layers()
    assert len(Optimizer(module, OptimConfig(), STEPS, hidden=HIDDEN).groups) == 2


def test_names_and_shapes_are_those_of_the_parameters() -> None:
    module, optimizer = driven(OptimConfig(), 1)
    named = optimizer.named(optimizer.weights)
    assert {name: p.shape for name, p in module.named_parameters()} == {name: x.shape for name, x in named.items()}
    assert all(torch.equal(p, named[name]) for name, p in module.named_parameters())
    assert all(x.abs().sum() > 0 for x in optimizer.moments().values())


def test_bf16_parameters_are_rounded_and_learn_in_full_precision() -> None:
    config = OptimConfig(learning_rate=1e-6, warmup=0, weight_decay=0.0)  # steps too small for bfloat16
    module, optimizer = driven(config, 50, {"1.weight"})
    weight, full = module.get_parameter("1.weight"), optimizer.named(optimizer.weights)["1.weight"]
    assert weight.dtype == torch.bfloat16
    assert full.dtype == torch.float32
    assert torch.equal(weight, full.bfloat16())
    assert bool((full != small().get_parameter("1.weight")).all())


def test_other_weights_can_take_their_place_for_a_while() -> None:
    module, optimizer = driven(OptimConfig(), 2, {"1.weight"})
    others = [value + 1 for value in optimizer.weights]
    live = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}

    def replace(fail: bool) -> None:
        with optimizer.replaced(others):
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, optimizer.named(others)[name].to(parameter.dtype))
                assert parameter.data_ptr() == live[name][0]
            if fail:
                raise RuntimeError("validation broke")

    replace(fail=False)
    with pytest.raises(RuntimeError):
        replace(fail=True)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, live[name][1])
        assert parameter.requires_grad


# --- Average


@given(st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=40)
def test_the_average_is_the_published_one(decay: float, every: int, steps: int) -> None:
    """Against a loop over numbers. Between updates nothing moves; an update makes up for the steps it stands for."""
    weights = torch.tensor([3.0]).double()
    ema = Ema([weights], decay, every)
    average = 3.0
    for step in range(steps):
        weights.fill_(float((step * 7) % 11))
        ema.update(step)
        done = step + 1
        if done % every == 0:
            keep = min(decay, (1 + done) / (10 + done)) ** every
            average = keep * average + (1 - keep) * float(weights)
        assert float(ema.average[0]) == pytest.approx(average, rel=1e-12)


def test_the_average_starts_at_the_weights_and_is_a_copy() -> None:
    weights = [torch.ones(3), torch.zeros(2)]
    ema = Ema(weights, 0.9, 1)
    assert all(torch.equal(a, b) for a, b in zip(ema.average, weights, strict=True))
    weights[0].add_(1)
    assert ema.average[0].tolist() == [1.0, 1.0, 1.0]


def test_the_last_update_stands_for_no_more_steps_than_there_were() -> None:
    weights = torch.zeros(1).double()
    ema = Ema([weights], 0.99, 4)
    weights.fill_(1.0)
    for step in range(6):
        ema.update(step)
    ema.end(5)
    assert float(ema.average[0]) == pytest.approx(1 - (5 / 14) ** 4 * (7 / 16) ** 2, rel=1e-12)


def test_bf16_matrices_decay_like_others() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    config = OptimConfig(learning_rate=0.1, warmup=0, weight_decay=0.5)
    optimizer = Optimizer(module, config, STEPS, {"1.weight", "1.bias"})
    optimizer.set_step(0)
    optimizer.step()  # without any gradient
    for name, value in optimizer.named(optimizer.weights).items():
        torch.testing.assert_close(value, before[name] * (1 - 0.1 * 0.5 * (value.dim() == 2)))


def test_bf16_matrices_that_learn_by_muon_are_renewed() -> None:
    module = layers()
    config = OptimConfig(matrices="muon", learning_rate=0.1, warmup=0)
    optimizer = Optimizer(module, config, STEPS, bf16=HIDDEN, hidden=HIDDEN)
    before = module.get_parameter("0.out.weight").detach().clone()
    push(module, 0)
    optimizer.set_step(0)
    optimizer.step()
    named = optimizer.named(optimizer.weights)
    assert not torch.equal(module.get_parameter("0.out.weight"), before)
    assert all(torch.equal(module.get_parameter(name), named[name].bfloat16()) for name in HIDDEN)


# --- Frozen parameters, rates of their own, tied weights


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_frozen_parameters_are_neither_stepped_nor_decayed(rule: Literal["adamw", "muon"]) -> None:
    """But they are in what is saved, and what is rounded stays so."""
    module = layers()
    frozen = {"0.qkv.weight", "0.up.weight", "1.bias"}
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    config = OptimConfig(matrices=rule, learning_rate=0.1, warmup=0, weight_decay=0.5)
    optimizer = Optimizer(module, config, STEPS, bf16={"0.up.weight"}, hidden=HIDDEN)
    for step in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.set_step(step)
        optimizer.step()
    named = optimizer.named(optimizer.weights)
    assert named.keys() == before.keys()
    assert {name for name, value in named.items() if torch.equal(value, before[name])} == frozen
    assert not frozen & {key.partition("/")[0] for key in optimizer.moments()}


def test_parameters_learn_at_their_own_rate() -> None:
    """The longest beginning of a name counts, and a rate of 0 freezes."""
    module, plain = layers(), layers()
    rates = {"0": 0.5, "0.up": 0.1, "1": 0.0}
    freeze(module, config := OptimConfig(learning_rate=0.01, warmup=0, weight_decay=0.1, rates=rates))
    assert not any(p.requires_grad for p in module[1].parameters())  # type: ignore[index]
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer = Optimizer(module, config, STEPS)
    push(plain, 0)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.grad = plain.get_parameter(name).grad
    optimizer.set_step(0)
    optimizer.step()
    for name, parameter in module.named_parameters():
        factor = 0.1 if name.startswith("0.up") else 0.5 if name.startswith("0.") else 0.0
        decay = 0.1 if parameter.dim() == 2 else 0.0
        gradient, rate = plain.get_parameter(name).grad, 0.01 * factor
        assert gradient is not None
        wanted = expected[name] * (1 - rate * decay) - rate * gradient.sign()  # the first step of AdamW
        torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=1e-4 * factor)


def test_names_begin_with_or_without_the_backbone() -> None:
    names = [
        "backbone.embedding.weight",
        "backbone.blocks.0.up.bias",
        "backbone.blocks.10.up.bias",
        "unembedding.weight",
    ]
    found = rate_factors(names, {"blocks": 0.1, "backbone": 0.5, "blocks.10.up": 3.0})
    assert list(found.values()) == [0.5, 0.1, 3.0, 1.0]
    with pytest.raises(InsertlmError, match=r"name begins with embed; expected one of embedding, blocks, unembedding$"):
        rate_factors(names, {"embed": 0.1})
    with pytest.raises(InsertlmError, match=r"begins with blocks\.1;"):
        rate_factors(names, {"blocks.1": 0.1})


def test_something_has_to_learn() -> None:
    module = layers()
    freeze(module, config := OptimConfig(rates={"0": 0, "1": 0}))
    with pytest.raises(InsertlmError, match="every rate is 0"):
        Optimizer(module, config, STEPS)


def test_tied_weights_have_one_state() -> None:
    """They learn from both uses, under the first name."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embedding.weight

    module = Tied()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, warmup=0), STEPS)
    before = module.out.weight.detach().clone()
    module.out(module.embedding(torch.arange(5))).sum().backward()
    optimizer.set_step(0)
    optimizer.step()
    assert optimizer.moments().keys() == {"embedding.weight/exp_avg", "embedding.weight/exp_avg_sq"}
    assert optimizer.named(optimizer.weights).keys() == {"embedding.weight"}
    assert module.out.weight is module.embedding.weight
    assert bool((module.out.weight != before).all())
