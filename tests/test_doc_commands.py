"""Every command and every piece of Python in README.md and docs/ is run, or the tables here say why it is not.

The blocks of a page run in order, in a folder that has what the page speaks of. Long ones are shortened, see SHORTER
and LONGER. What is not run must still be right as far as that can be told: the real parser takes it, and recipes,
scripts and extras that it names exist. So must commands within sentences and tables.
"""

from __future__ import annotations

import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import insertlm
from insertlm.cli import main as cli
from insertlm.cli.arguments import OVERRIDES
from insertlm.core.errors import InsertlmError
from insertlm.recipe import build_family, load_recipe, parse_recipe, to_yaml
from insertlm.text.subwords import train_bpe

ROOT = Path(__file__).parents[1]
# The log tells what was: its commands need not work any more.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"),
]
STORIES = [
    f"The {animal} number {i} sat on the mat. It was a very fine day for it. Then it went home again."
    for i in range(30)
    for animal in ("cat", "dog")
]

# Blocks that other tests run, with what they print.
ELSEWHERE = {
    ("README.md", "python"): "test_readme.py",
    ("adding-a-family.md", "python"): "test_docs.py",
    ("adding-a-task.md", "python"): "test_docs.py",
    ("zebra.md", "console"): "test_docs.py",
}

# Commands that are only parsed, and why.
ONLY_PARSED = {
    r"make demo": "installs; what it then runs is in test_readme.py",
    r"make test": "this is part of it",
    r"pip install": "installs",
    r".*--push ": "needs the Hub; tests/release/test_hub.py runs it against a stand-in",
    r".*--model me/stories": "needs the Hub; tests/release/test_hub.py runs it against a stand-in",
    r"insertlm evaluate (infilling|judge|nll) ": "needs a model of billions of parameters; tests/evaluation runs it",
    r"insertlm lm-eval ": "needs tasks of the Hub; tests/cli/test_lm_eval.py has its own",
    r"insertlm serve": "runs until it is stopped; the server has tests of its own",
    r"curl ": "asks a server that does not run here; the server has tests of its own",
    r"insertlm train recipes/english/": "needs a pretrained model; tests/training has tiny ones",
    r"insertlm (evaluate likelihood|infill .*--model) (runs/mine|english)": "what recipes/english would have trained",
    r"insertlm train recipes/stories/": "needs data sets from the Hub; tests/corpus reads local ones",
    r"(export INSERTLM_CACHE=|head=|srun |trap |wait )": "part of a batch script, which needs Slurm",
    r"torchrun ": "needs several devices; training has tests of its own",
}
# Pages whose Python is only compiled, and why.
ONLY_COMPILED = {
    "serving.md": "asks a server that does not run here; the server has tests of its own",
    "scaling.md": "needs several devices; training has tests of its own",
}

