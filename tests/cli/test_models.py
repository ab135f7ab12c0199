"""`models`, `info` and `compare`: what is said of bundled models, of runs, and of folders that are broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commanding import RECIPE, RUN, output

import insertlm
from insertlm.cli.main import main
from insertlm.model import bundled
from insertlm.recipe import load_recipe


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(output(capsys, *arguments, "--json"))


def test_bundled_models_and_runs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each for each in listed(capsys, "models")}
    assert {name for name, each in found.items() if each["bundled"]} == {*bundled()}
    model = insertlm.load(RUN)
    size = sum(weights.numel() for weights in model.family.parameters())
    assert found[RUN] == {
        "name": RUN,
        "bundled": False,
        "task": "star",
        "family": "ilm",
        "parameters": size,
        "steps": 20,
        "about": "solves graphs",
    }
    told = output(capsys, "models")
    [row] = [line.split() for line in told.splitlines() if line.split()[:1] == [RUN]]
    assert row == [RUN, "star", "ilm", f"{size / 1000:.3g}k", "20", "solves", "graphs"]
    assert all(name in told for name in bundled())


def test_a_broken_folder_hides_no_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "recipe.yaml").write_text("nonsense: 1", encoding="utf-8")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    bad, good, new = listed(capsys, "models", str(tmp_path))[-3:]
    assert bad["task"] is None and bad["about"].startswith(f"cannot be read: {tmp_path}/bad/recipe.yaml: ")
    assert (good["steps"], new["steps"]) == (20, 0)
    assert "no runs in none" in output(capsys, "models", "none")


@pytest.mark.parametrize("name", [*bundled(), RUN])
def test_a_model_is_described(capsys: pytest.CaptureFixture[str], name: str) -> None:
    told, model = listed(capsys, "info", name), insertlm.load(name)
    assert told["parameters"] == sum(weights.numel() for weights in model.family.parameters())
    assert (told["vocabulary"], told["longest_text"]) == (
        model.recipe.task.tokenizer.size,
        model.family.longest_text,
    )
    assert (told["task"], told["family"]) == (model.recipe.task.tag, model.recipe.family.tag)
    assert told["abilities"]["decides_length"] is model.family.abilities.decides_length
    assert told["decode"]["max_steps"] == model.recipe.decode.max_steps
    assert told["weights_bytes"] > told["parameters"] / 4
    assert Path(told["folder"]) == model.folder.resolve()
    assert told["steps"] == (model.recipe.train.steps if model.step is None else model.step)
    shown = output(capsys, "info", name)
    assert f"{told['parameters']:,}" in shown and f"{told['vocabulary']:,} tokens" in shown


def test_missing_and_damaged_weights_are_no_obstacle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run that has not saved anything yet, and one whose weights are damaged."""
    run = shutil.copytree(RUN, tmp_path / "run")
    [weights] = run.glob("checkpoints/*/ema.safetensors")
    weights.write_bytes(b"damaged")
    assert "7 bytes" in output(capsys, "info", str(run))
    shutil.rmtree(run / "checkpoints")
    assert "none yet" in output(capsys, "info", str(run))


def test_runs_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("run", "other"):
        shutil.copytree(RUN, tmp_path / name)
    monkeypatch.chdir(tmp_path)  # names are short, or the table would be too wide
    run, other = Path("run"), Path("other")
    for file in [*run.glob("evaluation-*"), *other.glob("evaluation-*")]:
        file.unlink()
    output(capsys, "evaluate", str(run), "--count", "4", "--device", "cpu")
    output(capsys, "evaluate", str(run), "--count", "3", "--device", "cpu", "--decode.stop_threshold", "0.25")
    first, second = listed(capsys, "compare", str(run), str(other))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shares = [line["validation_sequence_accuracy"] for line in lines if "validation_sequence_accuracy" in line]
    assert (first["steps"], first["validation"], first["measured"]) == (20, shares[-1], "accuracy")
    assert 0 < first["minutes"] < 5
    assert [each["name"] for each in first["evaluations"]] == ["test", "test-stop_threshold-0.25"]
    assert second["evaluations"] == []
    share = first["evaluations"][0]["record"]["sequence_accuracy"]
    told = output(capsys, "compare", str(run), str(other))
    assert f"test: {share:.2f} % of 4" in told
    assert f"{shares[-1]:.2f} %" in told
    (run / "evaluation-test.json").write_text("[]", encoding="utf-8")
    assert main(["compare", str(run)]) == 2
    assert capsys.readouterr().err == (
        f"insertlm: {run}/evaluation-test.json: expected a result of insertlm evaluate RUN\n"
    )


def test_four_families_learn_one_small_task_and_are_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of recipes/star_cpu, which differ in the family and in how it decodes alone."""
    recipes = sorted((Path(__file__).parents[2] / "recipes" / "star_cpu").glob("*.yaml"))
    monkeypatch.chdir(tmp_path)
    short = ["--train.steps", "4", "--train.validate_every", "4", "--task.train", "300", "--task.validation", "4"]
    short += ["--model.layers", "1", "--model.width", "16", "--train.batch_size", "8", "--device", "cpu"]
    for recipe in recipes:
        output(capsys, "train", str(recipe), "--run", recipe.stem, *short)
    runs = [recipe.stem for recipe in recipes]
    found = listed(capsys, "compare", *runs)
    assert [each["family"] for each in found] == ["arm", "ilm", "it", "mdm"] == [recipe.stem for recipe in recipes]
    assert {each["steps"] for each in found} == {4}
    assert {each["measured"] for each in found} == {"accuracy"}
    whole = [load_recipe(recipe) for recipe in recipes]
    assert len({(each.task, each.optim, each.train, each.model) for each in whole}) == 1
    told = output(capsys, "compare", *runs)
    assert [line.split()[0] for line in told.splitlines()] == ["run", *runs]
