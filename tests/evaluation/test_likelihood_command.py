"""`insertlm evaluate likelihood`: from the command line to the JSON file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_tasks import STORIES, save_run

import insertlm
from insertlm.cli.main import main
from insertlm.evaluation import likelihoods as module
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.likelihoods import Measured, Passage, measure, passages_of, summarise
from insertlm.families.arm import ARM
from insertlm.families.base import Noise
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods

Run = Callable[..., str]
TEXTS = ["The cat sat.", "The dog number 3 sat on the mat, and then the cat sat on it.", "", "The cat sat."]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for family in ("arm", "fill", "ilm", "it"):
        (folder / family).mkdir()
        save_run(folder / family, family)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a file of texts, the corpus of the models, and the models."""
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    lines = (json.dumps({"text": f"{story} It was day {day}."}) + "\n" for day in range(40) for story in STORIES)
    Path("a.jsonl").write_text("".join(lines), encoding="utf-8")
    for run in runs.iterdir():
        Path(run.name).symlink_to(run)


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Run:
    """What `evaluate likelihood` prints when it succeeds."""

    def run(*arguments: str) -> str:
        code = main(["evaluate", "likelihood", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> str:
        assert main(["evaluate", "likelihood", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("insertlm: ")

    return run


def read(path: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return record


@pytest.mark.parametrize(("family", "exact", "bounds"), [("fill", 3, 0), ("arm", 3, 0), ("ilm", 2, 1)])
def test_a_table_and_json(output: Run, family: str, exact: int, bounds: int) -> None:
    out = output(family, "--data", "texts.jsonl")
    for line in (r"NLL per token +[\d.]+ ± [\d.]+", r"NLL per word +[\d.]+ ± [\d.]+", r"bits per byte +[\d.]+ ± "):
        assert re.search(line, out)
    assert re.search(r"texts +4 +exact" if not bounds else r"texts +4 +2 exact, 1 as a lower bound", out)
    assert "  1 empty, in no mean: number 3\n" in out
    assert out.endswith(f"wrote {family}-likelihood-texts.json\n")
    record = read(f"{family}-likelihood-texts.json")
    assert (record["family"], record["data"], record["source"]) == (family, {"file": "texts.jsonl"}, family)
    assert (record["exact"], record["bounds"], record["empty"], record["count"]) == (exact, bounds, [3], 4)
    assert record["effort"] == {"exact": 12, "orders": 8, "states": 32, "seed": 0}
    assert (record["bound_error"] > 0) == (bounds > 0)
    assert {"commit", "device", "torch", "command", "label"} <= record.keys()
    model = insertlm.load(family, "cpu")
    found = [model.likelihood(text) for text in TEXTS if text]
    total, tokens = -math.fsum(each.value for each in found), sum(each.tokens + 1 for each in found)
    assert (record["tokens"], record["bytes"], record["words"]) == (tokens, sum(map(len, TEXTS)), 3 + 15 + 3)
    assert record["nll_per_token"] == pytest.approx(total / tokens, abs=1e-5)
    assert record["nll_per_word"] == pytest.approx(total / 21, abs=1e-4)
    assert record["bits_per_byte"] == pytest.approx(total / math.log(2) / record["bytes"], abs=1e-5)
    assert record["nll_per_text"] == pytest.approx(total / 3, abs=1e-4)


def test_the_nll_of_an_arm_is_its_loss(output: Run) -> None:
    """But for the share of the special tokens, which it never writes: a few of 290 in a model that is not trained."""
    output("arm", "--count", "9")
    record = read("arm-likelihood.json")
    assert (record["data"], record["count"], record["exact"]) == ({"split": "test"}, 9, 9)
    model = insertlm.load("arm", "cpu")
    assert isinstance(model.family, ARM)
    examples = model.recipe.task.examples("test", 9)
    with torch.no_grad():
        rows = model.family.rows(examples)
        noise = Noise(0, *torch.zeros(2, len(examples), dtype=torch.int64))
        loss = float(model.family.losses(rows, noise).total)
    assert record["nll_per_token"] < loss < record["nll_per_token"] + 0.05


def test_prompts_of_a_task_come_first(output: Run) -> None:
    assert "its own validation split" in output(
        "star-hard-mini", "--split", "validation", "--count", "2", "--exact", "0"
    )
    record = read("star-hard-mini-likelihood.json")
    model = insertlm.load("star-hard-mini", "cpu")
    examples = model.recipe.task.examples("validation", 2)
    passages = [Passage(each.prefix, each.target, model.decode(each.target)) for each in examples]
    found = measure(model, passages, Effort(exact=0), Journal())
    assert record["nll_per_text"] == pytest.approx(-sum(each.estimate.value for each in found) / 2, abs=1e-4)


def test_a_stopped_command_goes_on_where_it_was(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = output("fill", "--count", "20", "--out", "whole.json")
    assert len(Path("whole.journal.jsonl").read_text(encoding="utf-8").splitlines()) == 20
    add, added = Journal.add, list[str]()

    def killed(self: Journal, key: str, record: Any) -> None:
        if len(added) == 7:
            raise KeyboardInterrupt
        added.append(key)
        add(self, key, record)

    monkeypatch.setattr(Journal, "add", killed)
    assert main(["evaluate", "likelihood", "fill", "--count", "20", "--out", "part.json"]) == 130
    assert not Path("part.json").exists()
    monkeypatch.setattr(Journal, "add", add)
    asked = list[int]()

    def counted(family: Any, completions: Any, *rest: Any) -> list[Estimate]:
        asked.append(len(completions))
        return log_likelihoods(family, completions, *rest)

    monkeypatch.setattr(module, "log_likelihoods", counted)
    assert output("fill", "--count", "20", "--out", "part.json") == whole.replace("whole", "part")
    assert output("fill", "--count", "20", "--out", "part.json") == whole.replace("whole", "part")
    assert asked == [13, 0]
    one, other = read("whole.json"), read("part.json")
    same = [name for name, value in one.items() if isinstance(value, float)]
    assert [other[name] for name in same] == pytest.approx([one[name] for name in same], abs=1e-6)


def test_equal_texts_are_measured_once_and_other_efforts_anew(output: Run) -> None:
    def lines() -> int:
        return len(Path("x.journal.jsonl").read_text(encoding="utf-8").splitlines())

    call = ["ilm", "--data", "texts.jsonl", "--out", "x.json"]
    output(*call)
    assert lines() == 3
    output(*call, "--exact", "0")
    assert lines() == 6


def test_texts_that_are_too_long_are_cut() -> None:
    model = insertlm.load("ilm", "cpu")
    [short, long] = passages_of(model, ["The cat.", "The cat sat on the mat. " * 12])
    assert (short.cut, long.cut, len(long.ids)) == (False, True, 40)
    assert "The cat sat on the mat. " * 12 != long.text == model.decode(long.ids)
    summary = summarise(measure(model, [short, long], Effort(), Journal()))
    assert (summary.cut, summary.count) == (1, 2)
    assert summary.bytes == len(short.text) + len(long.text)


def test_what_the_model_never_writes_is_told_and_in_no_mean() -> None:
    def measured(text: str, value: float, error: float = 0.0) -> Measured:
        return Measured(Passage([], list(range(len(text))), text), Estimate(value, error, error == 0))

    lines = [measured("a b c", -6.0), measured("x", -math.inf), measured(" ", -1.0), measured("d ", -3.0, 0.9)]
    found = summarise(lines)
    assert (found.impossible, found.empty, found.exact, found.bounds) == ([2], [3], 1, 1)
    assert (found.nll_per_token, found.nll_per_word, found.nll_per_text) == (9 / 9, 9 / 4, 4.5)
    assert found.bits_per_byte == pytest.approx(9 / 7 / math.log(2))
    assert found.bound_error == pytest.approx(0.1)
    # By the formula of a ratio's error: residuals 6 - 6 and 3 - 3 of two texts.
    assert found.nll_per_token_error == 0
    assert found.nll_per_word_error == pytest.approx(math.sqrt(2 * ((6 - 27 / 4) ** 2 + (3 - 9 / 4) ** 2)) / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["it", "--data", "texts.jsonl"], "likelihoods: expected a model of the family ilm, arm, fill or mdm"),
        (["none"], "none: no model there"),
        (["fill", "--data", "none.txt"], "none.txt: no such file"),
        (["fill", "--data", "texts.jsonl", "--field", "x"], "texts.jsonl, line 1: expected a text under 'x'"),
        (["fill", "--exact", "17"], "argument --exact: expected a whole number of at most 16"),
        (["fill", "--orders", "1"], "argument --orders: expected a whole number of at least 2"),
        (["fill", "--out", "x.txt"], "--out x.txt: expected a .json file"),
        (["star-hard-mini", "--data", "texts.jsonl"], "expected a model of text"),
        (["fill", "--decode.temperature", "1"], "unknown argument --decode.temperature"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_bad_arguments(complaint: Run, arguments: list[str], message: str) -> None:
    assert message in complaint(*arguments)
