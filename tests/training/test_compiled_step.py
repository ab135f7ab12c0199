"""On a GPU the step that is trained with, compiled and captured, learns what the plain one learns, in every family."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from insertlm.data.order import Order
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.recipe import OptimConfig, Recipe, parse_recipe
from insertlm.training.step import TrainStep

STEPS = 12  # the first ones of a capacity are not captured yet
BATCH = 64

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a captured step needs a CUDA device")


Rule = Literal["adamw", "muon"]


PAPER = {"layers": 2, "width": 64, "heads": 2, "hidden": 128, "dropout": 0.1}
LLAMA = {
    **PRESETS["smollm2-135m"],
    "layers": 2,
    "width": 192,
    "heads": 3,
    "kv_heads": 1,
    "hidden": 128,
    "max_length": 64,
}


def losses(
    recipe: Recipe,
    prefix_lm: bool,
    rule: Rule,
    *,
    compiled: bool,
    rate: float = 3e-3,
    shape: dict[str, Any] = PAPER,
    recompute: bool = False,
) -> list[float]:
    torch.manual_seed(0)
    model = ModelConfig(**shape, prefix_lm=prefix_lm)
    family = recipe.family.build(model, recipe.task.tokenizer).to("cuda").train()
    family.backbone.recompute = recompute
    rows = family.rows(recipe.task.examples("train", 4 * BATCH))
    optim = OptimConfig(matrices=rule, learning_rate=rate, warmup=2)
    step = TrainStep(
        family,
        rows,
        Order(4 * BATCH, BATCH, 1),
        optim=optim,
        steps=STEPS,
        device=torch.device("cuda"),
        compiled=compiled,
    )
    found = []
    for number in range(STEPS):
        step(number)
        found.append(step.ledger.means(1)["loss"])
    return found


@pytest.mark.parametrize(
    ("family", "task", "prefix_lm", "rule"),
    [
        ({"name": "ilm"}, "star-easy", False, "adamw"),
        ({"name": "ilm", "group": 2}, "star-easy", True, "muon"),
        ({"name": "ilm", "deletions": 3}, "star-easy", True, "adamw"),
        ({"name": "arm"}, "star-easy", False, "adamw"),
        ({"name": "arm"}, "star-easy", True, "muon"),
        ({"name": "arm"}, "star-medium", False, "adamw"),
        ({"name": "mdm", "block": 8}, "star-easy", False, "adamw"),
        ({"name": "mdm", "block": 8, "stretch": 0.5}, "star-easy", False, "muon"),
        ({"name": "it"}, "star-easy", False, "adamw"),
        ({"name": "it"}, "star-medium", False, "adamw"),  # 704 cells for slots, no whole number of blocks
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_the_compiled_step_learns_what_the_plain_one_learns(
    family: dict[str, Any], task: str, prefix_lm: bool, rule: Rule
) -> None:
    tree = {"task": {"preset": task}, "model": {"preset": "mini"}, "family": family, "train": {"steps": STEPS}}
    recipe = parse_recipe(tree, "test")
    plain, compiled = (losses(recipe, prefix_lm, rule, compiled=compiled) for compiled in (False, True))
    assert compiled == pytest.approx(plain, rel=0.02)
    fresh = losses(recipe, prefix_lm, rule, compiled=False, rate=0.0)
    assert plain[-1] < fresh[-1]  # of the same batch: others may be easier


@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["ilm", "arm"])
def test_a_llama_learns_compiled_what_it_learns_plain(name: str, recompute: bool, prefix_lm: bool) -> None:
    """Shared heads of keys, RMSNorm, SwiGLU, tied words."""
    tree = {
        "task": {"preset": "star-easy"},
        "model": {"preset": "mini"},
        "family": {"name": name},
        "train": {"steps": 1},
    }
    recipe = parse_recipe(tree, "test")
    plain = losses(recipe, prefix_lm, "adamw", compiled=False, shape=LLAMA)
    compiled = losses(recipe, prefix_lm, "adamw", compiled=True, shape=LLAMA, recompute=recompute)
    assert compiled == pytest.approx(plain, rel=0.02)
    fresh = losses(recipe, prefix_lm, "adamw", compiled=False, shape=LLAMA, rate=0.0)
    assert plain[-1] < fresh[-1]
