"""Bad input of every kind: one line on standard error, exit code 2, and nothing that was good before is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from insertlm.cli import commands
from insertlm.cli.main import main
from insertlm.core.files import write_durably
from insertlm.storage import checkpoints

RECIPE = """
task: {name: star, degree: 2, min_nodes: 3, max_nodes: 3, min_plan: 2, nodes: 8, train: 100, validation: 9, test: 9}
model: {layers: 2, width: 16, heads: 2, hidden: 32}
train: {steps: 4, batch_size: 8, log_every: 1, save_every: 2, keep: 2}
decode: {max_steps: 8}
"""
DATASETS = "star-easy, star-medium, star-hard, zebra, sudoku"
Complaint = Callable[..., str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, r.yaml, and a finished run of it, run."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "r.yaml", "--run", "run", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(autouse=True)
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to work in and to spoil."""
    folder = tmp_path / "place"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """The one line that a command says, without its name. All files must be there afterwards, and no others."""

    def run(*arguments: str) -> str:
        before = contents()
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == 2
        [line] = captured.err.splitlines()
        name, _, message = line.partition(": ")
        assert name == "insertlm"
        assert contents() == before
        return message

    return run


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


def newest() -> Path:
    return Path("run/checkpoints/step-00000004")


# --- Commands and arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "",
            "expected a command, one of train, evaluate, generate, infill, data, models, info, compare, export, "
            "lm-eval, solve, serve, plot; see insertlm --help",
        ),
        ("train", "the following arguments are required: RECIPE"),
        ("evaluate", "the following arguments are required: RUN"),
        ("plot", "the following arguments are required: PLOT"),
        ("data", "the following arguments are required: NAME"),
        ("data star-hrad", f"unknown dataset 'star-hrad'; expected one of {DATASETS}"),
        ("solve", "the following arguments are required: FILE"),
        ("solve none.txt", "none.txt: cannot be read: No such file or directory"),
        ("solve run", "run: cannot be read: Is a directory"),
        ("data star-easy more", "unknown argument more; see insertlm data --help"),
        ("data tokenizer", "data tokenizer: expected one or more files of text"),
        ("data tokenizer none.txt", "none.txt: no such file; expected a .txt or .jsonl file"),
        ("data star-easy --cuont 3", "unknown argument --cuont; see insertlm data --help"),
        ("data star-easy --task.seed 3", "unknown argument --task.seed; see insertlm data --help"),
        ("data star-easy --count", "argument --count: expected one argument"),
        ("data star-easy --count 0", "argument --count: expected a whole number of at least 1, got '0'"),
        ("data star-easy --count -3", "argument --count: expected a whole number of at least 1, got '-3'"),
        ("data star-easy --count=-3", "argument --count: expected a whole number of at least 1, got '-3'"),
        ("data star-easy --count many", "argument --count: expected a whole number of at least 1, got 'many'"),
        ("data star-easy --seed -1", "argument --seed: expected a whole number of at least 0, got '-1'"),
        (
            f"data star-easy --seed {2**62}",
            f"argument --seed: expected a whole number of at most {2**62 - 1}, got '{2**62}'",
        ),
        ("data star-easy --split all", "argument --split: expected one of train, validation, test, got 'all'"),
        ("data star-easy --out none/x.jsonl", "cannot write none/x.jsonl: there is no folder none"),
        ("data star-easy --out run", "cannot write run: it is a folder"),
        ("data star-easy --out r.yaml/x", "cannot write r.yaml/x: there is no folder r.yaml"),
        ("generate run --count -1", "argument --count: expected a whole number of at least 1, got '-1'"),
        ("generate run --seed x", "argument --seed: expected a whole number of at least 0, got 'x'"),
        ("generate run --prompt 1 --count 2", "--prompt and --count: expected one of them"),
        ("generate run --device tpu", "unknown device 'tpu'; expected cpu or cuda"),
        ("generate run --device meta", "device meta is not supported; expected cpu or cuda"),
        ("generate run --train.steps 5", "unknown argument --train.steps; expected --decode.KEY"),
        ("generate run --decode 5", "unknown argument --decode; expected --decode.KEY VALUE"),
        ("generate run --decode.top_p 2", "--decode.top_p: expected float <= 1.0, got 2"),
        ("generate run --decode.top_p 0", "decode: top_p is 0; expected 0 < top_p <= 1"),
        ("generate run --decode.topp 1", "--decode.topp: unknown key; did you mean top_p?"),
        ("generate run --decode.joint [", "--decode.joint: not a YAML value: '['"),
        ("generate run --decode.max_steps", "--decode.max_steps: expected a value, as in --decode.max_steps VALUE"),
        ("evaluate run --batch-size 0", "argument --batch-size: expected a whole number of at least 1, got '0'"),
        ("evaluate run --count 10", "--count 10: the test split has 9 graphs"),
        ("evaluate run --count 1000000000 --split train", "--count 1,000,000,000: the train split has 100 graphs"),
        ("evaluate likelihood run --count 10", "--count 10: the test split has 9 graphs"),
        ("evaluate run --out none/x.json", "cannot write none/x.json: there is no folder none"),
        ("evaluate run --out run", "cannot write run: it is a folder"),
        ("plot graph star", f"unknown dataset 'star'; expected one of {DATASETS}"),
        ("plot graph zebra", "zebra: is about puzzles; expected graphs"),
        ("plot graph --out graph.gif", "cannot write graph.gif: unknown suffix '.gif'; expected .png, .svg, .pdf"),
        ("plot graph --out none/x.png", "cannot write none/x.png: there is no folder none"),
        (
            "plot graph star-easy --model run",
            "NAME and --model: expected one of them; a model draws graphs of its own task",
        ),
        ("models one two", "unknown argument two; see insertlm models --help"),
        ("info", "the following arguments are required: MODEL"),
        ("compare", "the following arguments are required: RUN"),
        ("compare run none", "none: no run there; expected a run folder with recipe.yaml"),
        ("plot puzzle run", "run: is about graphs; expected puzzles"),
        ("plot puzzle", "the following arguments are required: RUN"),
        ("plot accuracy", "the following arguments are required: FILE"),
        ("plot trajectory run --count 0", "argument --count: expected a whole number of at least 1, got '0'"),
        ("plot training", "the following arguments are required: RUN"),
        ("plot training run --over epochs", "argument --over: expected one of time, steps, got 'epochs'"),
        ("plot training nothing", "nothing/metrics.jsonl: no such file; expected the metrics of a run"),
        (
            "plot training run run",
            "no validation accuracy in run; expected runs with train.validate_every above 0",
        ),
        ("plot training run --decode.order margin", "unknown argument --decode.order; see insertlm plot --help"),
        (
            "data tokenizer r --size 10000001",
            "argument --size: expected a whole number of at most 10000000, got '10000001'",
        ),
        ("train r.yaml --run=", "argument --run: expected a folder, got an empty name"),
        ("plot trajectory run star-hard-mini", "star-hard-mini has another task than run; expected models of one task"),
        ("train r.yaml --device tpu", "unknown device 'tpu'; expected cpu or cuda"),
        ("train r.yaml --train 5", "unknown argument --train; expected --train.KEY VALUE"),
        ("train r.yaml --train=5", "unknown argument --train=5; expected --train.KEY VALUE"),
        ("train r.yaml 5", "unknown argument 5; see insertlm train --help"),
        ("train r.yaml --run r.yaml", "cannot make the run folder r.yaml: File exists"),
    ],
)
def test_a_wrong_argument(complaint: Complaint, arguments: str, expected: str) -> None:
    assert complaint(*arguments.split()) == expected


