"""`train.deterministic`: runs that give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from insertlm.cli.main import main
from insertlm.families.ilm import ILM
from insertlm.nn.fused import embed
from insertlm.recipe import load_recipe
from insertlm.storage import checkpoints
from insertlm.training import loop
from insertlm.training.deterministic import deterministic
from insertlm.training.validation import validate

CUDA = torch.cuda.is_available()
RECIPE = """
task: {name: TASK, train: 300, validation: 4}
model: {layers: 2, width: 64, heads: 2, hidden: 128, dropout: 0.1}
family: FAMILY
optim: {learning_rate: 1.0e-3, warmup: 2, matrices: muon}
train: {steps: 8, batch_size: 16, log_every: 1, validate_every: 4, deterministic: true}
decode: {max_steps: 4}
"""
FAMILIES = {
    "ilm": "{name: ilm, group: 3, solver: 0.5}",
    "gates": "{name: ilm, stop: slots}",
    "arm": "{name: arm}",
    "mdm": "{name: mdm, block: 108}",
    "it": "{name: it}",
}


def result(run: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The losses and validations of a run, and all tensors of its checkpoint."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [part for line in lines for part in line.split(",") if "per_second" not in part and "wait" not in part]
    newest = checkpoints.latest(run / "checkpoints")
    assert newest is not None
    parts = checkpoints.Parts(newest)
    names = [(part, name) for part in ("weights", "ema", "optimizer") for name in parts[part]]
    return losses, {f"{part}/{name}": parts[part][name] for part, name in names}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA"))])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_have_the_same_bits(family: str, device: str, tmp_path: Path) -> None:
    """Of puzzles, whose few words are added to by thousands of rows; with other work on the device in between."""
    place = tmp_path / "r.yaml"
    place.write_text(RECIPE.replace("TASK", "zebra").replace("FAMILY", FAMILIES[family]), encoding="utf-8")
    found = []
    for name in ("a", "b"):
        assert main(["train", str(place), "--run", str(tmp_path / name), "--device", device]) == 0
        torch._dynamo.reset()  # the second run compiles anew
        found.append(result(tmp_path / name))
    (losses, tensors), (again, others) = found
    assert len(losses) > 8 and losses == again
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def test_steps_are_deterministic_if_asked_for_and_validations_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, while_validating = [], []
    losses = ILM.losses

    def watched(self: ILM, *arguments: Any, **more: Any) -> Any:
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        seen.append((self.training, torch.are_deterministic_algorithms_enabled(), filled))
        return losses(self, *arguments, **more)

    def validating(*arguments: Any, **more: Any) -> Any:
        while_validating.append(torch.are_deterministic_algorithms_enabled())
        return validate(*arguments, **more)

    monkeypatch.setattr(ILM, "losses", watched)
    monkeypatch.setattr(loop, "validate", validating)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    place = tmp_path / "r.yaml"
    place.write_text(RECIPE.replace("TASK", "zebra").replace("FAMILY", "{name: ilm}"), encoding="utf-8")
    for asked in ("true", "false"):
        seen.clear()
        run = ["--run", str(tmp_path / asked), "--train.deterministic", asked]
        assert main(["train", str(place), "--device", "cpu", *run]) == 0
        assert {*seen} == {(True, asked == "true", asked == "false")}
    assert while_validating == [False] * 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_mode_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ZeroDivisionError), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        _ = 1 / 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    """With other sums it would be another run from there on."""
    place = tmp_path / "r.yaml"
    place.write_text(RECIPE.replace("TASK", "zebra").replace("FAMILY", "{name: ilm}"), encoding="utf-8")
    run = ["--run", str(tmp_path / "run"), "--device", "cpu", "--train.validate_every", "0"]
    assert main(["train", str(place), *run, "--train.steps", "2"]) == 0
    assert main(["train", str(place), *run, "--train.deterministic", "false"]) == 2
    assert load_recipe(tmp_path / "run" / "recipe.yaml").train.deterministic


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA"))])
def test_the_sorted_sum_is_the_gradient_of_an_embedding(device: str) -> None:
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(25, 16, generator=noise).to(device).requires_grad_()
    tokens = torch.randint(0, 25, (5000,), generator=noise).to(device)
    grad = torch.randn(5000, 16, generator=noise).to(device)
    [expected] = torch.autograd.grad(F.embedding(tokens, weight.double()), weight, grad.double())
    plain = embed(tokens, weight)
    with deterministic(True):
        rows = embed(tokens, weight)
        sums = [torch.autograd.grad(rows, weight, grad, retain_graph=True)[0] for _ in range(3)]
    assert "Embedding" in type(rows.grad_fn).__name__ and torch.equal(rows, plain)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0], expected.float())


@pytest.mark.usefixtures("fresh_compiler")
def test_the_compiler_leaves_the_sorted_sum_alone() -> None:
    backward: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backward.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
    compiled = torch.compile(embed, backend=compiler, fullgraph=True)
    weight = torch.randn(5, 4, requires_grad=True)
    with deterministic(True):
        compiled(torch.tensor([1, 2, 1]), weight).sum().backward()  # type: ignore[no-untyped-call]
    assert "insertlm.sums_by_word.default" in backward
    backward.clear()
    # The mode is another, for which it is compiled anew.
    compiled(torch.tensor([1, 2, 1]), weight).sum().backward()  # type: ignore[no-untyped-call]
    assert backward and "insertlm.sums_by_word.default" not in backward
