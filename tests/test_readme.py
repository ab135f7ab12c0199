"""What the README shows must run, with the bundled model."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import insertlm
from insertlm.cli.main import main
from insertlm.inference.settings import Prompt
from insertlm.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 7, "six lines and an empty one"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().splitlines() == re.findall(r"^print\(.*?\)  # (.*)$", code, re.MULTILINE)
    assert printed.getvalue().startswith("True "), "the text is complete"


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 90
    for place in re.findall(r"\]\((?!http)(.*?)(?:#.*?)?\)", README):
        assert (ROOT / place).exists(), place


def test_its_results_are_those_of_the_results_page() -> None:
    """Every number of the README's table stands in docs/results.md, if only with more digits."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| task .*?\n\n", README, re.MULTILINE | re.DOTALL)
    numbers = re.findall(r"\d+\.\d+", table)
    assert len(numbers) >= 10
    for number in numbers:
        places = len(number.partition(".")[2])
        assert any(f"{float(each):.{places}f}" == number for each in re.findall(r"\d+\.\d+", results)), number


def test_the_demo_fills_in_a_story(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    story = (ROOT / "docs" / "examples" / "red-ball.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(story)))
    started = time.perf_counter()
    assert main(["infill", "-", "--show", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.count("›") >= 10  # a line for every token
    assert "insertlm: text" not in err, "the model ended it, no limit"
    assert "[ ]" in out, "the blank that is filled later"
    assert "›" not in out.splitlines()[-1], "the last line is the outcome"
    assert time.perf_counter() - started < 30  # seconds; about three on two idle cores


def test_half_precision_solves_graphs_on_a_cpu_too() -> None:
    model = insertlm.load("star-hard-mini", "cpu", halved=True)
    examples = [*model.recipe.task.examples("test", 20)]
    written = model.family.decode([Prompt(example.prefix) for example in examples], model.recipe.decode)
    assert sum(a.ids == list(b.target) for a, b in zip(written, examples, strict=True)) >= 18


def test_the_demo_solves_fresh_hard_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--count", "20", "--seed", "11", "--device", "cpu"]) == 0
    found = re.search(r"solved (\d+) of 20 fresh graphs", capsys.readouterr().out)
    assert found and int(found[1]) >= 18


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_recipes_are_valid_and_comment_every_key(path: Path) -> None:
    load_recipe(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  ") and not line.startswith("  name: ilm"):
            assert re.search(r"\S +# \S", line), f"no comment: {line}"