# Numbers for which a test has no time, and what takes their place.
SHORTER = [(r"--count \d{3,}", "--count 3"), (r"--size \d+", "--size 300")]
# What is added to commands that begin so.
SMALL = (
    "--train.steps 2 --train.batch_size 4 --train.validate_every 2 --model.preset mini --model.layers 1 "
    "--model.width 16 --model.heads 2 --model.hidden 16 --decode.max_steps 4"
)
LONGER = {
    r"insertlm train recipes/(star|zebra|sudoku)": f"{SMALL} --task.train 40 --task.validation 4",
    r"insertlm train ": SMALL,
    r"insertlm evaluate runs/": "--count 4 --decode.max_steps 4",
}


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """What stands between fences."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {"bash": "console", "sh": "console", "shell": "console", "py": "python"}
    return [Block(page.name, names.get(language, language), text) for language, text in found]


def commands(text: str) -> list[str]:
    """Of a block: the lines behind `$`, or all if there is none. A backslash joins a line to the next."""
    lines = text.replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
    return [line for each in typed if (line := " ".join(each.partition(" #")[0].split()))]


def shown(text: str) -> str | None:
    """What a block says that its one command prints, or None if it does not say."""
    first, _, rest = text.partition("\n")
    return rest if first.startswith("$ ") and rest and "$ " not in rest else None


def outputs(page: Path) -> dict[str, str]:
    """Blocks of Python, and the text below them that says what they print."""
    return dict(re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page.read_text("utf-8"), re.M | re.S))


def mentioned(page: Path) -> list[str]:
    """Commands outside of fences: on lines of their own, or in a sentence."""
    rest = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    alone = re.findall(r"^    ((?:insertlm|python|make|pip) .*)$", rest, re.MULTILINE)
    within = re.findall(r"`((?:insertlm|python|make|pip) [^`]*)`", rest.replace("\n", " "))
    return [command for line in [*alone, *within] for command in commands(line)]


def reason_not_to_run(command: str) -> str | None:
    return next((reason for start, reason in ONLY_PARSED.items() if re.match(start, command)), None)


# --- What is not run


def check(command: str) -> None:
    """All that can be told of a command without running it."""
    program, *arguments = shlex.split(command)
    if program == "insertlm":
        check_insertlm(arguments)
    elif program == "python":
        check_python(arguments)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {extra for each in re.findall(r"\[(.*?)\]", command) for extra in each.split(",")} <= extras.keys()


def check_insertlm(arguments: list[str]) -> None:
    arguments = list(takewhile(lambda word: word not in ("<", ">", "|"), arguments))  # the rest is the shell's
    if arguments[0] == "lm-eval":  # the rest is for lm_eval to read
        return
    plain, overrides = cli._split_off_overrides(arguments)
    try:
        parsed, rest = cli._parse(plain)
    except InsertlmError as error:  # the name of a command is fine
        assert "arguments are required" in str(error) and " ".join(plain) in OVERRIDES, error
        return
    cli._refuse_unknown(parsed, rest, overrides)
    if parsed.command == "train" and parsed.recipe.parts[0] == "recipes":
        load_recipe(ROOT / parsed.recipe, overrides)


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert (ROOT / "src" / Path(*arguments[1].split("."))).with_suffix(".py").is_file()
        return
    shared = ROOT / "benchmarks" / "common.py"
    script = "".join(path.read_text(encoding="utf-8") for path in (ROOT / arguments[0], shared))
    assert all(f'"{option}"' in script for option in arguments if option.startswith("--"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mentioned_commands_are_right(page: Path) -> None:
    for command in mentioned(page):
        check(command)


# --- What is run


def save_untrained(folder: Path, tree: dict[str, Any]) -> None:
    """A model of this recipe, in the form of a released one."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = parse_recipe(tree, "test")
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    save_file(build_family(recipe).state_dict(), folder / "model.safetensors")


def save_model(folder: Path, family: str = "ilm") -> None:
    """A model of text."""
    folder.mkdir(parents=True)
    train_bpe(STORIES, 300).save(folder / "tokenizer.json")
    tree = {
        "task": {"name": "text", "train": "a.jsonl", "tokenizer": str(folder / "tokenizer.json"), "block": 150},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "max_length": 160},
        "family": {"name": family, **({"block": 150} if family == "mdm" else {})},
        "train": {"steps": 2},
        "decode": {"max_steps": 6},
    }
    save_untrained(folder, tree)


