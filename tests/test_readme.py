"""What the README shows must run, with the bundled model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from insertlm.cli import main
from insertlm.config import load_recipe

ROOT = Path(__file__).parents[1]


def test_the_python_example_prints_what_it_says() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    path, event = printed.getvalue().splitlines()
    assert path == "4 7 7 9 9 2 2 5 5 8 8 3"
    assert event.startswith("Insertion(step=0, ")


def test_the_demo_solves_fresh_hard_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--count", "20", "--seed", "11", "--device", "cpu"]) == 0
    found = re.search(r"solved (\d+) of 20 fresh graphs", capsys.readouterr().out)
    assert found and int(found[1]) >= 18


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: path.parent.name)
def test_recipes_are_valid_and_comment_every_key(path: Path) -> None:
    load_recipe(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  ") and not line.startswith("  name: ilm"):
            assert re.search(r"\S +# \S", line), f"no comment: {line}"
