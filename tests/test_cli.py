"""The command line, from end to end: train a tiny model, then use it in every way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import insertlm
from insertlm import api, commands, folders, plots
from insertlm.cli import main
from insertlm.decoding.trajectory import Insertion, Trajectory
from insertlm.plots import Curve, Panel
from insertlm.subwords import load_tokenizer
from insertlm.tasks.star import PRESETS, Star

RECIPE = """
task: {name: star, degree: 2, min_nodes: 3, max_nodes: 3, min_plan: 2, nodes: 8, train: 200, validation: 9, test: 30}
model: {layers: 2, width: 32, heads: 2, hidden: 64}
optim: {learning_rate: 3e-3, warmup: 5, ema: 0.5}
train: {steps: 20, batch_size: 16, log_every: 5, save_every: 10, validate_every: 10}
decode: {max_steps: 8}
"""
GRAPH = "1>2 2>3 4>2 2>5 : 1 3"
COMMAND = [sys.executable, "-m", "insertlm"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a run of it made by the command itself."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "star_tiny").mkdir()
    (folder / "star_tiny" / "ilm.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "star_tiny/ilm.yaml", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(autouse=True)
def work_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


RUN = "runs/star_tiny-ilm"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints; it must not say anything on standard error."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


# --- train


def test_training_says_where_the_run_is_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "train", "star_tiny/ilm.yaml", "--run", "again", "--device", "cpu").splitlines()
    assert lines[0] == "run: again on cpu"
    assert lines[-1] == "trained 20 steps; evaluate with: insertlm evaluate again"


def test_the_run_lies_under_the_name_of_its_recipe() -> None:
    assert yaml.safe_load(Path(RUN, "recipe.yaml").read_text(encoding="utf-8"))["train"]["steps"] == 20
    assert [path.name for path in Path(RUN, "checkpoints").iterdir()] == ["step-00000020"]
    assert len(Path(RUN, "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_a_finished_run_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in Path(RUN, "checkpoints").rglob("*") if path.is_file()}
    output(capsys, "train", "star_tiny/ilm.yaml", "--device", "cpu")
    assert {path: path.read_bytes() for path in Path(RUN, "checkpoints").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("steps", [["--train.steps", "2"], ["--train.steps=2"]])
def test_overrides_may_stand_anywhere(capsys: pytest.CaptureFixture[str], tmp_path: Path, steps: list[str]) -> None:
    run = str(tmp_path / "run")
    arguments = ["train", *steps, "--model.width", "16", "star_tiny/ilm.yaml", "--run", run, "--optim.clip=0"]
    assert "trained 2 steps" in output(capsys, *arguments, "--device", "cpu")
    assert insertlm.load(run).recipe.model.width == 16


# --- evaluate


def test_evaluation_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "evaluate", RUN, "--device", "cpu")
    assert re.sub(r"[\d.]+ (%|s |tokens)", r"N \1", out).splitlines()[0] == f"{RUN}, step 20, test split"
    for row in ("sequence accuracy", "token accuracy", "examples +30", "time .* tokens/s"):
        assert re.search(row, out)
    assert out.endswith(f"wrote {RUN}/evaluation-test.json\n")
    record = json.loads(Path(RUN, "evaluation-test.json").read_text(encoding="utf-8"))
    assert record["command"] == f"insertlm evaluate {RUN} --device cpu"
    told = [record[key] for key in ("model", "family", "step", "split", "count")]
    assert told == [RUN, "ilm", 20, "test", 30]
    assert 0 <= record["sequence_accuracy"] <= record["token_accuracy"] <= 100
    assert record["parameters"] == sum(weights.numel() for weights in insertlm.load(RUN).family.parameters())
    assert record["decode"]["max_steps"] == 8
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    assert record["insertlm"] == insertlm.__version__
    assert {"device", "torch", "commit"} <= record.keys()


def test_evaluation_of_another_split_count_and_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    arguments = ["--split", "validation", "--count", "4", "--batch-size", "3", "--decode.temperature", "1", "--out"]
    assert f"wrote {out}" in output(capsys, "evaluate", RUN, *arguments, str(out))
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [record["split"], record["count"], record["decode"]["temperature"]] == ["validation", 4, 1.0]
    assert not Path(RUN, "evaluation-validation.json").exists()


def test_evaluating_a_bundled_model_writes_only_where_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path
) -> None:
    monkeypatch.setattr(folders, "_ASSETS", place / "runs")
    assert "wrote" not in output(capsys, "evaluate", "star_tiny-ilm", "--split", "train", "--count", "2")
    assert not Path(RUN, "evaluation-train.json").exists()
    output(capsys, "evaluate", "star_tiny-ilm", "--count", "2", "--out", str(tmp_path / "x.json"))
    assert (tmp_path / "x.json").is_file()


# --- generate


def test_generate_solves_fresh_graphs_and_shows_one_trajectory(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "generate", RUN, "--count", "12", "--seed", "3")
    lines = out.splitlines()
    assert re.fullmatch(r"solved \d+ of 12 fresh graphs \(seed 3\) in [\d.]+ s", lines[0])
    assert [line[0] in "✓✗" for line in lines[1:11]] == [True] * 10
    assert lines[11] == "  … and 2 more"
    assert sum(line.startswith("✓") for line in lines[1:11]) <= int(lines[0].split()[1])
    assert out.count(" step  text") == 1
    assert "\x1b" not in out


def test_generate_uses_the_bundled_model_if_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setattr(folders, "_ASSETS", place / "runs")
    monkeypatch.setattr(api, "BUNDLED", "star_tiny-ilm")
    assert " of 5 fresh graphs (seed 0)" in output(capsys, "generate")


def test_generate_shows_every_trajectory_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "generate", RUN, "--count", "3", "--show").count(" step  text") == 3


def test_a_prompt_is_solved_and_how_is_shown_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "generate", RUN, "--prompt", GRAPH)
    assert out.startswith("1→2 2→3 4→2 2→5\nsource 1  goal 3\npath ")
    assert len(out.splitlines()) == 3
    shown = output(capsys, "generate", RUN, "--prompt", GRAPH, "--show")
    assert shown.startswith(out)
    assert " step  text" in shown


def test_json_tells_the_whole_trajectory(capsys: pytest.CaptureFixture[str]) -> None:
    [record] = map(json.loads, output(capsys, "generate", RUN, "--prompt", GRAPH, "--json").splitlines())
    assert record["prompt"] == "1 2 2 3 4 2 2 5 1 3"
    assert record["solved"] is None
    line: list[str] = []
    for event in record["events"]:
        line.insert(event["rank"], event["token"])
    assert " ".join(line) == record["text"]
    records = [json.loads(line) for line in output(capsys, "generate", RUN, "--count", "2", "--json").splitlines()]
    assert [type(record["solved"]) for record in records] == [bool, bool]


def test_a_family_that_cannot_tell_when_it_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that writes both tokens at once: null and a dash, and one line."""
    events = [Insertion(0, rank, token, -0.5, None) for rank, token in enumerate((1, 3))]
    written = [Trajectory([1, 3, 1, 3], [], events, stop_probability=None, complete=True)]
    monkeypatch.setattr(commands.runs, "write", lambda *_: written)
    [record] = map(json.loads, output(capsys, "generate", RUN, "--prompt", GRAPH, "--json").splitlines())
    assert record["stop_probability"] is None
    assert [event["stop_probability"] for event in record["events"]] == [None, None]
    *_, first, second, _ = output(capsys, "generate", RUN, "--prompt", GRAPH, "--show").splitlines()
    assert [line.split() for line in (first, second)] == [["0", "·", "·", "–"], ["1", "›1", "›3", "-1.000", "–"]]