@pytest.mark.parametrize("arguments", ["infill -", "solve -"])
def test_standard_input_that_cannot_be_read(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """Python itself ends, with its own message, if a folder is its input; other systems tell only when it is read."""

    def refuse() -> bytes:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert complaint(*arguments.split()) == "standard input is closed; expected a text on it"
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=refuse)))
        assert complaint(*arguments.split()) == "standard input cannot be read: Is a directory"


def test_a_mistake_in_a_recipe_is_all_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for mistake in ("--task.degree=9", "--train.accumulate=3", "--train.start=nothing"):
        assert main(["train", "r.yaml", "--run", "new", "--device", "cpu", mistake]) == 2, mistake
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), mistake


def test_an_unknown_command_lists_the_known_ones(complaint: Complaint) -> None:
    message = complaint("trian", "r.yaml")
    assert "'trian'" in message
    assert all(name in message for name in ("train", "evaluate", "generate", "data", "plot"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(complaint: Complaint) -> None:
    for arguments in (["train", "r.yaml"], ["generate", "run"], ["evaluate", "run"]):
        assert complaint(*arguments, "--device", "cuda") == "device cuda: torch finds no GPU; expected cpu"


# --- Recipes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nothing.yaml", "nothing.yaml: no such file; expected a recipe, a YAML file"),
        ("run", "run: is a folder; expected a recipe, a YAML file"),
        ("r.yaml --train.stepz 5", "--train.stepz: unknown key; did you mean steps?"),
        ("r.yaml --trian.steps 5", "unknown argument --trian.steps; expected --task.KEY or --model.KEY or "),
        ("r.yaml --train. 5", "--train.: expected --section.key value, for example --train.steps 200"),
        ("r.yaml --train.steps many", "--train.steps: expected int, got 'many'"),
        ("r.yaml --train.steps 0", "--train.steps: expected int >= 1, got 0"),
        ("r.yaml --train.steps -5", "--train.steps: expected int >= 1, got -5"),
        ("r.yaml --train.steps=", "--train.steps: expected int, got ''"),
        ("r.yaml --train.steps --run x", "--train.steps: expected a value, as in --train.steps VALUE"),
        ("r.yaml --model.dropout 1", "--model.dropout: expected float < 1.0, got 1"),
        ("r.yaml --task.degree 9", "r.yaml: task: nodes 8 are too few for 9 paths of 3 nodes; expected at least 19"),
    ],
)
def test_a_wrong_recipe_or_override(complaint: Complaint, arguments: str, expected: str) -> None:
    message = complaint("train", *arguments.split())
    assert message.startswith(expected)
    assert expected.endswith(" ") or message == expected


