"""What holds for every family."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.data.order import Order
from insertlm.families.arm import ArmConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.families.registry import AnyFamily
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.transformer import ModelConfig
from insertlm.recipe import OptimConfig, Recipe, TrainConfig
from insertlm.tasks.star import Star
from insertlm.training.loop import train
from insertlm.training.step import TrainStep

TASK = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=8, train=40)
MODEL = ModelConfig(layers=2, width=16, heads=2, hidden=32, dropout=0.1)
WRITING = DecodeConfig(max_steps=5)
FAMILIES = [(IlmConfig(), WRITING), (ArmConfig(), WRITING), (MdmConfig(block=4), WRITING), (ItConfig(), WRITING)]


EVERY = pytest.mark.parametrize(
    ("config", "decode"), FAMILIES, ids=[config.__struct_config__.tag for config, _ in FAMILIES]
)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@EVERY
def test_a_model_learns_writes_with_its_average_and_learns_on(
    config: AnyFamily, decode: DecodeConfig, precision: str
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
        assert all(0 <= token < TASK.nodes for text in written for token in text.ids)
    assert all(torch.isfinite(value).all() for value in step.optimizer.weights)


@EVERY
def test_seeds_of_more_than_32_bits_are_seeds_of_their_own(config: AnyFamily, decode: DecodeConfig) -> None:
    torch.manual_seed(0)
    family = config.build(MODEL, TASK.tokenizer).eval()
    threshold = 1.0 if family.abilities.stop_threshold else decode.stop_threshold
    sampling = msgspec.structs.replace(decode, temperature=3.0, max_steps=4, stop_threshold=threshold)
    seeds = [seed + (high << 32) for seed in range(4) for high in (0, 1, 1 << 29)]
    written = family.decode([Prompt([1, 2], seed) for seed in seeds], sampling)
    assert len({(*text.ids, *text.order) for text in written}) == len(seeds)


@EVERY
def test_what_validation_could_not_write_is_refused_before_anything_is_trained(
    config: AnyFamily, decode: DecodeConfig, tmp_path: Path
) -> None:
    short = msgspec.structs.replace(decode, max_length=6)
    recipe = Recipe(
        task=TASK, model=MODEL, family=config, train=TrainConfig(steps=2, batch_size=8, validate_every=1), decode=short
    )
    with pytest.raises(InsertlmError, match=r"^a prompt .*; 6 are allowed$"):
        train(recipe, tmp_path / "run", Processes(torch.device("cpu")), Console(quiet=True))
    assert not (tmp_path / "run").exists()
