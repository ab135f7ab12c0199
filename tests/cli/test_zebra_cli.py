"""Zebra puzzles on the command line: a tiny model is trained, evaluated, asked and drawn; puzzles are printed and
solved."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commanding import output

import insertlm
from insertlm import plots
from insertlm.cli.main import main
from insertlm.plots import Result, Written
from insertlm.tasks.zebra.clues import Street
from insertlm.tasks.zebra.task import Triple, Zebra, in_threes

RECIPE = """
task: {name: zebra, max_houses: 4, max_attributes: 3, train: 60, validation: 6, test: 12}
model: {layers: 1, width: 32, heads: 2, hidden: 64}
family: {name: FAMILY}
train: {steps: 4, batch_size: 8, log_every: 2, save_every: 4, validate_every: 4}
decode: {max_steps: 40}
"""
PUZZLE = """3 houses, 3 attributes
left-of LHS c 2 2 RHS c 2 1 CLUE_END = LHS c 2 1 RHS c 1 2 CLUE_END
= LHS c 1 1 RHS c 2 2 CLUE_END nbr LHS c 2 1 RHS c 0 2 CLUE_END
inbetween LHS c 0 1 RHS c 1 1 c 2 1 CLUE_END
"""


@pytest.fixture(autouse=True)
def work_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("family", ["ilm", "arm", "it", "mdm, block: 36"])
def test_every_family_learns_and_is_scored_by_the_task(capsys: pytest.CaptureFixture[str], family: str) -> None:
    Path("r.yaml").write_text(RECIPE.replace("FAMILY", family), encoding="utf-8")
    output(capsys, "train", "r.yaml", "--run", "run", "--device", "cpu")
    last = json.loads(Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert {"validation_sequence_accuracy", "validation_token_accuracy", "validation_clue_accuracy"} <= last.keys()
    told = output(capsys, "evaluate", "run", "--device", "cpu")
    assert re.search(r"clue accuracy +\d+\.\d\d %", told)
    record = json.loads(Path("run/evaluation-test.json").read_text(encoding="utf-8"))
    assert record["count"] == 12
    assert {"sequence_accuracy", "token_accuracy", "clue_accuracy", "tokens", "seconds"} <= record.keys()
    assert any(re.fullmatch(r"sequence_accuracy_[34]x3", key) for key in record)
    told = output(capsys, "generate", "run", "--count", "2", "--device", "cpu")
    assert told.startswith(("solved 0 of 2 fresh puzzles (seed 0) in ", "solved 1 of 2 fresh puzzles"))
    assert "houses, 3 attributes" in told
    assert output(capsys, "plot", "puzzle", "run", "--device", "cpu", "--out", "a.png") == "wrote a.png\n"
    assert output(capsys, "plot", "accuracy", "run/evaluation-test.json", "--out", "b.png") == "wrote b.png\n"
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_data_prints_and_writes_puzzles(capsys: pytest.CaptureFixture[str]) -> None:
    task = Zebra()
    examples = list(task.examples("test", 2, 4))
    told = output(capsys, "data", "zebra", "--count", "2", "--seed", "4")
    assert told == "\n\n".join(map(task.render, examples)) + "\n"
    output(capsys, "data", "zebra", "--count", "2", "--seed", "4", "--out", "z.jsonl")
    lines = [json.loads(line) for line in Path("z.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [task.parse_prompt(line["prefix"]) for line in lines] == [example.prefix for example in examples]
    assert [task.tokenizer.encode(line["target"]) for line in lines] == [example.target for example in examples]


def test_puzzles_on_file_are_those_of_old(capsys: pytest.CaptureFixture[str]) -> None:
    """Line for line: the hash is that of the first version."""
    output(capsys, "data", "zebra", "--count", "30", "--seed", "3", "--out", "z.jsonl")
    assert hashlib.sha256(Path("z.jsonl").read_bytes()).hexdigest()[:16] == "3a34f1d4328be82c"


def test_solve_prints_the_table_and_the_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("puzzle.txt").write_text(PUZZLE, encoding="utf-8")
    told = output(capsys, "solve", "puzzle.txt")
    assert told.splitlines()[:4] == [
        "house  0     1      2",
        "       blue  green  red",
        "       Anna  Ben    Clara",
        "       cat   fish   dog",
    ]
    assert "order  " in told
    assert sorted(told.splitlines()[-1].split()[1:]) == sorted("012" * 9)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PUZZLE.encode())))
    assert output(capsys, "solve", "-") == told


# --- Pictures


def test_a_puzzle_is_drawn_as_the_model_wrote_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("r.yaml").write_text(RECIPE.replace("FAMILY", "ilm"), encoding="utf-8")
    output(capsys, "train", "r.yaml", "--run", "run", "--device", "cpu", "--train.steps", "1")
    seen: list[tuple[Street, list[Written], list[Triple], str]] = []
    monkeypatch.setattr(plots, "puzzle_figure", lambda *data: seen.append(data))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    settings: dict[str, Any] = {"max_steps": 20, "temperature": 1.0}
    overrides = [word for key, value in settings.items() for word in (f"--decode.{key}", str(value))]
    output(capsys, "plot", "puzzle", "run", "--seed", "3", "--device", "cpu", *overrides)
    [(street, written, solution, title)] = seen
    assert title == f"A zebra puzzle of {street.size} houses and {street.attributes} attributes, seed 3"
    model = insertlm.load("run", "cpu")
    [example] = model.recipe.task.examples("test", 1, 3)
    [path] = model.generate([model.decode(example.prefix)], seed=3, **settings)
    assert model.recipe.task.parse_prompt(" ".join(map(str, street.clues))) == example.prefix
    assert solution == in_threes(example.target)
    assert " ".join(each.text for each in written) == model.decode(path.ids)
    assert [each.triple for each in written] == Zebra().triples(path.ids)
    assert [each.turn for each in written] == [max(path.turns[i : i + 3]) for i in range(0, len(path.turns), 3)]
    assert len(written) == 7  # 20 tokens: the last triple broke off


def save_record(name: str, family: str | None, model: str, accuracy: float = 90.0, **decode: Any) -> str:
    record = {
        "model": model,
        **({} if family is None else {"family": family}),
        "split": "test",
        "count": 400,
        "sequence_accuracy": accuracy,
        "sequence_accuracy_4x3": 50.0,
        "decode": {"order": "mass", "joint": False, "max_steps": 216, **decode},
    }
    Path(name).write_text(json.dumps(record), encoding="utf-8")
    return name


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a picture of accuracies would show, and its title; none is drawn."""
    seen: list[Any] = []
    monkeypatch.setattr(plots, "accuracy_figure", lambda results, title: seen.extend([*results, title]))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    return seen