def test_a_wrong_key_in_the_file_names_file_and_key(complaint: Complaint, place: Path) -> None:
    (place / "r.yaml").write_text(RECIPE.replace("batch_size", "batchsize"), encoding="utf-8")
    assert complaint("train", "r.yaml") == "r.yaml: train.batchsize: unknown key; did you mean batch_size?"
    (place / "r.yaml").write_text("", encoding="utf-8")
    assert complaint("train", "r.yaml").startswith("r.yaml: is empty; expected the sections task, model, train")


def test_a_run_folder_that_holds_another_recipe(complaint: Complaint) -> None:
    """steps may be another number, but not less than there are."""
    expected = "run holds a run of another recipe (train.batch_size is 8, not 4; train.seed is 1, not 2)"
    changed = ("--train.seed", "2", "--train.batch_size", "4", "--train.steps", "9")
    assert complaint("train", "r.yaml", "--run", "run", *changed) == f"{expected}; choose another --run"
    expected = "train.steps is 3, but run has 4 steps already; choose another --run"
    assert complaint("train", "r.yaml", "--run", "run", "--train.steps", "3") == expected


# --- Prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "expected one or more edges, then source and goal; got 0 nodes"),
        ("1>2 : 1", "expected one or more edges, then source and goal; got 3 nodes"),
        ("1>2 2>8 : 1 2", "unknown node '8' at word 4; expected 0 … 7"),
        ("1>2 2>x : 1 2", "unknown node 'x' at word 4; expected 0 … 7"),
        ("1>2 2>3 : 1 5", "goal 5 is in none of the edges"),
        ("1>2 " * 20 + ": 1 2", "prefix of 42 tokens is longer than the 10 this task allows"),
    ],
)
def test_a_wrong_prompt(complaint: Complaint, prompt: str, expected: str) -> None:
    assert complaint("generate", "run", "--prompt", prompt) == expected


def test_a_prompt_longer_than_decoding_allows(complaint: Complaint) -> None:
    message = complaint("generate", "run", "--prompt", "1>2 2>3 : 1 3", "--decode.max_length", "7")
    assert message == "a prompt has 8 tokens, 2 of them special; 7 are allowed"


# --- Models and checkpoints


@pytest.mark.parametrize(
    "command",
    [["evaluate"], ["generate"], ["info"], ["plot", "trajectory"], ["plot", "puzzle"], ["plot", "graph", "--model"]],
)
def test_a_model_that_is_not_there(complaint: Complaint, command: list[str]) -> None:
    assert complaint(*command, "nothing").startswith("nothing: no model there; expected a run folder with recipe.yaml")


def test_a_run_without_a_checkpoint(complaint: Complaint) -> None:
    shutil.rmtree("run/checkpoints")
    assert complaint("evaluate", "run") == "run: no checkpoint yet; expected run/checkpoints/step-…"


def test_a_truncated_checkpoint(complaint: Complaint) -> None:
    file = newest() / "ema.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 10)
    expected = f"{file}: truncated: {size - 10} bytes; expected {size}"
    assert complaint("evaluate", "run") == expected
    assert complaint("train", "r.yaml", "--run", "run") == expected


