"""A step sees the same rows wherever they come from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from insertlm.data.order import Order, ProcessOrder
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.families.registry import AnyFamily
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Corpus, Examples
from insertlm.tasks.star import Star
from insertlm.training import rows as module
from insertlm.training.rows import Resident, Streamed
from insertlm.training.step import TrainStep

CPU = torch.device("cpu")
TASK = Star(degree=2, min_nodes=3, max_nodes=4, min_plan=2, nodes=10, train=40)
EXAMPLES = TASK.examples("train")
FAMILIES = [
    IlmConfig(),
    IlmConfig(stop="slots", blanks=0.7),
    ArmConfig(),
    MdmConfig(block=TASK.longest_target),
    ItConfig(),
]


class Watched:
    """A corpus that counts what is read of it."""

    fingerprint = ""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.read = examples, 0

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, documents: NDArray[np.int64]) -> Examples:
        self.read += len(documents)
        return self.examples.take(documents)


def family_of(config: AnyFamily) -> Family:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(layers=1, width=16, heads=2, hidden=32, dropout=0.1)
        return config.build(model, TASK.tokenizer).train()


def step_of(config: AnyFamily, corpus: Corpus | None, *, compiled: bool = False) -> TrainStep:
    family = family_of(config)
    data = family.rows(EXAMPLES) if corpus is None else corpus
    order, optim = Order(len(EXAMPLES), 8, 1), OptimConfig(warmup=2)
    return TrainStep(family, data, order, optim=optim, steps=200, device=CPU, compiled=compiled)


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.family.parameters()]


def test_a_process_reads_its_part_of_a_corpus_alone() -> None:
    """And sees in it what one process would see there."""
    family, order = family_of(IlmConfig()), Order(len(EXAMPLES), 8, 1)
    corpora = [Watched(EXAMPLES) for _ in range(2)]
    sources = [Streamed(family, corpus, ProcessOrder(order, rank, 2, 1), CPU) for rank, corpus in enumerate(corpora)]
    whole = Streamed(family, Watched(EXAMPLES), order, CPU)
    for number in (0, 1, 63, 64):
        batch, halves = whole.batch(number), [source.batch(number) for source in sources]
        assert torch.equal(torch.cat([half.example for half in halves]), batch.example)
        assert batch.visible == sum(half.visible for half in halves)
        cells = [half.cells for half in halves]
        assert batch.cells is not None
        assert torch.equal(torch.cat([part for part in cells if part is not None]), batch.cells)
    for corpus in corpora:  # one for the shapes, and two stretches of steps, a third being read ahead
        assert corpus.read in (1 + 2 * 64 * 4, 1 + 3 * 64 * 4)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: str(config.__struct_config__.tag))
def test_streamed_rows_train_as_resident_ones(config: AnyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, over the edges of stretches, and from the middle of one on."""
    monkeypatch.setattr(module, "_CELLS", 3 * 8 * 28)
    resident, streamed = step_of(config, None), step_of(config, Watched(EXAMPLES))
    assert streamed.source.stretch < 6
    for number in (0, 1, 2, 3, 4, 5, 70, 71, 2):
        a, b = resident(number), streamed(number)
        assert torch.equal(a.example, b.example)
        assert a.visible == b.visible
    assert all(torch.equal(a, b) for a, b in zip(weights(resident), weights(streamed), strict=True))


def test_streamed_rows_keep_the_order_of_a_solver() -> None:
    """And resident ones are half as wide as what the model reads, which is not changed by it."""
    order_found = np.random.default_rng(1).permuted(np.indices(EXAMPLES.target.shape, np.int32)[1], axis=1)
    examples, family = replace(EXAMPLES, solving_order=order_found), family_of(IlmConfig(solver=0.5))
    expected, order = family.rows(examples), Order(len(examples), 8, 1)
    assert expected.solving_order is not None
    resident = Resident(family, expected, order, CPU)
    assert resident._here.dtype == torch.int32
    for source in (resident, Streamed(family, Watched(examples), order, CPU)):
        for number in (0, 7):
            batch = source.batch(number)
            source.put(batch)
            rows, wanted = source.rows(batch.example), expected.select(batch.example)
            for name in ("given", "given_length", "target", "target_length", "solving_order"):
                found = getattr(rows, name)
                assert found.dtype == torch.int64
                assert torch.equal(found, getattr(wanted, name)), name


@pytest.mark.usefixtures("fresh_compiler")
def test_traced_steps_read_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled sees the rows of the step at work, not those it was compiled with. Without torch.compile's code
    generator, which is slow, and without attention, which on a CPU asks the device."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr("insertlm.nn.attention.attend", lambda q, k, v, *which: v)
    step, plain = step_of(IlmConfig(), Watched(EXAMPLES), compiled=True), step_of(IlmConfig(), None)
    for number in (0, 1, 5):
        batch = step.source.batch(number)
        step.source.put(batch)
        found = step._losses(batch.example, batch.epoch, 256).total
        torch.testing.assert_close(found, plain._losses(batch.example, batch.epoch, None).total, rtol=1e-4, atol=1e-5)


def test_no_more_than_a_stretch_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CELLS", 2 * 8 * 50)
    corpus = Watched(EXAMPLES)
    step = step_of(IlmConfig(), corpus)
    stretch = step.source.stretch
    for number in range(20):
        step(number)
        assert corpus.read <= 1 + 8 * stretch * (number // stretch + 2)


def test_a_batch_that_is_larger_than_the_bound_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CELLS", 1)
    source = Streamed(family_of(IlmConfig()), Watched(EXAMPLES), Order(40, 8, 1), CPU)
    assert source.stretch == 1
    assert len(source.batch(3).example) == 8


def test_the_buffer_stays_where_it_is() -> None:
    """A captured graph reads it there."""
    source = Streamed(family_of(IlmConfig()), Watched(EXAMPLES), Order(40, 8, 1), CPU)
    before = source._buffer.data_ptr()
    for number in (0, 1, 64):
        source.put(source.batch(number))
    assert source._buffer.data_ptr() == before


def test_waiting_is_counted_since_the_last_time() -> None:
    family, order = family_of(IlmConfig()), Order(40, 8, 1)
    sources = (Resident(family, family.rows(EXAMPLES), order, CPU), Streamed(family, Watched(EXAMPLES), order, CPU))
    for source in sources:
        source.batch(0)
        assert source.waited() > 0
        assert source.waited() == 0


def test_a_corpus_that_fails_fails_the_step() -> None:
    class Broken(Watched):
        def take(self, documents: NDArray[np.int64]) -> Examples:
            if len(documents) > 1:
                raise OSError("gone")
            return super().take(documents)

    with pytest.raises(OSError, match="gone"):
        step_of(IlmConfig(), Broken(EXAMPLES))(0)


def test_the_next_stretch_is_read_while_this_one_is_at_work() -> None:
    corpus = Watched(EXAMPLES)
    source = Streamed(family_of(IlmConfig()), corpus, Order(len(EXAMPLES), 8, 1), CPU)
    source.batch(0)
    source._reader.shutdown()  # waits for what is under way
    assert corpus.read == 1 + 2 * source.stretch * 8