def test_the_seed_decides_graphs_and_samples(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["generate", RUN, "--json", "--decode.temperature", "2", "--decode.position_top_k", "0", "--seed"]
    first = output(capsys, *sampled, "1")
    assert output(capsys, *sampled, "1") == first
    assert output(capsys, *sampled, "2") != first


# --- data


@pytest.mark.parametrize("name", PRESETS)
def test_data_prints_examples_as_people_read_them(capsys: pytest.CaptureFixture[str], name: str) -> None:
    task = Star(**PRESETS[name])
    examples = task.examples("test", 3, 1)
    assert output(capsys, "data", name) == "\n\n".join(task.render(example) for example in examples) + "\n"


def test_data_writes_jsonl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "graphs.jsonl"
    told = output(capsys, "data", "star-hard", "--count", "1200", "--seed", "4", "--split", "train", "--out", str(out))
    assert told == f"wrote 1,200 examples to {out}\n"
    task = Star(**PRESETS["star-hard"])
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 1200
    for line, example in zip(lines, task.examples("train", 5, 4), strict=False):
        assert task.parse_prompt(line["prefix"]) == example.prefix
        assert task.tokenizer.encode(line["target"]) == example.target


# --- plot


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
    output(capsys, "plot", "graph", "--model", RUN, "--seed", "5", "--out", str(tmp_path / "graph.svg"))
    model = insertlm.load(RUN)
    [example] = model.recipe.task.examples("test", 1, 5)
    [path] = model.generate([model.decode(example.prefix)])
    assert seen == [path.ids]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Panel]:
    """What a picture of trajectories would show; none is drawn."""
    seen: list[Panel] = []
    monkeypatch.setattr(plots, "comparison_figure", lambda panels, names: seen.extend(panels))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    return seen


def train(*overrides: str, run: str) -> str:
    if not Path(run).exists():
        main(["train", "star_tiny/ilm.yaml", "--run", run, "--device", "cpu", "--train.steps", "4", *overrides])
    return run


