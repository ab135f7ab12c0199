"""However many processes take a step, and in however many pieces, it is the same step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.data.order import Order
from insertlm.families.arm import ArmConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.families.registry import AnyFamily
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.storage import checkpoints
from insertlm.tasks.star import Star
from insertlm.training.optim import freeze
from insertlm.training.parallel import ReplicatedStep
from insertlm.training.saving import Saver
from insertlm.training.sharded import ShardedStep
from insertlm.training.step import TrainStep

CPU = torch.device("cpu")
STEPS = 50
HALF, REST = 10, 6  # steps before and after a checkpoint
TASK = Star(degree=2, min_nodes=3, max_nodes=5, min_plan=2, nodes=10, train=30)
OPTIM = OptimConfig(learning_rate=3e-3, warmup=5, ema=0.9, ema_every=3, clip=0.5)
FAMILIES: dict[str, AnyFamily] = {
    "ilm": IlmConfig(),
    "arm": ArmConfig(),
    "mdm": MdmConfig(block=TASK.longest_target),
    "it": ItConfig(),
}
InProcesses = Callable[[int, Callable[[Processes], Any]], list[Any]]


def step_of(
    family: str,
    processes: Processes | None = None,
    sharded: bool = False,
    accumulate: int = 1,
    optim: OptimConfig = OPTIM,
    tied: bool = False,
    precision: str = "auto",
) -> TrainStep:
    model = ModelConfig(layers=2, width=16, heads=2, hidden=32, dropout=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = FAMILIES[family].build(model, TASK.tokenizer)
    built = (built.double() if precision == "auto" else built).train()
    if tied:
        built.unembedding.weight = built.backbone.embedding.weight
    freeze(built, optim)
    rows = built.rows(TASK.examples("train"))
    order = Order(len(rows.target), 8, 1)
    settings: dict[str, Any] = {
        "optim": optim,
        "steps": STEPS,
        "device": CPU,
        "compiled": False,
        "precision": precision,
    }
    if processes is None:
        return TrainStep(built, rows, order, **settings)
    kind = ShardedStep if sharded else ReplicatedStep
    return kind(built, rows, order, **settings, processes=processes, accumulate=accumulate)


def losses(step: TrainStep, steps: int = STEPS, first: int = 0) -> list[dict[str, float]]:
    found = []
    for number in range(first, steps):
        step(number)
        found.append(step.ledger.means(1))
    return found


def run(family: str, sharded: bool, accumulate: int, processes: Processes) -> list[dict[str, float]]:
    return losses(step_of(family, processes, sharded, accumulate))


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("family", "world", "sharded", "accumulate"),
    [
        ("ilm", 2, False, 1),
        ("arm", 4, False, 2),
        ("mdm", 2, False, 2),
        ("it", 2, False, 1),
        ("ilm", 2, True, 1),
        ("ilm", 4, True, 1),
        ("arm", 2, True, 2),
    ],
)
def test_losses_do_not_depend_on_the_processes(
    in_processes: InProcesses, family: str, world: int, sharded: bool, accumulate: int
) -> None:
    expected = losses(step_of(family))
    early, late = (sum(found["token_loss"] for found in part) for part in (expected[:10], expected[-10:]))
    assert late < 0.95 * early, "nothing was learnt"
    for found in in_processes(world, partial(run, family, sharded, accumulate)):
        assert_same(found, expected)


@pytest.mark.parametrize(("family", "accumulate"), [("ilm", 8), ("arm", 2), ("mdm", 4), ("it", 4)])
def test_losses_do_not_depend_on_the_pieces(family: str, accumulate: int) -> None:
    assert_same(losses(step_of(family, Processes(CPU), accumulate=accumulate)), losses(step_of(family)))


# --- Muon

MUON = msgspec.structs.replace(OPTIM, matrices="muon")


def muon(processes: Processes) -> list[dict[str, float]]:
    return losses(step_of("ilm", processes, optim=MUON), HALF)


def test_muon_takes_the_same_steps_in_every_process(in_processes: InProcesses) -> None:
    """Of its products in bfloat16 a last bit may differ between sums of gradients and the gradient of a sum."""
    expected = losses(step_of("ilm", optim=MUON), HALF)
    one, other = in_processes(2, muon)
    assert one == other
    for a, b in zip(one, expected, strict=True):
        assert a == pytest.approx(b, rel=2e-3)
    assert expected[-1] != pytest.approx(losses(step_of("ilm"), HALF)[-1], rel=2e-3)


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(InsertlmError, match=r"^optim.matrices: expected adamw for a sharded model, muon needs whole"):
        step_of("ilm", Processes(CPU), sharded=True, optim=MUON)


# --- Tied weights, frozen ones, and rates of their own

SLOW = msgspec.structs.replace(OPTIM, rates={"embedding": 0.0, "blocks.0": 0.1}, weight_decay=0.5)


def tied(optim: OptimConfig, sharded: bool, processes: Processes) -> tuple[list[dict[str, float]], set[str]]:
    step = step_of("ilm", processes, sharded, optim=optim, tied=True)
    found = losses(step, HALF)
    family = step.family
    assert family.unembedding.weight is family.backbone.embedding.weight  # type: ignore[union-attr]
    return found, set(step.state()["weights"])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("optim", [OPTIM, SLOW])
def test_tied_and_frozen_weights_do_not_depend_on_the_processes(
    in_processes: InProcesses, optim: OptimConfig, sharded: bool
) -> None:
    alone = step_of("ilm", optim=optim, tied=True)
    expected, began = losses(alone, HALF), step_of("ilm", tied=True).state()["weights"]
    assert expected != losses(step_of("ilm"), HALF)
    assert "unembedding.weight" not in began
    still = {name for name, value in alone.state()["weights"].items() if torch.equal(value, began[name])}
    assert still == ({"backbone.embedding.weight"} if optim is SLOW else set())
    for found, names in in_processes(2, partial(tied, optim, sharded)):
        assert_same(found, expected)
        assert names == began.keys()


def again(processes: Processes) -> list[dict[str, float]]:
    step = step_of("ilm", processes, sharded=True)
    step.family.backbone.recompute = True
    return losses(step, HALF)


def test_shards_are_gathered_again_for_what_is_computed_again(in_processes: InProcesses) -> None:
    expected = losses(step_of("ilm"), HALF)
    for found in in_processes(2, again):
        assert_same(found, expected)


def rounded(family: str, processes: Processes) -> tuple[list[dict[str, float]], set[torch.dtype], set[torch.dtype]]:
    step, gathered = step_of(family, processes, sharded=True, precision="bfloat16"), set[torch.dtype]()
    block = step.family.backbone.blocks[0]
    block.register_forward_pre_hook(lambda *_: gathered.update(p.dtype for p in block.parameters()))
    found = losses(step, HALF)
    return found, gathered, {p.dtype for p in step.family.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_gathered_in_bfloat16_and_learn_in_float32(in_processes: InProcesses, family: str) -> None:
    expected = losses(step_of(family, precision="bfloat16"), HALF)
    for found, gathered, kept in in_processes(2, partial(rounded, family)):
        assert gathered == {torch.bfloat16}
        assert kept == {torch.float32}
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=2e-2, abs=1e-3)


# --- From one number of processes to another


def first_half(folder: Path, sharded: bool, processes: Processes) -> None:
    step = step_of("ilm", processes, sharded)
    losses(step, HALF)
    saver = Saver(folder, processes, keep=1)
    with saver.finishing():
        saver.save(HALF, step.to_save())


def second_half(folder: Path, sharded: bool, processes: Processes) -> list[dict[str, float]]:
    step = step_of("ilm", processes, sharded)
    newest = checkpoints.latest(folder)
    assert newest is not None
    step.load(checkpoints.Parts(newest))
    for name, tensor in step.to_save()["optimizer"].items():
        whole = checkpoints.load_part(newest, "optimizer")[name]
        assert any(torch.equal(tensor, part) for part in (whole, *whole.chunk(processes.world)))
    return losses(step, HALF + REST, HALF)


@pytest.mark.parametrize(
    ("writers", "sharded", "readers", "then_sharded"),
    [(2, False, 1, False), (2, True, 4, False), (1, False, 2, True)],
)
def test_what_some_processes_save_others_go_on_from(
    tmp_path: Path, in_processes: InProcesses, writers: int, sharded: bool, readers: int, then_sharded: bool
) -> None:
    start(in_processes, writers, partial(first_half, tmp_path, sharded))
    found = start(in_processes, readers, partial(second_half, tmp_path, then_sharded))
    expected = losses(step_of("ilm"), HALF + REST)[HALF:]
    for each in found:
        assert_same(each, expected)
    files = [path for path in (tmp_path / f"step-{HALF:08d}").iterdir() if path.name != "manifest.json"]
    tensors = sum(x.nbytes for part in step_of("ilm").state().values() for x in part.values())
    assert len(files) == 3 * writers
    assert sum(path.stat().st_size for path in files) < tensors + 8_000 * len(files), "something was written twice"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ["ilm", "arm"])
def test_they_begin_with_given_weights_as_one_does(in_processes: InProcesses, family: str, sharded: bool) -> None:
    """An ILM's own, or all that an ARM has of them."""
    weights = {name: x + 0.01 for name, x in step_of(family).state()["weights"].items()}
    alone = step_of("ilm")
    alone.begin_with(weights, akin=family != "ilm")
    expected = losses(alone, HALF)
    assert expected != losses(step_of("ilm"), HALF)
    for each in in_processes(2, partial(begun, weights, family, sharded)):
        assert_same(each, expected)


def begun(weights: dict[str, Tensor], family: str, sharded: bool, processes: Processes) -> list[dict[str, float]]:
    step = step_of("ilm", processes, sharded)
    step.begin_with(weights, akin=family != "ilm")
    return losses(step, HALF)


def start(in_processes: InProcesses, world: int, work: Callable[[Processes], Any]) -> list[Any]:
    return [work(Processes(CPU))] if world == 1 else in_processes(world, work)


@pytest.mark.parametrize("every", [1, STEPS + 1])
def test_the_average_does_not_depend_on_the_pieces(every: int) -> None:
    """Of every step, and of the last one alone."""
    optim = msgspec.structs.replace(OPTIM, ema=0.9, ema_every=every)
    alone, pieces = step_of("ilm", optim=optim), step_of("ilm", Processes(CPU), accumulate=4, optim=optim)
    fresh = {name: value.clone() for name, value in alone.state()["ema"].items()}
    losses(alone)
    losses(pieces)
    for name, value in alone.state()["ema"].items():
        assert not torch.equal(value, fresh[name])
        torch.testing.assert_close(pieces.state()["ema"][name], value, rtol=0, atol=1e-9)
