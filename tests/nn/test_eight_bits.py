"""Products in eight bits are nearly those in full precision, and what is saved of such a layer is its weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from insertlm.nn.eight_bits import EightBits, product, round_linears, rounded, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this torch has no such kernel for this CPU")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_an_entry_is_off_by_half_a_step_at_most(size: float) -> None:
    weight = size * drawn(40, 64)
    weight[3], weight[4] = 0.0, 1e-43
    codes, scale = rounded(weight)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    step = weight.abs().amax(1, keepdim=True) / 127
    error = codes.float() * scale.float()[:, None] - weight
    assert bool((error.abs() <= step * 0.51 + 1e-42).all())


def test_large_matrices_are_rounded_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = drawn(100, 32), drawn(40, 32, seed=1).bfloat16()
    whole = rounded(weight)
    expected = product(x, *whole)
    monkeypatch.setattr("insertlm.nn.eight_bits._PIECE", 7 * 32)
    assert all(torch.equal(a, b) for a, b in zip(whole, rounded(weight), strict=True))
    torch.testing.assert_close(product(x, *whole), expected)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (33, 64), (96, 32)])
def test_products_are_those_of_the_rounded_matrix(rows: int, outputs: int, inputs: int) -> None:
    codes, scale = rounded(drawn(outputs, inputs))
    x = drawn(rows, inputs, seed=1).bfloat16()
    expected = x.float() @ (codes.float() * scale.float()[:, None]).T
    torch.testing.assert_close(product(x, codes, scale).float(), expected, rtol=1e-2, atol=1e-2)


def test_a_few_rows_do_not_depend_on_each_other() -> None:
    codes, scale = rounded(drawn(96, 64))
    x = drawn(16, 64, seed=1).bfloat16()
    apart = torch.cat([product(row[None], codes, scale) for row in x])
    assert torch.equal(product(x, codes, scale), apart)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_a_layer(bias: bool, relu: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    x = drawn(5, 64)
    found = EightBits(linear)(x, relu=relu)
    assert found.dtype == torch.bfloat16
    expected = F.relu(linear(x)) if relu else linear(x)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


def test_what_is_saved_is_the_weight_in_float32() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
    expected = plain.state_dict()
    round_linears(plain)
    # The inputs of the second are no multiple of what the kernel reads at once.
    assert [type(module) for module in plain] == [EightBits, nn.ReLU, nn.Linear]
    saved = plain.state_dict()
    assert [*saved] == [*expected]
    for name, value in saved.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-3)
    again = EightBits(nn.Linear(64, 48))
    again.take(saved["0.weight"])
    assert torch.equal(again.weight, plain.get_parameter("0.weight"))


def test_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Tensor) -> Tensor:
        raise NotImplementedError("Could not run 'aten::_weight_int8pack_mm'")

    monkeypatch.setattr(torch, "_weight_int8pack_mm", missing)
    assert not supported()
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert not supported()
