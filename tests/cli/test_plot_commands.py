"""`plot trajectory | graph | training` with the run of a tiny model: what would be drawn, and that it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commanding import RUN, output

import insertlm
from insertlm import plots
from insertlm.cli.main import main
from insertlm.plots import Curve, LossCurve, Panel, Stage
from insertlm.tasks.star import Star


@pytest.mark.parametrize(
    "arguments",
    [
        ["trajectory", RUN, "--count", "3"],
        ["trajectory", RUN, RUN, "--count", "2"],
        ["graph", "star-easy"],
        ["graph"],
        ["training", RUN],
        ["training", RUN, RUN, "--over", "steps"],
    ],
)
def test_pictures_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    out = tmp_path / "picture.png"
    assert output(capsys, "plot", *arguments, "--out", str(out)) == f"wrote {out}\n"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_graph_of_a_model_has_the_path_the_model_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[int]] = []

    def note(task: Star, ids: Sequence[int]) -> list[int]:
        seen.append(list(ids))
        return []

    monkeypatch.setattr(Star, "path", note)
    sampled = ["--decode.temperature", "2", "--decode.position_top_k", "0"]
    output(capsys, "plot", "graph", "--model", RUN, "--seed", "5", "--out", str(tmp_path / "graph.svg"), *sampled)
    model = insertlm.load(RUN)
    [example] = model.recipe.task.examples("test", 1, 5)
    [path] = model.generate([model.decode(example.prefix)], seed=5, temperature=2.0, position_top_k=0)
    assert seen == [path.ids]


def shown(monkeypatch: pytest.MonkeyPatch, figure: str) -> list[Any]:
    """What a picture would show; none is drawn."""
    seen: list[Any] = []
    monkeypatch.setattr(plots, figure, lambda parts, *_, **__: seen.extend(parts))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    return seen


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Panel]:
    return shown(monkeypatch, "comparison_figure")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[Curve]:
    return shown(monkeypatch, "training_figure")


def train(*overrides: str, run: str) -> str:
    if not Path(run).exists():
        main(["train", "star_tiny/ilm.yaml", "--run", run, "--device", "cpu", "--train.steps", "4", *overrides])
    return run


def test_the_panel_of_one_model_says_how_many_it_solved(
    capsys: pytest.CaptureFixture[str], panels: list[Panel]
) -> None:
    output(capsys, "plot", "trajectory", RUN, "--count", "3", "--seed", "2")
    [(written, marks, title)] = panels
    model = insertlm.load(RUN)
    examples = model.recipe.task.examples("test", 3, 2)
    assert [path.prefix for path in written] == [example.prefix for example in examples]
    assert marks == [path.ids == example.target for path, example in zip(written, examples, strict=True)]
    assert title == f"{sum(marks)} of 3 solved"


def test_several_models_write_the_same_examples(capsys: pytest.CaptureFixture[str], panels: list[Panel]) -> None:
    other = train("--family.stop_weight", "0.5", run="other")
    output(capsys, "plot", "trajectory", RUN, other, "--count", "3")
    names = [f"ILM ({Path(RUN).name})", "ILM (other)"]
    solved = [sum(panel.marks or []) for panel in panels]
    assert [panel.title for panel in panels] == [
        f"{name}: {count} of 3 solved" for name, count in zip(names, solved, strict=True)
    ]
    first, second = ([path.prefix for path in panel.trajectories] for panel in panels)
    assert first == second
    assert [panel.marks is not None for panel in panels] == [True, True]


def test_a_model_of_text_writes_from_nothing_and_is_not_judged(
    capsys: pytest.CaptureFixture[str], panels: list[Panel]
) -> None:
    stories = str(Path(__file__).parents[2] / "models" / "stories-mini")
    output(capsys, "plot", "trajectory", stories, "--count", "2", "--seed", "3", "--decode.max_steps", "4")
    [(written, marks, title)] = panels
    assert title == ""
    assert [(path.prefix, len(path.ids)) for path in written] == [([], 4), ([], 4)]
    assert marks is None
    alone = insertlm.load(stories).generate(["", ""], seed=3, max_steps=4)
    assert [path.ids for path in written] == [path.ids for path in alone]


def test_training_curves_over_steps_and_time(capsys: pytest.CaptureFixture[str], curves: list[Curve]) -> None:
    output(capsys, "plot", "training", RUN, "--over", "steps")
    output(capsys, "plot", "training", RUN)
    [steps], [seconds] = (curve.stages for curve in curves)
    lines = [json.loads(line) for line in Path(RUN, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(line["step"], line["validation_sequence_accuracy"]) for line in lines if "loss" not in line]
    assert list(zip(steps.x, steps.y, strict=True)) == found
    assert seconds.y == steps.y
    assert 0 < seconds.x[0] < seconds.x[1] < 60
    assert {curve.label for curve in curves} == {"ILM"}
    assert steps.name == Path(RUN).name


def log_of_text(run: Path) -> None:
    """A run whose recipe is of text, with the log of such a run: losses, and two validations."""
    run.mkdir()
    recipe = """
