"""What the documentation shows must run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from insertlm.cli import main

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_family_added_on_the_page_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file becomes a module for as long as the test runs; then it is trained, and its tests are called."""
    family, session, tests = blocks("adding-a-family.md")
    module = ModuleType("insertlm.families.tree")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(family, module.__dict__)
    with torch.random.fork_rng():
        exec(session, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*?  # (.*)$", session, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(tests, names)
    cases = [case for name, case in names.items() if name.startswith("test_")]
    assert len(cases) == 3
    for case in cases:
        case()


def test_the_page_names_the_line_to_change() -> None:
    page = (DOCS / "adding-a-family.md").read_text(encoding="utf-8")
    config = (DOCS.parent / "src" / "insertlm" / "config.py").read_text(encoding="utf-8")
    assert "\n    FamilyConfig = " in page
    assert "\nFamilyConfig = " in config


def test_the_puzzle_on_the_page_is_the_one_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "zebra.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command, shown in re.findall(r"```console\n\$ insertlm (.*?)\n(.*?)```", page, re.DOTALL):
        assert main(command.split()) == 0
        assert capsys.readouterr().out == shown
        if clues := re.search(r"^clues  (.*)$", shown, re.MULTILINE):
            Path("puzzle.txt").write_text(clues[1], encoding="utf-8")
