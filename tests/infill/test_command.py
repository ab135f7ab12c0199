"""The command `infill` and the method of a model: what they print, and what they say of mistakes."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from lettering import FREE, Few, Letters, build, filled, infill, text_model

from insertlm import model as api
from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.mdm import MdmConfig
from insertlm.infill.requests import Request

NO_HINTS = (
    "this model has not learnt what length hints mean; leave them out, or bound tokens by min_length and max_length"
)

# --- The command


@pytest.fixture
def command(few: Family, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `insertlm infill` prints, and says on standard error; with a model of text in place of any other."""
    model = text_model(few)
    monkeypatch.setattr(api, "load", lambda name, device: model)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(["infill", *arguments]) == code
        out, err = capsys.readouterr()
        return out, err

    return run


def test_the_command_prints_the_text(command: Callable[..., Any], few: Family) -> None:
    arguments = ("a\t___ b", "--samples", "3", "--max", "2", "--seed", "4", "--decode.max_steps", "30")
    out, _ = command(*arguments)
    lines = [json.loads(line) for line in command(*arguments, "--json")[0].splitlines()]
    assert out.splitlines() == [line["text"] for line in lines]
    assert all(line["text"] == f"a\t{line['fills'][0]} b" for line in lines)
    alone = text_model(few).infill("a\t___ b", samples=3, seed=4, max_length=2, max_steps=30)
    assert [line["text"] for line in lines] == [each.text for each in alone]
    told = {"text", "fills", "named", "probabilities", "complete", "limit", "stop_probability", "events"}
    assert {*lines[0]} == told


def test_the_command_inserts_anywhere_if_asked(command: Callable[..., Any], few: Family) -> None:
    out, _ = command("a ___ b c", "--anywhere", "--seed", "4")
    assert out == f"{text_model(few).infill('a ___ b c', seed=4, anywhere=True)[0].text}\n"
    assert not out.endswith(" b c\n")


def test_the_command_shows_the_order(command: Callable[..., Any]) -> None:
    out, _ = command("a ___ b", "--show", "--min", "3", "--max", "3", "--require", "dog", "--ban", "cat")
    *steps, last = out.splitlines()
    assert len(steps) == 3
    assert all(line.count("›") == 1 for line in steps)
    assert "dog" in last


def test_the_command_shows_the_blanks_alone_and_the_empty_ones(command: Callable[..., Any]) -> None:
    before, behind = "far away the cat " * 5, " the cat far away" * 5
    text = f"{before}near ___ by ___ there{behind}"
    out, _ = command(text, "--show", "--min", "2,0", "--max", "2,0", "--decode.max_steps", "9")
    first, second, last = out.splitlines()
    for line in (first, second, last):
        assert "… the cat far away the cat near " in line, "whole words"
        assert " by [ ] there the cat far away the …" in line
    assert (first.count("›"), second.count("›"), last.count("›")) == (1, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "--max 2",
            "it was ended by the most of a blank (--max, or what the text says of it) after 2 tokens; "
            "raise it for longer fills",
        ),
        ("--decode.max_tokens 1", "it reached --decode.max_tokens after 1 token; raise it for a longer text"),
        (
            "--decode.max_steps 3",
            "it reached --decode.max_steps after 3 tokens; for a longer text raise it, or give --decode.max_tokens",
        ),
        (
            "--decode.max_length 9",
            "it is as long as the model (or --decode.max_length) allows, after 4 tokens; shorten what is given",
        ),
    ],
)
def test_a_limit_is_named_with_its_remedy(command: Callable[..., Any], arguments: str, reason: str) -> None:
    _, err = command("a ___ b", "--decode.stop_threshold", "1", *arguments.split())
    assert err == f"insertlm: text 1: {reason}\n"


def test_a_number_of_tokens_allows_as_many_steps(few: Family) -> None:
    """Whatever the recipe's number of steps, which is twelve; unless steps are a schedule."""
    model = text_model(few)
    [result] = model.infill("a ___", max_tokens=17, stop_threshold=1.0)
    assert (len(result.trajectory.events), result.trajectory.limit) == (17, "max_tokens")
    [result] = model.infill("a ___", max_tokens=17, max_steps=9, stop_threshold=1.0)
    assert (len(result.trajectory.events), result.trajectory.limit) == (9, "max_steps")
    mdm = text_model(build(MdmConfig(block=30)))
    assert (mdm.settings(max_tokens=17).max_steps, mdm.settings([("decode.max_tokens", "17")]).max_steps) == (12, 12)