task: {name: text, train: none.txt, tokenizer: none.json, block: 8}
model: {layers: 1, width: 16, heads: 2, hidden: 16}
train: {steps: 30, log_every: 10, validate_every: 10}
"""
    (run / "recipe.yaml").write_text(recipe, encoding="utf-8")
    lines = [{"step": step, "loss": 9 - step / 10, "steps_per_second": 5.0} for step in (10, 20, 30)]
    lines += [{"step": step, "validation_loss": 8 - step / 10} for step in (10, 30)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def test_losses_of_a_run_of_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log_of_text(tmp_path / "text")
    with monkeypatch.context() as patch:
        curves = shown(patch, "loss_figure")
        output(capsys, "plot", "training", str(tmp_path / "text"), "--over", "steps")
        output(capsys, "plot", "training", str(tmp_path / "text"))
    losses, validated, *over_time = curves
    assert losses == LossCurve("ILM", [Stage("text", [10, 20, 30], [8.0, 7.0, 6.0])], learning=True)
    assert validated == LossCurve("ILM", [Stage("text", [10, 30], [7.0, 5.0])], learning=False)
    assert [list(stage.x) for curve in over_time for stage in curve.stages] == [[2, 4, 6], [2, 6]]
    output(capsys, "plot", "training", str(tmp_path / "text"), "--out", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_losses_and_accuracies_are_not_drawn_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log_of_text(tmp_path / "text")
    assert main(["plot", "training", RUN, str(tmp_path / "text"), "--out", str(tmp_path / "a.png")]) == 2
    line = f"{RUN} has accuracies and {tmp_path}/text, a run of text, losses; expected runs of one kind"
    assert capsys.readouterr().err == f"insertlm: {line}\n"


def test_seeds_share_a_label_and_recipes_that_differ_do_not(
    capsys: pytest.CaptureFixture[str], curves: list[Curve]
) -> None:
    runs = [train("--train.seed", seed, run=f"seed{seed}") for seed in "12"]
    output(capsys, "plot", "training", *runs)
    assert [curve.label for curve in curves] == ["ILM", "ILM"]
    curves.clear()
    output(capsys, "plot", "training", *runs, train("--family.stop_weight", "0.5", run="other"))
    assert [curve.label for curve in curves] == ["ILM (seed1)", "ILM (seed1)", "ILM (other)"]


def test_stages_are_one_line(capsys: pytest.CaptureFixture[str], curves: list[Curve]) -> None:
    second = train("--train.start", RUN, run="second")
    output(capsys, "plot", "training", second, RUN, "--over", "steps")
    output(capsys, "plot", "training", RUN, "--over", "steps")
    output(capsys, "plot", "training", second, "--over", "steps")
    both, first, alone = curves
    assert both.label == "ILM"
    assert both.stages[0] == first.stages[0]
    [(name, steps, shares)] = alone.stages
    assert both.stages[1:] == [(name, [max(first.stages[0].x) + step for step in steps], shares)]
    assert [stage.name for stage in both.stages] == [Path(RUN).name, second]


def test_a_line_is_named_by_its_last_stage(
    capsys: pytest.CaptureFixture[str], curves: list[Curve], tmp_path: Path
) -> None:
    first = Path(tmp_path, "first")
    shutil.copytree(RUN, first)
    recipe = (first / "recipe.yaml").read_text(encoding="utf-8")
    arm = re.sub(r"family:\n(  .*\n)+", "family:\n  name: arm\n", recipe)
    (first / "recipe.yaml").write_text(arm, encoding="utf-8")
    second = Path(tmp_path, "second")
    shutil.copytree(RUN, second)
    (second / "recipe.yaml").write_text(re.sub("start: .*", f"start: {first}", recipe), encoding="utf-8")
    output(capsys, "plot", "training", str(first), str(second))
    assert [curve.label for curve in curves] == ["ILM"]


def test_a_stage_is_the_folder_that_is_named_not_its_namesake(
    capsys: pytest.CaptureFixture[str], curves: list[Curve], tmp_path: Path
) -> None:
    first, namesake, last = tmp_path / "a" / "ilm", tmp_path / "b" / "ilm", tmp_path / "c" / "ilm"
    for run in (first, namesake, last):
        shutil.copytree(RUN, run)
    recipe = (last / "recipe.yaml").read_text(encoding="utf-8")
    (last / "recipe.yaml").write_text(re.sub("start: .*", f"start: {first}", recipe), encoding="utf-8")
    other = shutil.copytree(first, tmp_path / "d" / "ilm")

    def lines(*runs: Path) -> int:
        curves.clear()
        output(capsys, "plot", "training", *map(str, runs))
        return len(curves)

    assert (lines(first, last), lines(last, first), lines(namesake, last), lines(first, namesake, last)) == (1, 1, 2, 2)
    shutil.rmtree(first)  # it has moved, so the name must do, if only one has it
    assert (lines(namesake, last), lines(namesake, other, last)) == (1, 3)


def test_runs_that_begin_with_the_same_one_are_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], curves: list[Curve]
) -> None:
    others = [train("--train.start", RUN, "--train.seed", seed, run=f"from{seed}") for seed in "12"]
    output(capsys, "plot", "training", RUN, *others)
    found = [[len(stage.x) for stage in curve.stages] for curve in curves]
    assert found == [[validations(RUN), validations(other)] for other in others]
    assert curves[0].stages[0] == curves[1].stages[0]


def validations(run: str) -> int:
    return Path(run, "metrics.jsonl").read_text(encoding="utf-8").count("validation_sequence_accuracy")


@pytest.mark.parametrize(
    ("figure", "arguments", "title"),
    [
        ("comparison_figure", ["trajectory", RUN, "--count", "3", "--seed", "2"], "3 fresh star graphs, seed 2"),
        ("comparison_figure", ["trajectory", "--count", "2"], "2 fresh star-hard graphs, seed 0"),
        ("training_figure", ["training", RUN], "star: 9 validation graphs"),
        ("graph_figure", ["graph", "star-easy", "--seed", "4"], "A graph of star-easy, seed 4"),
    ],
)
def test_titles_name_the_task_and_count_the_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, figure: str, arguments: list[str], title: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plots, figure, lambda *drawn, **_: seen.append(drawn[-1]))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    output(capsys, "plot", *arguments)
    assert seen == [title]
