"""Zebra puzzles on the command line: a tiny model is trained, evaluated and asked; puzzles are printed and solved."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from insertlm.cli import main
from insertlm.tasks.zebra import Zebra

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


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


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


def test_data_prints_and_writes_puzzles(capsys: pytest.CaptureFixture[str]) -> None:
    task = Zebra()
    examples = list(task.examples("test", 2, 4))
    told = output(capsys, "data", "zebra", "--count", "2", "--seed", "4")
    assert told == "\n\n".join(map(task.render, examples)) + "\n"
    output(capsys, "data", "zebra", "--count", "2", "--seed", "4", "--out", "z.jsonl")
    lines = [json.loads(line) for line in Path("z.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [task.parse_prompt(line["prefix"]) for line in lines] == [example.prefix for example in examples]
    assert [task.tokenizer.encode(line["target"]) for line in lines] == [example.target for example in examples]


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
    monkeypatch.setattr(sys, "stdin", io.StringIO(PUZZLE))
    assert output(capsys, "solve", "-") == told


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


def test_what_is_not_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("puzzle.txt").write_bytes(b"\xff\xfe\x00")
    assert main(["solve", "puzzle.txt"]) == 2
    assert capsys.readouterr().err == "insertlm: puzzle.txt: is not text; expected clues\n"
