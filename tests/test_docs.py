"""What the documentation shows must run, and the pages must make a site. Commands: see test_doc_commands.py."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from insertlm.cli.main import main
from insertlm.inference.settings import DecodeConfig

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
    every = runpy.run_path(str(DOCS.parent / "tests" / "families" / "test_all.py"))
    config, decode = module.TreeConfig(), DecodeConfig(parallel=0, max_steps=5, max_length=30)
    for model in (every["MODEL"], every["LLAMA"]):
        every["test_a_model_learns_writes_with_its_average_and_learns_on"](config, decode, model, "float32")
    every["test_seeds_of_more_than_32_bits_are_seeds_of_their_own"](config, decode)


def package_with(folder: Path, page: str, layer: str, name: str, union: str) -> Path:
    """A copy of the package with the first code of a page as a module, and the page's line in the registry."""
    package = folder / "src" / "insertlm"
    shutil.copytree(DOCS.parent / "src" / "insertlm", package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (package / layer / name).write_text(blocks(page)[0], encoding="utf-8")
    text = (DOCS / page).read_text(encoding="utf-8")
    [(line, kind)] = re.findall(rf"^    (from .*)\n    {union} = .*\| (\w+)$", text, re.MULTILINE)
    registry = package / layer / "registry.py"
    source, changed = re.subn(rf"^({union} = .*)$", rf"\1 | {kind}", registry.read_text(encoding="utf-8"), flags=re.M)
    assert changed == 1
    source, changed = re.subn(r"^(from __future__ .*)$", rf"\1\n{line}", source, flags=re.MULTILINE)
    assert changed == 1
    registry.write_text(source, encoding="utf-8")
    return package.parent


def run(folder: Path, sources: Path, *words: str) -> str:
    """What `insertlm` with these sources prints."""
    done = subprocess.run(
        [sys.executable, "-m", "insertlm", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(sources)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_family_added_on_the_page_is_trained_and_evaluated_by_the_command_line(tmp_path: Path) -> None:
    """In a copy of the package: its file, the line in the registry, the recipe, as the page has them."""
    sources = package_with(tmp_path, "adding-a-family.md", "families", "tree.py", "AnyFamily")
    page = (DOCS / "adding-a-family.md").read_text(encoding="utf-8")
    [source, name] = re.findall(r"Copy `(.*?)` to `(.*?)`", page)[0]
    recipe = yaml.safe_load((DOCS.parent / source).read_text(encoding="utf-8"))
    [changes] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for section, keys in yaml.safe_load(changes).items():
        recipe[section] |= keys
    place = tmp_path / Path(name).name
    place.write_text(yaml.safe_dump(recipe), encoding="utf-8")

    small = "--task.train 200 --task.validation 4 --task.test 4 --model.layers 1 --model.width 32 --model.heads 2"
    brief = "--model.hidden 32 --train.batch_size 8 --train.steps 4 --train.validate_every 2 --train.save_every 2"
    for command in (f"train {place} --run run {small} {brief}", "evaluate run --out result.json"):
        run(tmp_path, sources, *command.split())
    assert json.loads((tmp_path / "result.json").read_text())["decode"]["parallel"] == 0


def test_the_code_of_the_page_about_tasks_is_that_of_the_package() -> None:
    def text(place: str) -> str:
        return (DOCS.parent / place).read_text(encoding="utf-8")

    page = text("docs/adding-a-task.md")
    code, recipe = text("src/insertlm/tasks/sudoku.py"), text("recipes/sudoku/ilm.yaml")
    tests, registry = text("tests/tasks/test_sudoku.py"), text("src/insertlm/tasks/registry.py")
    *shown, tested = blocks("adding-a-task.md")
    assert len(shown) == 4 and all(block in code for block in shown)
    assert tested in tests
    assert all(block in recipe for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    lines = re.findall(r"^    ((?:from insertlm|AnyTask).*)$", page, re.MULTILINE)
    assert len(lines) == 2 and {*lines} <= {*registry.splitlines()}


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


def site() -> dict[str, Any]:
    settings = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    assert isinstance(settings, dict)
    return settings


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for page in entry.values():
            yield from pages_of(page) if isinstance(page, list) else [page]


def test_the_site_lists_every_page() -> None:
    listed = {*pages_of(site()["nav"])}
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {page for page in there if not page.startswith("log/")} == listed


def test_the_log_lists_every_day() -> None:
    """Newest first, each with the headings of its entries."""
    days = sorted((DOCS / "log").glob("*.md"), reverse=True)
    index = (DOCS / "log.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.*?)\]\(log/\1\.md\)$", index, re.MULTILINE) == [day.stem for day in days]
    for day in days:
        for entry in re.findall(r"^## .*? — (.*)$", day.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"- {entry}\n" in index


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links between pages, and to pictures and results, are looked up by mkdocs."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'insertlm[docs]'")
    settings = site()
    settings |= {"docs_dir": str(DOCS), "site_dir": str(tmp_path / "site")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "infilling.html").read_text(encoding="utf-8")
    assert "Filling in blanks" in page
    assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page), "pages must work offline"
