"""The command line, from end to end: train a tiny model, then use it in every way."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from commanding import RUN, output

import insertlm
from insertlm import model as api
from insertlm.cli import commands
from insertlm.cli.main import main
from insertlm.core import version as core_version
from insertlm.evaluation import accuracy
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.tasks.star import PRESETS, Star
from insertlm.text.subwords import load_tokenizer

GRAPH = "1>2 2>3 4>2 2>5 : 1 3"
COMMAND = [sys.executable, "-m", "insertlm"]


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


def test_ways_of_writing_have_a_file_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    words = ("evaluate", str(run), "--device", "cpu", "--count", "3")
    usual = insertlm.load(run).recipe.decode
    assert usual.order == "auto"
    output(capsys, *words)
    output(capsys, *words, "--decode.order", "margin", "--decode.joint", "no", "--decode.stop_threshold", "0.25")
    output(capsys, *words, "--split", "validation", "--decode.max_steps", str(usual.max_steps))
    names = ["evaluation-test-stop_threshold-0.25-order-margin", "evaluation-test", "evaluation-validation"]
    assert sorted(file.stem for file in run.glob("evaluation-*.json")) == sorted(names)
    assert json.loads((run / f"{names[0]}.json").read_text())["decode"]["order"] == "margin"


def test_an_error_of_the_system_names_its_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError(5, "Input/output error", "some/file")

    monkeypatch.setattr(commands, "data", refuse)
    assert main(["data", "star-easy"]) == 2
    assert capsys.readouterr().err == "insertlm: some/file: Input/output error\n"


@pytest.mark.parametrize("command", ["evaluate", "generate", "infill ___ --model", "serve", "export"])
def test_an_empty_name_is_no_model(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "", *["out"] * (command == "export")]) == 2
    line = "insertlm: the name of a model is empty; expected a run folder or the name of a bundled model\n"
    assert capsys.readouterr() == ("", line)


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
    assert record["task"] == msgspec.to_builtins(insertlm.load(RUN).recipe.task)
    assert record["task"]["name"] == "star"
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


def test_what_is_evaluated_is_the_split_decoded_as_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    evaluate = accuracy.evaluate

    def note(family: Any, task: Any, examples: Any, settings: Any, *rest: Any) -> accuracy.Scores:
        seen.append((list(examples), settings))
        return evaluate(family, task, examples, settings, *rest)

    monkeypatch.setattr(accuracy, "evaluate", note)
    arguments = [
        "--split",
        "validation",
        "--count",
        "4",
        "--decode.temperature",
        "1",
        "--out",
        str(tmp_path / "x.json"),
    ]
    output(capsys, "evaluate", RUN, *arguments)
    model = insertlm.load(RUN)
    assert seen == [(list(model.recipe.task.examples("validation", 4)), model.settings(temperature=1.0))]


def test_evaluating_a_bundled_model_writes_only_where_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path
) -> None:
    monkeypatch.setattr("insertlm.core.assets._ASSETS", place / "runs")
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
    monkeypatch.setattr("insertlm.core.assets._ASSETS", place / "runs")
    monkeypatch.setattr(api, "GRAPHS", "star_tiny-ilm")
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
    written = [Trajectory([1, 3, 1, 3], [], events, stop_probability=None)]
    monkeypatch.setattr("insertlm.cli.generate.write", lambda *_: written)
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


def test_sequences_have_seeds_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = insertlm.load(RUN)
    sampled = ["generate", RUN, "--json", "--decode.temperature", "2", "--decode.position_top_k", "0", "--seed", "5"]

    def expected(prompts: list[str]) -> list[str]:
        written = model.generate(prompts, seed=5, temperature=2.0, position_top_k=0)
        return [model.decode(path.ids) for path in written]

    records = [json.loads(line) for line in output(capsys, *sampled, "--count", "6").splitlines()]
    assert [record["text"] for record in records] == expected([record["prompt"] for record in records])
    [record] = map(json.loads, output(capsys, *sampled, "--prompt", GRAPH).splitlines())
    assert [record["text"]] == expected([GRAPH])


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

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", version)
        assert importlib.reload(core_version).VERSION == "0+unknown"
    importlib.reload(core_version)  # as it was
    assert insertlm.__version__ == core_version.VERSION != "0+unknown"


@pytest.mark.parametrize("arguments", [["--version"], ["data", "star-easy"], ["data", "nothing"], ["plot", "graph"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str], tmp_path: Path) -> None:
    code = f"import sys; from insertlm.cli.main import main; main({arguments}); sys.exit('torch' in sys.modules)"
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


def test_a_reader_that_has_seen_enough_ends_it_as_it_ends_others() -> None:
    with subprocess.Popen(
        [*COMMAND, "data", "star-hard", "--count", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 128 + signal.SIGPIPE


def test_results_are_kept_though_nobody_reads_of_them(tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    command = [*COMMAND, "evaluate", RUN, "--count", "2", "--device", "cpu", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert json.loads(out.read_text(encoding="utf-8"))["count"] == 2


def test_standard_output_may_be_closed() -> None:
    shell = shlex.join([*COMMAND, "generate", RUN, "--count", "1", "--device", "cpu"]) + " >&-"
    done = subprocess.run(shell, shell=True, check=False, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_interrupting_is_one_line_and_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "data", interrupted)
    assert main(["data", "star-easy"]) == 130
    assert capsys.readouterr().err == "insertlm: interrupted\n"


def test_a_second_interrupt_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("insertlm.training.loop.train", interrupted)
    with pytest.raises(SystemExit) as left:
        main(["train", "star_tiny/ilm.yaml", "--run", "cut", "--device", "cpu"])
    assert left.value.code == 130
    line = "insertlm: interrupted at once; run the same command again to go on in cut, from its last checkpoint if"
    assert capsys.readouterr().err.startswith(line)


def test_fifty_thousand_graphs_take_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    output(capsys, "data", "star-hard", "--count", "50000", "--split", "train", "--out", str(tmp_path / "all.jsonl"))
    assert time.monotonic() - start < 30  # about two on an idle machine


def test_a_tokenizer_from_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 9)
    out = tmp_path / "tokenizer.json"
    told = output(capsys, "data", "tokenizer", str(tmp_path / "a.txt"), "--size", "270", "--out", str(out))
    assert told == f"wrote {out}: 270 tokens\n"
    told = output(capsys, "data", "tokenizer", str(tmp_path / "a.txt"), "--size", "4096", "--out", str(tmp_path / "b"))
    assert re.search(r"b: \d{3} tokens, not 4,096: the texts have no more pairs to merge; more text", told)
    (tmp_path / "b.jsonl").write_text('{"body": "the cat"}\n{\n')
    assert main(["data", "tokenizer", str(tmp_path / "b.jsonl"), "--out", str(out)]) == 2
    assert "no usable document in" in capsys.readouterr().err
    assert load_tokenizer(str(out)).size == 270  # the one that was there


# --- Texts that begin with a dash


@pytest.mark.parametrize(
    "words", [["--", "--Well. ___"], ["--Well. ___"], ["--seed", "3", "--", "--well.___"], ["-Well. He ___"]]
)
def test_a_text_that_begins_with_a_dash_is_no_option(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(commands, "infill", seen.append)
    assert main(["infill", *words]) == 0
    assert (seen[0].text, seen[0].overrides) == (words[-1], [])


def test_overrides_stand_before_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(commands, "infill", seen.append)
    assert main(["infill", "--decode.top_k", "3", "--", "--decode.top_k=4 ___"]) == 0
    assert (seen[0].text, seen[0].overrides) == ("--decode.top_k=4 ___", [("decode.top_k", "3")])


@pytest.mark.parametrize("text", ["--Well.___", "--Well,___", "--seed=1___"])
def test_a_text_that_is_taken_for_an_option_brings_a_hint(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infill", text]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("; write -- before a text that begins with a dash") or text.startswith("--seed")


@pytest.mark.parametrize("module", ["insertlm", "insertlm.cli"])
def test_the_package_and_its_command_line_run_as_modules(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"insertlm {insertlm.__version__}\n"
