"""What the README shows must run, with the bundled model."""

from __future__ import annotations

import ast
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


def test_the_python_example_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what the last digits of another CPU may change."""
    monkeypatch.chdir(ROOT)
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    fills, event = printed.getvalue().splitlines()
    assert all(fill.endswith((".", "!")) for fill in ast.literal_eval(fills))
    assert event.startswith("Insertion(step=0, ")


def test_the_demo_fills_in_a_story(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    story = (ROOT / "docs" / "examples" / "red-ball.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(story)))
    started = time.perf_counter()
    assert main(["infill", "-", "--show", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("›") >= 10  # a line for every token
    assert "They played with the red ball until the sun went down." in " ".join(out.split())
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
