"""A sweep over ways of decoding, with a writer in place of a model of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.evaluator import Evaluator
from insertlm.evaluation.frontier import grid_of_settings, sweep
from insertlm.evaluation.generation import TextGenerator, generate_once, unconditional
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.nll import score_texts, summarise
from insertlm.inference.settings import DecodeConfig
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.model import load
from insertlm.tasks.star import Star

CPU = torch.device("cpu")


class Stub:
    """Writes the more letters the hotter it is, and nothing at all at 0."""

    def __init__(self, fail_at: float = -1) -> None:
        self.calls: list[float] = []
        self._fail_at = fail_at
        self.source = TextGenerator("stub", self.write)

    def write(self, settings: DecodeConfig, count: int) -> list[str]:
        if settings.temperature == self._fail_at:
            raise InsertlmError("stopped")
        self.calls.append(settings.temperature)
        return ["abcdefghij"[: int(10 * settings.temperature)] * (1 + number) for number in range(count)]


def test_all_combinations_over_what_stays() -> None:
    base = DecodeConfig(top_k=5)
    grid = grid_of_settings(base, {"temperature": ["0.5", "1"], "stop_threshold": ["0.9"], "top_p": ["0.9", "1.0"]})
    assert [tuple(varied.values()) for varied, _ in grid] == [
        (0.5, 0.9, 0.9),
        (0.5, 0.9, 1),
        (1, 0.9, 0.9),
        (1, 0.9, 1),
    ]
    assert list(grid[0][0]) == ["temperature", "stop_threshold", "top_p"]
    assert grid[2][1] == DecodeConfig(top_k=5, temperature=1.0, stop_threshold=0.9, top_p=0.9)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temprature", "1", "temprature: unknown key; did you mean temperature"),
        ("temperature", "-1", "--decode.temperature: expected float >= 0"),
        ("top_p", "x", "--decode.top_p: expected float, got 'x'"),
    ],
)
def test_bad_sweeps(key: str, value: str, message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        grid_of_settings(DecodeConfig(), {key: [value]})


def test_points_are_those_of_their_texts(causal_model: Path) -> None:
    stub, evaluator, seen = Stub(), Evaluator(str(causal_model), CPU), list[int]()
    grid = grid_of_settings(DecodeConfig(), {"temperature": ["0", "0.2", "0.8"]})
    points = sweep(stub.source, grid, 3, evaluator, Journal(), seen.append)
    assert seen == [1, 2, 3]
    assert [point.settings for point in points] == [{"temperature": t} for t in (0.0, 0.2, 0.8)]
    assert (points[0].summary, points[0].empty) == (None, 3)
    expected = summarise(score_texts(["ab", "abab", "ababab"], evaluator, Journal()))
    assert points[1].summary
    assert points[1].summary.nll == pytest.approx(expected.nll)
    assert points[1].summary.length == expected.length
    assert all(point.seconds_per_text > 0 for point in points)


def test_a_sweep_goes_on_where_it_was_stopped(causal_model: Path, tmp_path: Path) -> None:
    evaluator = Evaluator(str(causal_model), CPU)
    grid = grid_of_settings(DecodeConfig(), {"temperature": ["0.2", "0.5", "0.8"]})
    with pytest.raises(InsertlmError, match="stopped"), Journal(tmp_path / "j.jsonl") as journal:
        sweep(Stub(fail_at=0.8).source, grid, 2, evaluator, journal)
    stub = Stub()
    with Journal(tmp_path / "j.jsonl") as journal:
        points = sweep(stub.source, grid, 2, evaluator, journal)
    assert stub.calls == [0.8]
    with Journal(tmp_path / "j.jsonl") as journal:
        assert sweep(Stub().source, grid, 2, evaluator, journal) == points


def test_another_count_source_or_setting_writes_anew() -> None:
    stub, journal = Stub(), Journal()
    for settings, count in ((DecodeConfig(temperature=1), 2), (DecodeConfig(temperature=1), 3), (DecodeConfig(), 2)):
        for _ in range(2):
            generate_once(stub.source, settings, count, journal)
    generate_once(TextGenerator("other", stub.write), DecodeConfig(), 2, journal)
    assert stub.calls == [1, 1, 0, 0]


# --- The seam to models


def test_a_model_writes_from_empty_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a family that writes its seed."""

    class Family:
        weights, framing = 0.5, 2

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weights": torch.tensor([self.weights])}

        def check(self, prompts: Any, settings: DecodeConfig) -> int:
            return 9

        def decode(self, prompts: Any, settings: DecodeConfig) -> list[Trajectory]:
            assert all((prompt.prefix, prompt.start) == ([], []) for prompt in prompts)
            return [Trajectory([], [], [Insertion(0, 0, p.seed % 64, 0.0, None)], None) for p in prompts]

    star = load("star-hard-mini", "cpu")
    with pytest.raises(InsertlmError, match="its task starts from a prompt; expected a model that writes texts freely"):
        unconditional(star, 7)
    monkeypatch.setattr(Star, "has_answers", False)
    model = replace(star, family=cast(Any, Family()))
    source = unconditional(model, 7)
    assert list(source.generate(DecodeConfig(), 70)) == [model.decode([(7 + number) % 64]) for number in range(70)]
    assert source.identity == unconditional(model, 7).identity != unconditional(model, 8).identity
    Family.weights = 0.25  # trained anew, into the same folder
    assert source.identity != unconditional(model, 7).identity
