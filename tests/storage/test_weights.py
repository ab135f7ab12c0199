"""Released weights: small files that give nearly the same model."""

from __future__ import annotations

from pathlib import Path

import torch

import insertlm
from insertlm.release import rounded
from insertlm.storage import weights


def test_a_matrix_keeps_its_rows_to_half_a_step() -> None:
    matrix = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1], [50], [0], [7]]
    )
    packed = weights.pack({"a": matrix, "b": matrix[0]})
    assert {name: value.dtype for name, value in packed.items()} == {
        "a": torch.int8,
        "a/scale": torch.float32,
        "b": torch.bfloat16,
    }
    back = weights.unpack(packed)
    assert {*back} == {"a", "b"}
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert bool(((back["a"] - matrix).abs() <= step * 0.5001).all())
    assert torch.equal(back["b"], matrix[0].bfloat16())


def test_other_weights_stay() -> None:
    given = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    back = weights.unpack(given)
    assert all(back[name] is value for name, value in given.items())


def test_a_model_is_packed_from_the_command_line(tmp_path: Path) -> None:
    """What has been rounded once is not changed by rounding again, so the packed copy is the model."""
    stories = Path(__file__).parents[2] / "models" / "stories-mini"
    rounded.main(str(stories), str(tmp_path / "copy"))
    before, after = insertlm.load(stories, "cpu"), insertlm.load(tmp_path / "copy", "cpu")
    for (a, x), (b, y) in zip(before.family.state_dict().items(), after.family.state_dict().items(), strict=True):
        assert a == b
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert after.text_tokenizer.encode("Once upon a time") == before.text_tokenizer.encode("Once upon a time")