def test_the_text_can_come_through_a_pipe(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def send(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    send("é ___.\n".encode())
    assert command("-")[0].startswith("é ")
    send(b"a ___ \xff")
    assert command("-", code=2) == ("", "insertlm: the text is not UTF-8: byte 0xff at byte 6\n")
    send(b"")
    assert command("-", code=2)[1].startswith("insertlm: the text is empty; ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: TEXT"),
        (
            ["own.txt"],
            "the text has no blank; expected ___ where something is missing (or anywhere); to fill in a file: "
            "insertlm infill - < own.txt",
        ),
        (
            ["/"],
            "the text has no blank; expected ___ where something is missing (or anywhere)",
        ),
        (
            ["a __ b"],
            "the text has no blank; expected ___ where something is missing (or anywhere); __ is one underscore short "
            "of a blank",
        ),
        (
            ["a [BLANK] b"],
            "the text has no blank; expected ___ where something is missing (or anywhere); [BLANK] is plain text here",
        ),
        (["a ___", "--words", "3"], f"words: {NO_HINTS}"),
        (["a ___", "--words", ",3"], "words: expected a number, or one for each of the 1 blanks, got 2"),
        (["a ___", "--words", "few"], "argument --words: expected a whole number of at least 0, got 'few'"),
        (["a ___", "--words", "3,few"], "argument --words: expected a whole number of at least 0, got 'few'"),
        (["a ___", "--words="], "argument --words: expected a whole number of at least 0, got ''"),
        (["a ___", "--max", "1,2"], "max_length: expected a number, or one for each of the 1 blanks, got 2"),
        (
            ["a ___", "--ban", "a\x07"],
            "banned: a word has the control character U+0007 at character 1; expected none but tabs and line ends",
        ),
        (["no blank"], "the text has no blank; expected ___ where something is missing (or anywhere)"),
        (["a ___", "--min", "-1"], "argument --min: expected a whole number of at least 0, got '-1'"),
        (["a ___", "--min", "2", "--max", "1"], "expected 0 <= min_length <= max_length, got 2 and 1"),
        (
            ["a ___ b", "--min", "30", "--decode.max_tokens", "5"],
            "max_tokens: expected at least 30, which the blanks need, got 5",
        ),
        (
            ["a ___ b ___", "--min", "2,4", "--decode.max_tokens", "5"],
            "max_tokens: expected at least 6, which the blanks need, got 5",
        ),
        (["a ___", "--samples", "0"], "argument --samples: expected a whole number of at least 1, got '0'"),
        (["a ___", "--decode.top_q", "1"], "--decode.top_q: unknown key; did you mean top_p?"),
        (
            ["a\x07 ___"],
            "the text has the control character U+0007 at character 1; expected none but tabs and line ends",
        ),
    ],
)
def test_mistakes_are_one_line(command: Callable[..., Any], arguments: list[str], line: str) -> None:
    assert command(*arguments, code=2) == ("", f"insertlm: {line}\n")


