"""docs/reference/ is what docs/make_reference.py makes of the code."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from insertlm.cli.arguments import OVERRIDES
from insertlm.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGES: Callable[[], dict[str, str]] = runpy.run_path(str(DOCS / "make_reference.py"))["pages"]


@pytest.mark.parametrize("name", ["commands.md", "recipe.md"])
def test_the_reference_is_up_to_date(name: str) -> None:
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == PAGES()[name], "run: make docs"


def test_every_command_is_there_with_its_options() -> None:
    page = PAGES()["commands.md"]
    for command in OVERRIDES:
        assert f"\n## insertlm {command}" in page
    assert "| `--top" not in page, "keys of a recipe are on a page of their own"
    train = page.partition("## insertlm train\n")[2].partition("\n## ")[0]
    assert "| `RECIPE` | YAML file" in train and "| `--run DIR` | run folder to write" in train


def test_every_key_is_there_with_type_and_default_and_says_what_it_is() -> None:
    page = PAGES()["recipe.md"]
    for section in msgspec.structs.fields(Recipe):
        assert f"\n## {section.name}\n" in page
    assert "| `dropout` | number >= 0, < 1 | `0.0` | of what a block adds to the residual stream |" in page
    assert "| `parallel` | `ddp`, `fsdp` | `ddp` |" in page
    assert "| `tokenizer` | text | | tokenizer.json" in page, "by its name in a recipe, not in Python"
    silent = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("| |")]
    assert not silent, "a comment behind the field in the code says what a key is"
