"""The command `solve`: zebra puzzles by deduction and sudokus by search, without a model."""

from __future__ import annotations

import re
from argparse import Namespace

from insertlm.cli.common import standard_input
from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["solve"]

_CLUES = re.compile(r"LHS|RHS|CLUE_END|houses")  # what no grid has
# A puzzle as `insertlm data zebra` prints it, of which only the size and the clues are read.
_PRINTED = re.compile(r"^(\d+ houses, \d+ attributes)\n(?:.*\n)*?clues  (.*)$", re.MULTILINE)


def solve(args: Namespace) -> None:
    try:
        text = (standard_input() if str(args.file) == "-" else args.file.read_bytes()).decode()
    except OSError as error:
        raise InsertlmError(f"{args.file}: cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise InsertlmError(f"{args.file}: is not text; expected clues or a grid") from error
    # All that reads or solves a puzzle raises an InsertlmError that names what is wrong with it.
    if re.search(r"[\d.]", text) and not _CLUES.search(text):
        print("\n\n".join(map(_solve_sudoku, _grids(text))))
    else:
        puzzles = [f"{size} {clues}" for size, clues in _PRINTED.findall(text)]
        print("\n\n".join(map(_solve_zebra, puzzles or [text])))


def _grids(text: str) -> list[str]:
    """The grids of what `insertlm data sudoku` prints, without their solutions; any other text is one grid."""
    blocks = [block for block in re.split(r"\n\s*\n", text.strip()) if re.search(r"[\d.]", block)]
    if any(len(re.findall(r"[\d.]", block)) != 81 for block in blocks):
        return [text]
    return [block for block in blocks if re.search(r"[.0]", block)] or [text]


def _solve_sudoku(text: str) -> str:
    from insertlm.tasks.sudoku import grid_text, read_grid, solve

    return grid_text(solve(read_grid(text)))


def _solve_zebra(text: str) -> str:
    from insertlm.tasks.zebra.clues import SIDE, name, read
    from insertlm.tasks.zebra.solver import solve
    from insertlm.tasks.zebra.task import table

    street = read(text)
    found = solve(street)
    triples = [(cell // SIDE, house, cell % SIDE) for cell, house in found]
    order = ", ".join(f"{name(cell)} in {house}" for cell, house in found)
    target = " ".join(str(number) for triple in triples for number in triple)
    return f"{table(street, triples)}\n\norder  {order}\ntarget {target}"