def test_the_command_fills_in_a_set(
    command: Callable[..., Any], few: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = {"pieces": ["a ", " b", "."], "removed": ["cat", " dogs"], "text": "a cat b dogs."}
    Path("set.jsonl").write_text(f"{json.dumps(example)}\n" * 3, encoding="utf-8")
    out, _ = command("set", "set.jsonl", "--out", "out.jsonl", "--true-lengths", "--count", "2")
    assert re.fullmatch(r"wrote 2 texts to out.jsonl, \d of them ended by the model itself\n", out)
    for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert record["output"] == f"a {record['fills'][0]} b{record['fills'][1]}."
        assert {**record, **example} == record
    for argument, bounds in (["--true-lengths"], {"lengths_of": ["cat", " dogs"]}), (["--min", "4"], {"min_length": 4}):
        command("set", "set.jsonl", "--out", "out.jsonl", "--count", "1", "--max", "4", "--seed", "3", *argument)
        [alone] = filled(few, Request("a ___ b___.", max_length=4, **cast(Any, bounds)), [3])
        assert json.loads(Path("out.jsonl").read_text(encoding="utf-8"))["fills"] == alone.fills
    assert command("set", "none.jsonl", "--out", "x", code=2)[1].startswith("insertlm: none.jsonl: no such file")


def test_lengths_can_be_those_of_other_texts(few: Family) -> None:
    """cat is one token, and the space before it is the model's to write."""
    request = Request("a ___ b___.", lengths_of=["cat", " dogs"])
    [result] = filled(few, request, stop_threshold=0.0)
    order = result.trajectory.order
    gaps = [order[:k].count(-1) for k, event in enumerate(order) if event >= 0]
    assert [gaps.count(gap) for gap in result.given.blanks] == [1, 2]
    with pytest.raises(InsertlmError, match=r"^lengths_of: expected a text for each of 2 blanks, got 1$"):
        filled(few, Request("___ a ___", lengths_of=["b"]))


def test_the_wrong_one_of_many_is_named(few: Family) -> None:
    with pytest.raises(InsertlmError, match=r"^text 2: the text has no blank"):
        infill(few, Letters(), [Request("___"), Request("a")], FREE)


def test_a_model_of_graphs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infill", "a ___", "--model", "star-hard-mini", "--device", "cpu"]) == 2
    assert (
        capsys.readouterr().err
        == "insertlm: star-hard-mini: this is a model of the task star; expected a model of text\n"
    )


def test_the_method_of_a_model(few: Family) -> None:
    model = text_model(few)
    first, second = model.infill("a ___ b", samples=2, seed=3, max_length=3, top_p=0.9)
    assert first.text == model.infill("a ___ b", seed=3, max_length=3, top_p=0.9)[0].text
    assert second.text == model.infill("a ___ b", seed=4, max_length=3, top_p=0.9)[0].text


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"samples": 0}, "samples: expected a whole number of at least 1, got 0"),
        ({"samples": 2.5}, "samples: expected a whole number of at least 1, got 2.5"),
        ({"batch_size": "x"}, "batch_size: expected a whole number of at least 1, got 'x'"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"seed": 1.5}, "seed: expected a whole number of at least 0, got 1.5"),
        ({"seed": "1"}, "seed: expected a whole number of at least 0, got '1'"),
        ({"seed": True}, "seed: expected a whole number of at least 0, got True"),
        ({"seed": 1 << 62}, f"seed: expected a whole number of at most {(1 << 62) - 1}, got {1 << 62}"),
        ({"max_length": 2.0}, "max_length: expected a whole number of at least 0, got 2.0"),
        ({"max_length": "3"}, "max_length: expected a whole number of at least 0, got '3'"),
        ({"min_length": [True]}, "min_length: expected a whole number of at least 0, got True"),
        ({"max_length": 10**20}, f"max_length: expected a whole number of at most 1000000000, got {10**20}"),
        ({"words": -1}, "words: expected a whole number of at least 0, got -1"),
        ({"banned": None}, "banned: expected a list of words, got None"),
        ({"banned": "cat"}, "banned: expected a list of words, got 'cat'"),
        ({"banned": [1]}, "banned: expected words, got 1"),
        ({"required": "cat"}, "required: expected a list of words, got 'cat'"),
        (
            {"required": ["a\0"]},
            "required: a word has the control character U+0000 at character 1; expected none but tabs and line ends",
        ),
        (
            {"banned": ["cat", "\x1b"]},
            "banned: a word has the control character U+001B at character 0; expected none but tabs and line ends",
        ),
        (
            {"banned": ["\udc80"]},
            "banned: a word is not Unicode at character 0; expected characters that UTF-8 can hold",
        ),
        ({"blanks": "x"}, "blanks: expected pairs of whole numbers, got 'x'"),
        ({"blanks": 3}, "blanks: expected pairs of whole numbers, got 3"),
        ({"blanks": [(0.5, 1)]}, "blanks: expected pairs of whole numbers, got [(0.5, 1)]"),
        ({"blanks": [1]}, "blanks: expected pairs of whole numbers, got [1]"),
        ({"text": ["a ___"]}, "text: expected one text, got ['a ___']"),
        ({"text": None}, "text: expected one text, got None"),
    ],
)
def test_wrong_arguments_are_one_line(few: Family, wrong: dict[str, Any], line: str) -> None:
    for stream in (False, True):
        with pytest.raises(InsertlmError) as caught:
            text_model(few).infill(**{"text": "a ___", "stream": stream, **wrong})
        assert str(caught.value) == line


def test_numbers_of_numpy_are_numbers(few: Family) -> None:
    model = text_model(few)
    arguments: list[dict[str, Any]] = [
        {
            "seed": kind(5),
            "max_length": [kind(2)],
            "samples": kind(2),
            "temperature": real(0.5),
            "blanks": [(kind(2),) * 2],
        }
        for kind, real in ((int, float), (np.int64, np.float32))
    ]
    ours, numpys = ([each.text for each in model.infill("a  b", **some)] for some in arguments)
    assert ours == numpys


# --- Lengths


def test_lengths_are_for_every_blank_or_for_each(command: Callable[..., Any], few: Family) -> None:
    both: list[dict[str, Any]] = [{"min_length": 2}, {"min_length": [None, 3]}, {"max_length": [1, None, 2]}]
    texts = ["a ___ b", "a ___ b ___.", "a ___ b ___ ___."]
    options = [["--min", "2"], ["--min", ",3"], ["--max", "1, ,2"]]
    for text, option, bounds in zip(texts, options, both, strict=True):
        assert command(text, *option)[0] == text_model(few).infill(text, **bounds)[0].text + "\n"


def test_hints_reach_a_model_that_takes_them(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    filler = text_model(build(FillConfig(), Few, max_length=600))
    monkeypatch.setattr(api, "load", lambda name, device: filler)
    text = "a ___ b ___"
    for option, words in (("3", 3), (",5", [None, 5]), ("0,2", [0, 2])):
        out, _ = command(text, "--words", option, "--decode.max_tokens", "9", "--json")
        [alone] = filler.infill(text, words=cast(Any, words), max_tokens=9)
        assert json.loads(out)["fills"] == alone.fills


def test_a_blank_may_stay_empty_if_asked(command: Callable[..., Any]) -> None:
    always = ("--decode.stop_threshold", "0")
    assert command("a ___ b.", "--min", "0", *always) == ("a  b.\n", "")
    assert command("a ___ b.", *always)[0] != "a  b.\n"


def test_the_name_of_a_file_is_not_its_text(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my story").write_text("a ___", encoding="utf-8")
    assert command("my story", code=2)[1].endswith("; to fill in a file: insertlm infill - < 'my story'\n")
    assert "file" not in command("your story", code=2)[1]
    assert "file" not in command("a long one. " * 1000, code=2)[1]
