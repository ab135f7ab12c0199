"""What holds for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.data.order import Order
from insertlm.families.arm import ArmConfig
from insertlm.families.both import BothConfig
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.families.registry import AnyFamily
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.recipe import OptimConfig, Recipe, TrainConfig
from insertlm.tasks.star import Star
from insertlm.training.loop import train
from insertlm.training.step import TrainStep

TASK = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=8, train=40)
MODEL = ModelConfig(layers=2, width=16, heads=2, hidden=32, dropout=0.1)
LLAMA = ModelConfig(
    **{**PRESETS["smollm2-135m"], "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 32, "max_length": 64}
)
WRITING = DecodeConfig(max_steps=5)
FAMILIES: list[tuple[AnyFamily, DecodeConfig]] = [
    (config, WRITING)
    for config in (
        IlmConfig(),
        IlmConfig(stop="slots", blanks=0.7, targets="first"),
        ArmConfig(),
        MdmConfig(block=4),
        ItConfig(),
        FillConfig(jump=4),
        BothConfig(jump=4),
        FillConfig(sight="before", positions="plain", learn="all", hints=0.0, in_step=0.0),
    )
]


EVERY = pytest.mark.parametrize(
    ("config", "decode"), FAMILIES, ids=[config.__struct_config__.tag for config, _ in FAMILIES]
)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["paper", "llama"])
@EVERY
def test_a_model_learns_writes_with_its_average_and_learns_on(
    config: AnyFamily, decode: DecodeConfig, model: ModelConfig, precision: str
) -> None:
    """As a run with validation does."""
    family = config.build(model, TASK.tokenizer).train()
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
    sampling = msgspec.structs.replace(decode, temperature=3.0, max_steps=12, stop_threshold=threshold)
    seeds = [seed + (high << 32) for seed in range(4) for high in (0, 1, 1 << 29)]
    written = family.decode([Prompt([1, 2], seed) for seed in seeds], sampling)
    written = [text for text in written if len(text.events) > 1]  # where ends are drawn, some end at once
    assert len(written) >= len(seeds) / 3
    assert len({(*text.ids, *text.order) for text in written}) == len(written)


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


# --- One matrix of words


@EVERY
def test_a_tied_model_keeps_its_words_once_and_reads_them_either_way(config: AnyFamily, decode: DecodeConfig) -> None:
    family, other = (config.build(LLAMA, TASK.tokenizer) for _ in range(2))
    assert family.unembedding.weight is family.backbone.embedding.weight
    state = family.state_dict()
    assert "backbone.embedding.weight" in state
    assert "unembedding.weight" not in state
    twice = {**state, "unembedding.weight": state["backbone.embedding.weight"].clone()}
    for weights in (state, twice):
        other.backbone.embedding.weight.data.zero_()
        other.load_state_dict(weights)
        assert torch.equal(other.unembedding.weight, family.unembedding.weight)
        assert other.unembedding.weight is other.backbone.embedding.weight
    with pytest.raises(RuntimeError, match=r"model\.tied: the weights have an unembedding that is not their embedding"):
        other.load_state_dict({**state, "unembedding.weight": state["backbone.embedding.weight"] + 1})
    with pytest.raises(RuntimeError, match=r"Missing key.*backbone\.embedding\.weight"):
        other.load_state_dict({name: value for name, value in state.items() if "embedding" not in name})


@EVERY
def test_a_limit_on_tokens_cuts_a_text_and_changes_nothing_else(config: AnyFamily, decode: DecodeConfig) -> None:
    """With so many tokens as a text has, and with any fewer: it is the beginning of what would have been written,
    however many tokens come in a step."""
    if isinstance(config, FillConfig):
        pytest.skip("to a filler a limit is a budget: test_fill_writing.py")
    torch.manual_seed(0)
    family = config.build(MODEL, TASK.tokenizer).double().eval()
    torch.nn.init.normal_(family.get_parameter("unembedding.weight"))
    changes: dict[str, Any] = {"temperature": 1.0, "max_steps": 4}
    if family.abilities.stop_threshold:
        changes["stop_threshold"] = 1.0
    if family.abilities.parallel:
        changes |= {"parallel": 0, "order": "certainty"}
    settings = msgspec.structs.replace(decode, **changes)
    for seed in range(8):
        [whole] = family.decode([Prompt([1, 2], seed)], settings)
        for most in range(1, len(whole.events) + 1):
            [cut] = family.decode([Prompt([1, 2], seed)], msgspec.structs.replace(settings, max_tokens=most))
            step = cut.events[-1].step
            assert len(cut.events) == most
            assert [e for e in cut.events if e.step < step] == [e for e in whole.events if e.step < step]
            assert {(e.step, e.token) for e in cut.events} <= {(e.step, e.token) for e in whole.events}
            assert cut.limit in ("max_tokens", whole.limit if most == len(whole.events) else "max_tokens")
