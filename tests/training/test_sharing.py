"""`evaluate` and `generate` by several processes give what one gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from insertlm.cli.main import main
from insertlm.core.processes import Processes

Commands = Callable[[Sequence[str], dict[str, str]], Any]
Launch = Callable[[int], list[dict[str, str]]]
SAMPLED = ["--decode.temperature", "1.0", "--device", "cpu"]


@pytest.fixture
def model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Hardly trained, but fast."""
    star = {"degree": 2, "min_nodes": 3, "max_nodes": 4, "min_plan": 2, "nodes": 10, "train": 50, "test": 30}
    tree = {
        "task": {"name": "star", **star},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32},
        "train": {"steps": 1, "batch_size": 8},
        "decode": {"max_steps": 6},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--run", str(tmp_path / "run"), "--device", "cpu"]) == 0
    capsys.readouterr()
    return str(tmp_path / "run")


def scores(path: Path) -> dict[str, Any]:
    timed = ("command", "seconds", "tokens_per_second", "commit")
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in timed}


def test_an_evaluation_is_the_same(model: str, tmp_path: Path, commands: Commands, launch: Launch) -> None:
    """Batches that do not divide among them, and examples that do not divide into batches."""
    command = ["evaluate", model, "--count", "21", "--batch-size", "4", *SAMPLED, "--out"]
    assert main([*command, str(tmp_path / "one.json")]) == 0
    started = [commands([*command, str(tmp_path / "three.json")], variables) for variables in launch(3)]
    assert [each.end()[0] for each in started] == [0, 0, 0]
    assert scores(tmp_path / "one.json") == scores(tmp_path / "three.json")
    assert [bool(each.printed) for each in started] == [True, False, False]


def test_what_is_generated_is_the_same(
    model: str, commands: Commands, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", model, "--count", "70", "--seed", "7", "--json", *SAMPLED]
    assert main(command) == 0
    started = [commands(command, variables) for variables in launch(2)]
    assert [each.end()[0] for each in started] == [0, 0]
    assert started[0].printed == capsys.readouterr().out
    assert started[1].printed == ""


def test_a_mistake_is_said_once(commands: Commands, launch: Launch) -> None:
    started = [commands(["evaluate", "nowhere", "--device", "cpu"], variables) for variables in launch(2)]
    ends = [each.end() for each in started]
    assert [code for code, _ in ends] == [2, 2]
    assert [len(lines) for _, lines in ends] == [1, 0]


def work(count: int, processes: Processes) -> list[tuple[int, int]]:
    return processes.map(lambda item: (item, processes.rank), range(count))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_work_is_shared_and_comes_back_in_order(
    in_processes: Callable[[int, Callable[[Processes], Any]], list[Any]], count: int
) -> None:
    for found in in_processes(2, lambda processes: work(count, processes)):
        assert found == [(item, item % 2) for item in range(count)]
