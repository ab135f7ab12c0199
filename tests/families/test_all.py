"""What holds for every family."""

from __future__ import annotations

import pytest
import torch

from insertlm.backbone.transformer import ModelConfig
from insertlm.config import FamilyConfig
from insertlm.decoding.settings import DecodeConfig, Prompt
from insertlm.families.arm import ArmConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.tasks.star import Star
from insertlm.training.optim import OptimConfig
from insertlm.training.order import Order
from insertlm.training.step import TrainStep

TASK = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=8, train=40)
MODEL = ModelConfig(layers=2, width=16, heads=2, hidden=32, dropout=0.1)
WRITING = DecodeConfig(max_steps=5)
FAMILIES = [(IlmConfig(), WRITING), (ArmConfig(), WRITING), (MdmConfig(block=4), WRITING), (ItConfig(), WRITING)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("config", "decode"), FAMILIES, ids=[config.__struct_config__.tag for config, _ in FAMILIES])
def test_a_model_learns_writes_with_its_average_and_learns_on(
    config: FamilyConfig, decode: DecodeConfig, precision: str
) -> None:
    """As a run with validation does."""
    family = config.build(MODEL, TASK.tokenizer).train()
    examples = TASK.examples("train")
    step = TrainStep(
        family,
        family.rows(examples),
        Order(len(examples), 8, 1),
        optim=OptimConfig(learning_rate=3e-3, warmup=2),
        steps=4,
        device=torch.device("cpu"),
        compiled=False,
        precision=precision,
    )
    prompts = [Prompt(example.prefix) for example in TASK.examples("validation", 3)]
    for number in range(4):
        step(number)
        family.eval()
        with step.optimizer.replaced(step.ema.average):
            written = family.decode(prompts, decode)
        family.train()
        assert [text.prefix for text in written] == [prompt.prefix for prompt in prompts]
        assert all(0 <= token < TASK.nodes for text in written for token in text.ids)
    assert all(torch.isfinite(value).all() for value in step.optimizer.weights)