def test_a_tampered_checkpoint(complaint: Complaint) -> None:
    file = newest() / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert complaint("generate", "run").startswith(f"{file}: altered: its SHA-256 is ")
    assert complaint("train", "r.yaml", "--run", "run").startswith(f"{file}: altered: its SHA-256 is ")


def test_a_checkpoint_with_a_missing_part(complaint: Complaint) -> None:
    file = newest() / "ema.safetensors"
    size = file.stat().st_size
    file.unlink()
    assert complaint("evaluate", "run") == f"{file}: missing; expected a file of {size} bytes"


def test_a_broken_manifest(complaint: Complaint) -> None:
    file = newest() / "manifest.json"
    file.write_bytes(file.read_bytes()[:20])
    assert complaint("evaluate", "run").startswith(f"{file}: not a checkpoint manifest: ")


def test_weights_that_do_not_fit_the_recipe(complaint: Complaint) -> None:
    recipe = Path("run/recipe.yaml")
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("hidden: 32", "hidden: 64"), encoding="utf-8")
    expected = "run: the weights do not fit the recipe: backbone.blocks.0.down.weight is (16, 32), expected (16, 64)"
    assert complaint("generate", "run") == expected


def test_released_weights_that_are_no_weights(complaint: Complaint) -> None:
    Path("run/model.safetensors").write_text("not weights", encoding="utf-8")
    assert complaint("generate", "run").startswith("run/model.safetensors: expected a safetensors file: ")


def test_released_weights_go_before_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(newest() / "ema.safetensors")
    save_file(weights, "run/model.safetensors")
    shutil.rmtree("run/checkpoints")
    assert main(["evaluate", "run", "--count", "2"]) == 0
    assert json.loads(Path("run/evaluation-test.json").read_text(encoding="utf-8"))["step"] is None


# --- Machines that have no more to give


def test_a_full_disk_while_saving_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second checkpoint does not fit; the first one stays, and the run goes on from it when there is room."""
    assert main(["train", "r.yaml", "--run", "whole", "--device", "cpu"]) == 0
    full = [False, True]

    def write(path: Path, data: bytes) -> None:
        if full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_durably(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_durably", write)
        capsys.readouterr()
        assert main(["train", "r.yaml", "--run", "torn", "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    first, second = Path("torn/checkpoints/step-00000002"), Path("torn/checkpoints/step-00000004")
    assert line == (
        f"insertlm: cannot write checkpoint {second}: No space left on device; "
        f"the last good checkpoint is still there: {first}"
    )
    assert list(first.parent.iterdir()) == [first]
    assert main(["train", "r.yaml", "--run", "torn", "--device", "cpu"]) == 0
    for part in ("weights", "ema", "optimizer"):
        name = f"checkpoints/step-00000004/{part}.safetensors"
        assert Path("torn", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_full_disk_keeps_the_old_results(complaint: Complaint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path("old.jsonl").write_text("old", encoding="utf-8")
    Path("run/evaluation-test.json").write_text("old", encoding="utf-8")
    monkeypatch.setattr(os, "fsync", fsync)
    assert complaint("data", "star-easy", "--out", "old.jsonl") == "cannot write old.jsonl: No space left on device"
    assert complaint("evaluate", "run") == "cannot write run/evaluation-test.json: No space left on device"


def test_a_full_disk_behind_standard_output(complaint: Complaint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commands, "data", refuse)
    assert complaint("data", "star-easy") == "No space left on device"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes."),
    ],
)
def test_too_little_memory(complaint: Complaint, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "generate", refuse)
    assert complaint("generate") == "out of memory; expected a smaller model or batch size, or a larger machine"


def test_mistakes_of_the_program_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(commands, "generate", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["generate"])


# --- In a process of its own


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train nothing.yaml", "insertlm: nothing.yaml: no such file; expected a recipe, a YAML file\n"),
        ("generate run --prompt 1>9", "insertlm: unknown node '9' at word 2; expected 0 … 7\n"),
        ("data star-easy --count -1", "insertlm: argument --count: expected a whole number of at least 1, got '-1'\n"),
    ],
)
def test_the_command_exits_with_code_2(arguments: str, expected: str) -> None:
    command = Path(sys.executable).with_name("insertlm")
    done = subprocess.run([command, *arguments.split()], capture_output=True, encoding="utf-8", check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