def test_accuracies_are_those_of_the_files(capsys: pytest.CaptureFixture[str], results: list[Any]) -> None:
    output(capsys, "plot", "accuracy", save_record("a.json", "ilm", "run", 87.5))
    assert results == [Result("ILM", 87.5, 400, {(4, 3): 50.0}), "zebra: 400 test puzzles"]


def test_labels_tell_what_differs(capsys: pytest.CaptureFixture[str], results: list[Any]) -> None:
    files = [
        save_record("a.json", "ilm", "runs/ilm"),
        save_record("b.json", "ilm", "runs/ilm", order="margin"),
        save_record("c.json", "ilm", "runs/ilm", order="margin", joint=True),
        save_record("d.json", "mdm", "runs/mdm", max_steps=108),  # alone of its family: all of it is its own
        save_record("e.json", "arm", "runs/arm"),
        save_record("f.json", "arm", "runs/armo"),
        save_record("g.json", None, "runs/old"),
        save_record("h.json", "it", "runs/it"),
        save_record("i.json", "it", "runs/it"),
        save_record("j.json", "fill", "a/fill", order="random", max_steps=12),
        save_record("k.json", "fill", "b/fill"),
    ]
    output(capsys, "plot", "accuracy", *files)
    assert [result.label for result in results[:-1]] == [
        "ILM, by mass",
        "ILM, by margin",
        "ILM, by margin, joint",
        "MDM",
        "ARM (arm)",
        "ARM (armo)",
        "old",
        "IT (h.json)",
        "IT (i.json)",
        "FILL (a/fill), random order, 12 steps",
        "FILL (b/fill), by mass, 216 steps",
    ]


def test_the_title_names_the_task_and_counts_its_examples(
    capsys: pytest.CaptureFixture[str], results: list[Any]
) -> None:
    """Records have a task since 0.2.0; in older ones only the sizes of puzzles tell it."""
    graphs = {"name": "star", "degree": 5, "min_nodes": 6, "max_nodes": 12, "min_plan": 5, "nodes": 56, "test": 100}
    record = {"model": "run", "family": "ilm", "split": "test", "count": 5000, "sequence_accuracy": 9.0, "decode": {}}
    tasks: list[dict[str, Any]] = [{"task": graphs}, {"task": {**graphs, "degree": 4}}, {}, {"task": {"name": "mine"}}]
    for number, task in enumerate(tasks):
        Path(f"{number}.json").write_text(json.dumps({**record, **task}), encoding="utf-8")
    for files in (["0.json"], ["1.json"], ["2.json"], ["3.json"], ["2.json", "0.json"]):
        output(capsys, "plot", "accuracy", *files)
    assert [each for each in results if isinstance(each, str)] == [
        "star-hard: 5,000 test graphs",
        "star: 5,000 test graphs",
        "5,000 test examples",
        "mine: 5,000 test examples",
        "star-hard: 5,000 test graphs",
    ]
    assert main(["plot", "accuracy", "0.json", "1.json"]) == 2
    told = "1.json was measured on star, 0.json on star-hard; expected results of one task"
    assert capsys.readouterr().err == f"insertlm: {told}\n"


