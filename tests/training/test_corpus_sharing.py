"""Processes of a run tokenise its corpus together, and the store is the one of a single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from killing import stored

from insertlm.cli.main import main
from insertlm.data import sources
from insertlm.tasks import text
from insertlm.text.subwords import train_bpe

Commands = Callable[[Sequence[str], dict[str, str]], Any]
Launch = Callable[[int], list[dict[str, str]]]
STORIES = [f"The {animal} number {i} sat on the mat." for i in range(150) for animal in ("cat", "dog")]

# What torchrun starts: insertlm with small pieces that take a while and are noted, and a first life that may be short.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from insertlm.cli.main import main
from insertlm.data import sources
from insertlm.data import tokenising
from killing import slow_down

sources.PIECE_BYTES, sources.PIECE_ROWS, tokenising._CHUNK = 2000, 40, 1000
slow_down(0.03)
plain, made = tokenising.PieceFolder.write, Path(sys.argv[1])
shorter = int(sys.argv[2]) if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 999

def write(self, part, number, *what):
    global shorter
    shorter -= 1
    if shorter < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, part, number, *what)
    with made.open("a") as file:
        file.write(f"{os.environ['RANK']} {part} {number}\\n")

tokenising.PieceFolder.write = write
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Two steps of training on two files and a data set of two shards."""
    for name in ("a.jsonl", "b.jsonl", "set/train-0.jsonl", "set/train-1.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES) + "\n")
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{\n")
    train_bpe(STORIES, 290).save(tmp_path / "tokenizer.json")
    tree = {
        "task": {
            "name": "text",
            "train": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), f"hub:{tmp_path / 'set'}:train"],
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "block": 24,
        },
        "model": {"layers": 1, "width": 8, "heads": 2, "hidden": 8},
        "train": {"steps": 2, "batch_size": 4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return ["train", str(tmp_path / "recipe.yaml"), "--run", str(tmp_path / "run"), "--device", "cpu"]


@pytest.fixture
def alone(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The store of one process, whose pieces have the usual size."""
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "alone"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert main([*command[:2], "--run", str(tmp_path / "run-alone"), *command[4:]]) == 0
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # no processes of a process's own
    text._open.cache_clear()  # forked processes would find it open
    return stored(tmp_path / "alone")


@pytest.mark.parametrize("life", [999, 3], ids=["undisturbed", "killed"])
def test_started_by_torchrun(command: list[str], alone: dict[str, bytes], tmp_path: Path, life: int) -> None:
    """No piece is made twice, be it that a process was killed and all were started again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [
            *torchrun,
            "--max-restarts",
            "1",
            "--",
            str(tmp_path / "script.py"),
            str(tmp_path / "made"),
            str(life),
            *command,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert stored(tmp_path / "cache") == alone
    lines = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert {rank for rank, *_ in lines} == {"0", "1"}
    pieces = [(part, number) for _, part, number in lines]
    assert len(set(pieces)) == len(pieces) > 20
    assert ended.stderr.count("tokenised 1,200 documents") == 1
    assert ended.stderr.count("1 lines hold no document: ") == 1
    assert not list((tmp_path / "cache").glob(".*"))


def test_nodes_without_a_common_cache_have_a_store_each(
    command: list[str], alone: dict[str, bytes], tmp_path: Path, commands: Commands, launch: Launch
) -> None:
    caches = [tmp_path / f"node-{rank}" for rank in range(2)]
    started = [
        commands(command, {**variables, "INSERTLM_CACHE": str(cache)})
        for variables, cache in zip(launch(2), caches, strict=True)
    ]
    assert [each.end()[0] for each in started] == [0, 0]
    assert [stored(cache) for cache in caches] == [alone, alone]


@pytest.mark.parametrize("content", ["{\n" * 500, None])
def test_a_mistake_in_the_corpus_is_said_once(
    command: list[str],
    tmp_path: Path,
    commands: Commands,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
) -> None:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "PIECE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    started = [commands([*command, "--task.train", str(path)], variables) for variables in launch(2)]
    ends = [each.end() for each in started]
    assert [code for code, _ in ends] == [2, 2]
    [[line], []] = [lines for _, lines in ends]
    assert line.startswith(f"insertlm: {path}: no {'such file' if content is None else 'usable document'}")
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