def save_texts(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    as_json = path.name.partition(".")[2].startswith("jsonl")
    data = "".join(f"{json.dumps({'text': story}) if as_json else story}\n" for story in STORIES).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


# What pages speak of and do not make themselves.
GIVEN: dict[str, dict[str, Callable[[Path], object]]] = {
    "README.md": {"runs/stories_small-ilm": save_model},
    "text.md": {"MY_STORIES.txt": save_texts},
    "infilling.md": {
        "MODEL": save_model,
        "MDM": lambda folder: save_model(folder, "mdm"),
        "runs/stories_small-ilm": save_model,
        "story.txt": lambda path: path.write_text("Lily found ___.\n"),
        "lm1b-test.txt": save_texts,
        "tinystories-test.jsonl": save_texts,
    },
    "export.md": {"runs/stories_small-ilm": save_model},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout, as far as commands see it, and caches of its own."""
    for folder in ("recipes", "docs", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, modules = [*sys.path], {*sys.modules}
    yield tmp_path
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def shortened(command: str) -> str:
    for pattern, instead in SHORTER:
        command = re.sub(pattern, instead, command)
    more = next((more for start, more in LONGER.items() if re.match(start, command)), "")
    return f"{command} {more}".strip()


def run(command: str, place: Path) -> None:
    """In this process if it is ours and plain, which saves seconds; else in a shell that knows `insertlm`."""
    if command.startswith("insertlm ") and not set("|&;<>*") & set(re.sub(r"\".*?\"", "", command)):
        assert cli.main(shlex.split(command)[1:]) == 0, command
        return
    shim = place / "bin" / "insertlm"
    shim.parent.mkdir(exist_ok=True)
    source = shlex.quote(str(Path(insertlm.__file__).parents[1]))
    shim.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {shlex.quote(sys.executable)} -m insertlm "$@"\n')
    shim.chmod(0o755)
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"PATH={shlex.quote(str(shim.parent))}:$PATH; {command}"],
        check=True,
        timeout=100,
        stdout=subprocess.DEVNULL,
    )


def run_block(block: Block, place: Path, names: dict[str, Any]) -> None:
    """names: what the page's Python has defined so far"""
    if (block.page, block.language) in ELSEWHERE:
        return
    if block.language == "python":
        code = compile(block.text, block.page, "exec")
        if block.page not in ONLY_COMPILED:
            exec(code, names)
    elif block.language == "console":
        for command in commands(block.text):
            if reason_not_to_run(command):
                check(command)
            else:
                run(shortened(command), place)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    for name, make in GIVEN.get(page.name, {}).items():
        make(place / name)
    names: dict[str, Any] = {"insertlm": insertlm}
    for block in blocks(page):
        run_block(block, place, names)
        out, err = capsys.readouterr()
        assert "insertlm: text " not in err or "--model" in block.text, "an example ran into a limit"
        if block.language == "python" and (page.name, "python") not in ELSEWHERE:
            printed = out.splitlines()
            assert {*re.findall(r"^print\(.*\)  # (\d[\d ]*)$", block.text, re.MULTILINE)} <= {*printed}
            check_output(out, outputs(page).get(block.text))
        elif block.text.startswith("$ insertlm infill "):
            check_output(out, shown(block.text))


def check_output(printed: str, expected: str | None) -> None:
    """Against what a page shows. Where english is written in bfloat16 its tokens are those of CPUs like the one that it
    was written on; on others only that there is an output can be told."""
    if expected is None:
        return
    assert printed.strip()
    if torch.cpu.get_capabilities().get("amx_bf16"):
        assert printed == expected, "run: python docs/fill_examples.py"


# --- The tests themselves


def test_commands_are_found() -> None:
    assert commands("$ a b  # why\noutput\n$ c \\\n  d\n") == ["a b", "c d"]
    assert commands("make demo    # installs\n\nmake test\n") == ["make demo", "make test"]
    assert shown("$ a\nb\nc\n") == "b\nc\n" and shown("a\nb\n") is None and shown("$ a\n") is None
    counted = {page.name: sum(len(commands(b.text)) for b in blocks(page) if b.language == "console") for page in PAGES}
    assert counted["README.md"] >= 8 and counted["infilling.md"] >= 10 and counted["text.md"] == 5
    assert sum(len(mentioned(page)) for page in PAGES) >= 30


@pytest.mark.parametrize(
    "wrong",
    [
        "insertlm trian recipes/star_cpu/ilm.yaml",
        "insertlm train recipes/star_cpu/ilm.yaml --train.stpes 3",
        "insertlm train recipes/star_cpu/none.yaml",
        "insertlm evaluate nll a.txt --evalautor b",
        "insertlm evaluate frontier --sweep x",
        "python benchmarks/none.py",
        "python benchmarks/generation.py --no-such-option",
        "python -m insertlm.none",
        "make nothing",
        "pip install insertlm[none]",
    ],
)
def test_wrong_commands_are_noticed(wrong: str) -> None:
    with pytest.raises((InsertlmError, AssertionError, OSError)):
        check(wrong)


def test_shells_fail_loudly(place: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run("cat no-such-file | wc", place)
    assert shutil.which("bash")
