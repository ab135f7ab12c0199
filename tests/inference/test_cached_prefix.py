"""What is computed while a text is written: the prefix once, and no rows of texts that have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.packing import Segments
from insertlm.families.ilm import ILM
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.attention import PackedAttention

TinyIlm = Callable[..., ILM]

HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
ENDLESS = DecodeConfig(stop_threshold=1.0, max_steps=6)  # an untrained model is never so sure
words, seeds = st.integers(0, 5), st.integers(0, 2**40)


@dataclass
class Spy:
    """What the backbone was asked: positions and hidden rows of every call."""

    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.calls.append((inputs[1], output))

    @property
    def sizes(self) -> list[int]:
        return [len(positions) for positions, _ in self.calls]


@given(st.builds(Prompt, st.lists(words, min_size=1, max_size=5), seeds, st.lists(words, max_size=4)))
@settings(HEAVY, max_examples=30)
def test_hidden_rows_beside_a_cached_prefix_are_those_of_a_full_forward(tiny_ilm: TinyIlm, prompt: Prompt) -> None:
    ilm, spy = tiny_ilm(prefix_lm=True), Spy()
    hook = ilm.backbone.register_forward_hook(spy)
    (trajectory,) = ilm.decode([prompt], ENDLESS)
    hook.remove()
    prefix, text = prompt.prefix, [*prompt.start]
    assert spy.sizes[0] == len(prefix)
    assert len(spy.calls) == len(trajectory.events) + 2
    for number, (positions, hidden) in enumerate(spy.calls[1:]):
        row = torch.tensor([*prefix, ilm.specials.stop, ilm.specials.bos, *text])
        place = torch.tensor([*range(1, len(prefix) + 1), 0, *range(len(prefix) + 1, len(row))])
        whole = Segments(torch.tensor([0, len(row)]).int(), len(row))
        inside = torch.arange(len(row)) < len(prefix)
        with torch.no_grad():
            full = ilm.backbone(row, place, PackedAttention(whole, (~inside).int()))
        assert sorted(positions.tolist()) == sorted(place[~inside].tolist())
        torch.testing.assert_close(hidden, full[place.argsort()][positions], rtol=1e-10, atol=1e-10)
        if number < len(trajectory.events):
            text.insert(trajectory.events[number].rank, trajectory.events[number].token)


@pytest.mark.parametrize("prefix_lm", [False, True])
def test_only_rows_under_way_are_computed(tiny_ilm: TinyIlm, prefix_lm: bool) -> None:
    ilm, spy = tiny_ilm(prefix_lm=prefix_lm), Spy()
    ilm.backbone.register_forward_hook(spy)
    batch = [Prompt([0] * length) for length in (1, 4, 6)]
    written = ilm.decode(batch, DecodeConfig(stop_threshold=1.0, max_length=10, max_steps=50))
    assert [len(trajectory.ids) for trajectory in written] == [7, 4, 2]
    expected = [
        sum(2 + number + (0 if prefix_lm else len(t.prefix)) for t in written if number <= len(t.ids))
        for number in range(8)
    ]
    assert spy.sizes == ([11] if prefix_lm else []) + expected
