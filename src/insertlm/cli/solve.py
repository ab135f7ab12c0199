"""The command `solve`: zebra puzzles by deduction and sudokus by search, without a model."""

from __future__ import annotations

import re
import sys
from argparse import Namespace

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["solve"]

_CLUES = re.compile(r"LHS|RHS|CLUE_END|houses")  # what no grid has


def solve(args: Namespace) -> None:
    try:
        text = (sys.stdin.buffer.read() if str(args.file) == "-" else args.file.read_bytes()).decode()
    except OSError as error:
        raise InsertlmError(f"{args.file}: cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise InsertlmError(f"{args.file}: is not text; expected clues or a grid") from error
    # All that reads or solves a puzzle raises an InsertlmError that names what is wrong with it.
    if re.search(r"[\d.]", text) and not _CLUES.search(text):
        _solve_sudoku(text)
    else:
        _solve_zebra(text)


def _solve_sudoku(text: str) -> None:
    from insertlm.tasks.sudoku import grid_text, read_grid, solve

    print(grid_text(solve(read_grid(text))))


def _solve_zebra(text: str) -> None:
    from insertlm.tasks.zebra.clues import SIDE, name, read
    from insertlm.tasks.zebra.solver import solve
    from insertlm.tasks.zebra.task import table

    street = read(text)
    found = solve(street)
    triples = [(cell // SIDE, house, cell % SIDE) for cell, house in found]
    print(f"{table(street, triples)}\n")
    print("order ", ", ".join(f"{name(cell)} in {house}" for cell, house in found))
    print("target", " ".join(str(number) for triple in triples for number in triple))
