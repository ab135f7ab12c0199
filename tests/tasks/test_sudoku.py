"""Sudoku: puzzles are what the task promises, the splits never meet, and bad grids are refused in one line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from commanding import output

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.tasks import sudoku
from insertlm.tasks.base import SPLITS, Example
from insertlm.tasks.sudoku import CELLS, Sudoku, grid_text, read_grid, solve, split_of

pytest.importorskip("numba")
TASK = Sudoku()
GRID = """
53. .7. ...
6.. 195 ...
.98 ... .6.
8.. .6. ..3
4.. 8.3 ..1
7.. .2. ..6
.6. ... 28.
... 419 ..5
... .8. .79
"""
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


PEERS = [
    [
        other
        for other in range(81)
        if other != cell
        and (
            other // 9 == cell // 9
            or other % 9 == cell % 9
            or (other // 27, other % 9 // 3) == (cell // 27, cell % 9 // 3)
        )
    ]
    for cell in range(81)
]


def solutions(cells: Sequence[int], most: int = 2) -> list[list[int]]:
    """Up to `most` solutions, found independently: by sets of cells' names, without bits and without an order."""
    options: dict[int, set[int]] = {}
    for cell, digit in enumerate(cells):
        taken = {cells[peer] for peer in PEERS[cell]}
        if digit in taken - {0}:
            return []
        if not digit:
            options[cell] = {*range(1, 10)} - taken
    if not options:
        return [list(cells)]
    cell = min(options, key=lambda cell: len(options[cell]))
    found: list[list[int]] = []
    for digit in options[cell]:
        found += solutions([*cells[:cell], digit, *cells[cell + 1 :]], most - len(found))
        if len(found) >= most:
            break
    return found


def cells_of(ids: Sequence[int]) -> list[int]:
    """A grid from the words of a text."""
    words = TASK.tokenizer.decode(list(ids)).split()
    grid = [0] * 81
    for name, digit in zip(words[::2], words[1::2], strict=True):
        grid[CELLS.index(name)] = int(digit)
    return grid


def test_a_puzzle_has_one_solution_and_no_redundant_digit() -> None:
    for split in SPLITS:
        for prefix, target in TASK.examples(split, 1, seed=5):
            given = cells_of(prefix)
            assert solutions(given) == [cells_of(target)]
            for cell in range(81):
                if given[cell]:
                    assert len(solutions([*given[:cell], 0, *given[cell + 1 :]])) == 2


def test_texts_are_cells_and_digits_in_reading_order() -> None:
    for prefix, target in TASK.examples("train", 20, seed=5):
        assert target[::2] == [*range(81)]
        assert prefix[::2] == sorted(prefix[::2]) and {*zip(prefix[::2], prefix[1::2], strict=True)} < {
            *zip(target[::2], target[1::2], strict=True)
        }
        assert 17 <= len(prefix) // 2 <= 40
    words = TASK.tokenizer.decode(TASK.parse_prompt(GRID)).split()
    assert words[:6] == ["a1", "5", "a2", "3", "a5", "7"] and words[-2:] == ["i9", "9"]


def test_more_givens_are_left_where_a_recipe_says_so() -> None:
    counts = [len(prefix) // 2 for prefix, _ in Sudoku(min_givens=40).examples("train", 20, seed=5)]
    assert counts == [40] * 20


def exchanged(grid: Sequence[int], random: Random) -> list[int]:
    """The same grid in disguise."""

    def lines() -> list[int]:
        return [3 * band + line for band in random.sample(range(3), 3) for line in random.sample(range(3), 3)]

    digits, rows, columns = random.sample(range(1, 10), 9), lines(), lines()
    table = np.array(digits)[np.array(grid).reshape(9, 9) - 1][rows][:, columns]
    return [int(digit) for digit in (table.T if random.random() < 0.5 else table).ravel()]


def test_a_grid_in_disguise_belongs_to_the_same_split() -> None:
    random = Random(3)
    for split in SPLITS:
        for example in TASK.examples(split, 20, seed=random.randrange(2**40)):
            grid = cells_of(example.target)
            assert {split_of(np.array(exchanged(grid, random))) for _ in range(5)} == {split}


def test_splits_are_cut_as_they_should_be() -> None:
    """Eight tenths, one and one of fresh grids: the hash tells grids apart."""
    rng = np.random.default_rng(0)
    free, grid, found = np.full(81, sudoku.ALL), np.zeros(81, np.int64), []
    sudoku._compile()
    for _ in range(2000):
        ranks = rng.permuted(np.tile(np.arange(9), (81, 1)), axis=1)
        assert sudoku._search(free, ranks, grid)
        found.append(split_of(grid))
    shares = [found.count(split) / 2000 for split in SPLITS]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.03)


def test_more_examples_begin_with_the_same_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path))
    few = list(Sudoku(seed=9).examples("test", 5))
    many = list(Sudoku(seed=9).examples("test", 100))  # from the cache, which has too few, and so anew
    assert many[:5] == few == list(Sudoku(seed=9).examples("test", 5))
    assert len({tuple(example.target) for example in many}) == 100


def test_puzzles_are_the_same_in_every_version() -> None:
    [example] = Sudoku().examples("test", 1, 1)
    assert "".join(map(str, cells_of(example.target))).startswith("752486139431579826968231457")


def test_making_is_fast() -> None:
    TASK.examples("train", 1, seed=1)
    start = time.process_time()
    TASK.examples("train", 1000, seed=1)
    assert 1000 / (time.process_time() - start) > 300  # 1,400 on a core of its own


