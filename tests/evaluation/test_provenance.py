"""Scores of an evaluation add up, and its record says where it comes from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

import insertlm
from insertlm.evaluation.accuracy import Scores, accuracy, evaluate
from insertlm.evaluation.provenance import provenance
from insertlm.families.ilm import ILM
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.tasks.star import Star


def test_scores_are_those_of_the_texts(tiny_ilm: Callable[..., ILM]) -> None:
    task = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=6)
    family, settings = tiny_ilm(words=6), DecodeConfig(max_steps=5, temperature=1.0)
    examples = task.examples("test", 7)
    seen: list[int] = []
    scores = evaluate(family, task, examples, settings, 3, seen.append)
    prompts = [Prompt(example.prefix, number) for number, example in enumerate(examples)]
    written = [trajectory.ids for trajectory in generate(family, prompts, settings, 7)]
    assert seen == [3, 6, 7]
    assert (scores.count, scores.tokens) == (7, sum(map(len, written)))
    expected = accuracy(task, examples, written)
    assert scores.sequence_accuracy == expected["sequence_accuracy"]
    assert scores.token_accuracy == expected["token_accuracy"]
    assert scores.seconds > 0
    assert list(scores.record()) == ["count", "sequence_accuracy", "token_accuracy", "tokens", "seconds"]


def test_speed_is_tokens_over_time() -> None:
    assert Scores(1, 0.0, 0.0, tokens=30, seconds=1.5).tokens_per_second == 20


def test_provenance_names_hardware_versions_and_commit() -> None:
    found = provenance(torch.device("cpu"))
    assert list(found) == ["device", "torch", "insertlm", "commit"]
    assert found["device"] and found["device"].endswith(" threads")
    assert (found["torch"], found["insertlm"]) == (torch.__version__, insertlm.__version__)


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(1, "git")])
def test_without_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert provenance(torch.device("cpu"))["commit"] is None


def test_every_example_has_a_seed_of_its_own(tiny_ilm: Callable[..., ILM], monkeypatch: pytest.MonkeyPatch) -> None:
    task = Star(degree=2, min_nodes=3, max_nodes=3, min_plan=2, nodes=6)
    seeds: list[int] = []

    def spy(family: ILM, prompts: list[Prompt], *what: Any) -> Any:
        seeds.extend(prompt.seed for prompt in prompts)
        return generate(family, prompts, *what)

    monkeypatch.setattr("insertlm.evaluation.accuracy.generate", spy)
    evaluate(tiny_ilm(words=6), task, task.examples("test", 4), DecodeConfig(max_steps=2), 3)
    assert seeds == [0, 1, 2, 3]
