"""Replayed from CUDA graphs, the backbone says what it says when it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from insertlm.families.ilm import IlmConfig
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.model import prepare
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
PROMPTS = [Prompt([1] * (3 + number % 4), number, start=[2, 3][: number % 3]) for number in range(70)]


@cuda
@pytest.mark.parametrize("shape", [{}, {"heads": 4, "kv_heads": 2, "head_size": 16, "norm": "rms"}], ids=str)
@torch.inference_mode()
def test_graphs_and_calls_agree_while_texts_grow_and_leave(shape: dict[str, Any]) -> None:
    model = ModelConfig(**{"layers": 2, "width": 32, "heads": 2, "hidden": 64, "prefix_lm": True, **shape})
    ilm = prepare(IlmConfig().build(model, WordTokenizer(tuple("0123456"))), torch.device("cuda"))
    settings = DecodeConfig(stop_threshold=1.0, max_steps=9)
    fast, plain = (ilm.writer(PROMPTS, settings, 40) for _ in range(2))
    plain.stay_open()
    for number in range(9):
        hidden, where = fast.hidden()  # type: ignore[attr-defined]
        expected, there = plain.hidden()  # type: ignore[attr-defined]
        written = plain.canvas.used & (plain.canvas.columns >= plain.canvas.prefix[:, None])  # type: ignore[attr-defined]
        torch.testing.assert_close(hidden[where[written]], expected[there[written]], rtol=0.05, atol=0.05)
        step = plain.step(number)
        for writer in (fast, plain):
            writer.write(step)
        if number % 3 == 2:
            stay = torch.arange(0, len(step.token), 2, device="cuda")
            for writer in (fast, plain):
                writer.select(stay)
    assert torch.equal(fast.row, plain.row)


@cuda
@pytest.mark.parametrize("longest", [7, 8, 9, 10])
def test_texts_end_where_rows_may_be_no_longer(longest: int) -> None:
    model = ModelConfig(layers=2, width=32, heads=2, hidden=64, prefix_lm=True)
    ilm = prepare(IlmConfig().build(model, WordTokenizer(tuple("0123456"))), torch.device("cuda"))
    settings = DecodeConfig(stop_threshold=1.0, max_steps=50, max_length=longest)
    written = ilm.decode([Prompt([1], seed) for seed in range(16)], settings)
    assert {len(each.ids) for each in written} == {longest - 3}  # <stop>, the prefix, <bos>
