"""Figures become files of the format asked for, and matplotlib is only needed to draw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.plots import (
    Curve,
    Result,
    Stage,
    accuracy_figure,
    graph_figure,
    puzzle_figure,
    save,
    training_figure,
    trajectory_figure,
)
from insertlm.tasks.zebra.clues import Clue, Street

EDGES = [(1, 2), (2, 3), (3, 4), (2, 5), (6, 2)]


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_save_writes_the_format_of_the_suffix(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"figure{suffix}"
    save(graph_figure(EDGES, 1, 4), path)
    assert path.read_bytes().startswith(start)


def test_save_takes_a_string(tmp_path: Path) -> None:
    save(trajectory_figure([], str), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.bmp", "unknown suffix '.bmp'; expected .png, .svg, .pdf"),
        ("a", "unknown suffix ''; expected .png, .svg, .pdf"),
        ("missing/a.png", "there is no folder {0}/missing"),
        ("file/a.svg", "there is no folder {0}/file"),
    ],
)
def test_what_cannot_be_saved_is_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InsertlmError) as caught:
        save(graph_figure(EDGES, 1, 4), tmp_path / name)
    assert str(caught.value) == f"cannot write {tmp_path / name}: {reason.format(tmp_path)}"


# --- Without matplotlib


@pytest.mark.parametrize(
    "draw",
    [
        lambda: trajectory_figure([], str),
        lambda: graph_figure(EDGES, 1, 4),
        lambda: training_figure([Curve("ILM", [Stage("run", [1], [2])])], "", over_steps=False),
        lambda: puzzle_figure(Street(3, 3, [Clue(0, (0, 6))]), [], [(0, 0, 0)]),
        lambda: accuracy_figure([Result("ILM", 50.0, 10, {})], ""),
    ],
)
def test_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], object]) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InsertlmError) as caught:
        draw()
    assert str(caught.value) == "plots need matplotlib: pip install 'insertlm[plot]'"


def test_import_does_not_load_matplotlib() -> None:
    check = "import sys, insertlm.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