EXPECTED = "expected a result of insertlm evaluate RUN"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, f"b.json: cannot be read: No such file or directory; {EXPECTED}"),
        ("no", f"b.json: not JSON; {EXPECTED}"),
        ("[1]", f"b.json: {EXPECTED}"),
        ('{"nll": 1}', f"b.json: {EXPECTED}"),
        ('{"sequence_accuracy": 5}', f"b.json: Object missing required field `model`; {EXPECTED}"),
        ('"count": 0', f"b.json: Expected `int` >= 1 - at `$.count`; {EXPECTED}"),
        ('"sequence_accuracy": 101', f"b.json: Expected `float` <= 100.0 - at `$.sequence_accuracy`; {EXPECTED}"),
        ('"sequence_accuracy_4x3": "x"', f"b.json: Expected `float`, got `str` - at `$.sizes[...]`; {EXPECTED}"),
        ('"split": "train"', "b.json was measured on train, a.json on test; expected results of one split"),
    ],
)
def test_what_holds_no_accuracy_is_one_line(capsys: pytest.CaptureFixture[str], text: str | None, message: str) -> None:
    good = Path(save_record("a.json", "ilm", "run")).read_text(encoding="utf-8")
    if text is not None:  # a field takes the place of the good one; the later of two counts
        Path("b.json").write_text(f"{good[:-1]}, {text}}}" if text.startswith('"') else text, encoding="utf-8")
    assert main(["plot", "accuracy", "a.json", "b.json"]) == 2
    assert capsys.readouterr().err == f"insertlm: {message}\n"
    assert not Path("accuracy.png").exists()


@pytest.mark.parametrize("name", ["zebra", "sudoku"])
@pytest.mark.parametrize("count", [1, 3])
def test_what_data_prints_is_solved(capsys: pytest.CaptureFixture[str], name: str, count: int) -> None:
    told = output(capsys, "data", name, "--count", str(count), "--seed", "4")
    Path("printed.txt").write_text(told, encoding="utf-8")
    found = output(capsys, "solve", "printed.txt").rstrip("\n")
    if name == "sudoku":
        assert found.replace("\n\n", "\n").split("\n") == _solutions(told)
        return
    # As far as the table goes: the order of writing may be another one.
    tables = re.findall(r"^house(?:.*\n)+?(?=\n)", told, re.MULTILINE)
    assert re.findall(r"^house(?:.*\n)+?(?=\n)", found, re.MULTILINE) == tables
    assert len(tables) == count


def _solutions(told: str) -> list[str]:
    """The lines of every second grid."""
    lines = [line for line in told.splitlines() if line]
    return [line for number, line in enumerate(lines) if number // 9 % 2]


# --- What cannot be solved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PUZZLE.replace("3 houses", "7 houses"), "impossible size: 7 houses; expected 3 … 6"),
        (PUZZLE.replace("c 0 2", "c 0 3"), "clue 4 (nbr LHS c 2 1 RHS c 0 3 CLUE_END): unknown value 3; this puzzle"),
        (PUZZLE + "ends LHS c 0 2 RHS CLUE_END", "no solution: clue 6 (ends LHS c 0 2 RHS CLUE_END) contradicts"),
        (PUZZLE[: PUZZLE.index("inbetween")], "several solutions: the 4 clues leave open whether value "),
    ],
)
def test_what_cannot_be_solved_is_one_line(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    Path("puzzle.txt").write_text(text, encoding="utf-8")
    assert main(["solve", "puzzle.txt"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"insertlm: {message}")


def test_what_is_not_text_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("puzzle.txt").write_bytes(b"\xff\xfe\x00")
    assert main(["solve", "puzzle.txt"]) == 2
    assert capsys.readouterr().err == "insertlm: puzzle.txt: is not text; expected clues or a grid\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00")))
    assert main(["solve", "-"]) == 2
    assert capsys.readouterr().err == "insertlm: -: is not text; expected clues or a grid\n"