def test_a_text_is_scored_by_its_cells() -> None:
    [example] = TASK.examples("test", 1, 1)
    prefix, target = example
    key = f"sequence_accuracy_{len(prefix) // 2}_givens"
    pairs = [target[i : i + 2] for i in range(0, 162, 2)]
    backwards = [token for pair in pairs[::-1] for token in pair]
    right = {"sequence_accuracy": 1.0, "token_accuracy": 1.0, key: 1.0}
    assert TASK.scores(example, target) == TASK.scores(example, backwards) == right
    empty = [i for i, (cell, _) in enumerate(pairs) if cell not in prefix[::2]]
    wrong = [*target]
    wrong[2 * empty[0] + 1] = 81 + (wrong[2 * empty[0] + 1] - 81 + 1) % 9
    assert TASK.scores(example, wrong) == {
        "sequence_accuracy": 0.0,
        "token_accuracy": 1 - 1 / len(empty),
        key: 0.0,
    }
    # A digit and another one in the same cell is a guess that counts as wrong.
    assert TASK.scores(example, [*target, *wrong[2 * empty[0] :][:2]])["token_accuracy"] == 1 - 1 / len(empty)
    for broken in ([], target[:-1], [*target, 3], target[1:]):
        assert TASK.scores(example, broken)["sequence_accuracy"] == 0.0


def test_grids_are_read_and_shown() -> None:
    assert "".join(map(str, solve(read_grid(GRID)))) == SOLUTION
    assert grid_text(read_grid(GRID)) == GRID.strip()
    fancy = GRID.replace(" ", "|").replace(".", "0").replace("8..", "---+---+---\n8..")
    assert (read_grid(fancy) == read_grid(GRID)).all()
    assert (read_grid(TASK.tokenizer.decode(TASK.parse_prompt(GRID))) == read_grid(GRID)).all()
    example = Example(TASK.parse_prompt(GRID), [])
    assert TASK.render(example).startswith(GRID.strip())
    assert TASK.parse_prompt(SOLUTION)[::2] == [*range(81)]


def test_one_grid_is_solved_without_numba() -> None:
    code = f"""
import sys
sys.modules["numba"] = None
from insertlm.tasks.sudoku import Sudoku, read_grid, solve
print(*solve(read_grid({GRID!r})), sep="")
Sudoku().examples("train", 1, seed=1)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{SOLUTION}\n"
    assert "sudokus are made with numba: pip install 'insertlm[zebra]'" in done.stderr


WRONG = {
    GRID.strip()[:-1]: "no sudoku: a grid of 80 cells; expected 81",
    GRID + "4": "no sudoku: a grid of 82 cells; expected 81",
    GRID.replace("6.. 195", "6.x 195"): "unknown character 'x' in cell b3; expected 1 … 9, or . for an empty cell",
    GRID + "x": "unknown character 'x' in cell 82; expected 1 … 9, or . for an empty cell",
    GRID.replace("53.", "535"): "no solution: 5 stands 2 times in row a (a1 and a3)",
    GRID.replace("7.. .2.", "6.. .2."): "no solution: 6 stands 2 times in row f (f1 and f9)",
    GRID.replace("6.. 195", "6.5 195"): "no solution: 5 stands 2 times in row b (b3 and b6)",
    GRID.replace(".98 ...", "5.8 ..."): "no solution: 5 stands 2 times in column 1 (a1 and c1)",
    GRID.replace(".98 ... .6.", ".93 ... .6."): "no solution: 3 stands 2 times in the box of a1 (a2 and c3)",
    GRID.replace("53. .7.", "532 .7."): "no solution: the 31 given digits contradict each other",
    GRID.replace("53. .7.", "... ...").replace("6.. 195", "... ..."): "several solutions: cell a1 can be ",
    "." * 81: "several solutions: cell a1 can be 1 or 2",
    "a1 5 a2": "no sudoku: expected a cell, a1 … i9, and its digit, got 'a2'",
    "a1 5 j2 3": "no sudoku: expected a cell, a1 … i9, and its digit, got 'j2 3'",
    "a1 5 a2 12": "no sudoku: expected a cell, a1 … i9, and its digit, got 'a2 12'",
    "a1 5 a1 5": "no sudoku: cell a1 is given 2 times",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_grid_that_is_no_sudoku_is_refused_in_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InsertlmError) as refused:
        TASK.parse_prompt(text)
    assert str(refused.value).startswith(WRONG[text])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["solve", "-"]) == 2
    assert capsys.readouterr() == ("", f"insertlm: {refused.value}\n")


def test_the_command_line_solves_a_grid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GRID.encode())))
    assert output(capsys, "solve", "-") == grid_text(read_grid(SOLUTION)) + "\n"


SMALL = (
    "--task.train 40 --task.validation 2 --task.test 4 --model.layers 1 --model.width 16 --model.heads 2 "
    "--model.hidden 16 --train.steps 2 --train.batch_size 4 --train.validate_every 2"
)


@pytest.mark.parametrize("family", ["ilm", "arm", "mdm", "it"])
def test_every_family_learns_it_and_is_scored_by_the_givens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path))
    monkeypatch.setattr(sudoku, "CHUNK", 8)
    run = str(tmp_path / "run")
    recipe = Path(__file__).parents[2] / "recipes" / "sudoku" / f"{family}.yaml"
    output(capsys, "train", str(recipe), "--run", run, "--device", "cpu", *SMALL.split())
    output(capsys, "evaluate", run, "--device", "cpu", "--count", "3")
    record = json.loads((tmp_path / "run" / "evaluation-test.json").read_text(encoding="utf-8"))
    assert record["count"] == 3
    assert any(re.fullmatch(r"sequence_accuracy_2\d_givens", key) for key in record)