def test_one_model_has_no_title(capsys: pytest.CaptureFixture[str], panels: list[Panel]) -> None:
    output(capsys, "plot", "trajectory", RUN, "--count", "3", "--seed", "2")
    [(written, marks, title)] = panels
    model = insertlm.load(RUN)
    examples = model.recipe.task.examples("test", 3, 2)
    assert [path.prefix for path in written] == [example.prefix for example in examples]
    assert marks == [path.ids == example.target for path, example in zip(written, examples, strict=True)]
    assert title == ""


def test_several_models_write_the_same_examples(capsys: pytest.CaptureFixture[str], panels: list[Panel]) -> None:
    other = train("--family.stop_weight", "0.5", run="other")
    output(capsys, "plot", "trajectory", RUN, other, "--count", "3")
    assert [panel.title for panel in panels] == [f"ILM ({RUN})", "ILM (other)"]
    first, second = ([path.prefix for path in panel.trajectories] for panel in panels)
    assert first == second
    assert [panel.marks is not None for panel in panels] == [True, True]


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[Curve]:
    """What a picture of training would show; none is drawn."""
    seen: list[Curve] = []
    monkeypatch.setattr(plots, "training_figure", lambda curves, label: seen.extend(curves))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    return seen


def test_training_curves_over_steps_and_time(capsys: pytest.CaptureFixture[str], curves: list[Curve]) -> None:
    output(capsys, "plot", "training", RUN, "--over", "steps")
    output(capsys, "plot", "training", RUN)
    steps, minutes = curves
    lines = [json.loads(line) for line in Path(RUN, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(line["step"], line["validation_sequence_accuracy"]) for line in lines if "loss" not in line]
    assert list(zip(steps.x, steps.accuracy, strict=True)) == found
    assert minutes.accuracy == steps.accuracy
    assert 0 < minutes.x[0] < minutes.x[1] < 1
    assert steps.label == minutes.label == "ILM"


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
    assert list(both.x) == [*first.x, *(max(first.x) + step for step in alone.x)]
    assert list(both.accuracy) == [*first.accuracy, *alone.accuracy]


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


def test_runs_that_begin_with_the_same_one_are_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], curves: list[Curve]
) -> None:
    others = [train("--train.start", RUN, "--train.seed", seed, run=f"from{seed}") for seed in "12"]
    output(capsys, "plot", "training", RUN, *others)
    assert [len(curve.x) for curve in curves] == [validations(RUN) + validations(other) for other in others]
    assert curves[0].x[0] == curves[1].x[0]


def validations(run: str) -> int:
    return Path(run, "metrics.jsonl").read_text(encoding="utf-8").count("validation_sequence_accuracy")


# --- The command itself


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version") == f"insertlm {insertlm.__version__}\n"
    for command in (
        [],
        ["train"],
        ["evaluate"],
        ["generate"],
        ["data"],
        ["plot"],
        ["plot", "graph"],
        ["plot", "puzzle"],
        ["plot", "training"],
        ["plot", "accuracy"],
    ):
        with pytest.raises(SystemExit) as left:
            main([*command, "--help"])
        assert left.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {' '.join(['insertlm', *command])} ")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"insertlm {insertlm.__version__}\n"
    assert subprocess.run([*COMMAND, "data", "x"], capture_output=True, check=False).returncode == 2


def test_sources_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert insertlm.__version__ == "0+unknown"


@pytest.mark.parametrize("arguments", [["--version"], ["data", "star-easy"], ["data", "nothing"], ["plot", "graph"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str], tmp_path: Path) -> None:
    code = f"import sys; from insertlm.cli import main; main({arguments}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_prints_no_escape_codes_into_a_pipe() -> None:
    command = Path(sys.executable).with_name("insertlm")
    done = subprocess.run(
        [command, "generate", RUN, "--count", "1"], capture_output=True, encoding="utf-8", check=True, timeout=60
    )
    assert " step  text" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_a_terminal_that_knows_no_arrows_gets_question_marks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "data", "star-easy"], env=environment, capture_output=True, check=True)
    assert b"path " in done.stdout
    assert b"?" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with subprocess.Popen(
        [*COMMAND, "data", "star-hard", "--count", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0


def test_interrupting_is_one_line_and_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "data", interrupted)
    assert main(["data", "star-easy"]) == 130
    assert capsys.readouterr().err == "insertlm: interrupted\n"


def test_fifty_thousand_graphs_take_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    output(capsys, "data", "star-hard", "--count", "50000", "--split", "train", "--out", str(tmp_path / "all.jsonl"))
    assert time.monotonic() - start < 30  # about two on an idle machine


def test_a_tokenizer_from_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 9)
    out = tmp_path / "tokenizer.json"
    told = output(capsys, "data", "tokenizer", str(tmp_path / "a.txt"), "--size", "270", "--out", str(out))
    assert told == f"wrote {out}: 270 tokens\n"
    assert load_tokenizer(str(out)).size == 270
