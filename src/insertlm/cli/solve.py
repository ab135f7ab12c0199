"""The command `solve`: zebra puzzles by deduction, without a model."""

from __future__ import annotations

import sys
from argparse import Namespace

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason

__all__ = ["solve"]


def solve(args: Namespace) -> None:
    from insertlm.tasks.zebra.clues import SIDE, name, read
    from insertlm.tasks.zebra.solver import solve as solve_street
    from insertlm.tasks.zebra.task import table

    try:
        text = (sys.stdin.buffer.read() if str(args.file) == "-" else args.file.read_bytes()).decode()
    except OSError as error:
        raise InsertlmError(f"{args.file}: cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise InsertlmError(f"{args.file}: is not text; expected clues") from error
    # Both raise an InsertlmError that names what is wrong with the puzzle.
    street = read(text)
    found = solve_street(street)
    triples = [(cell // SIDE, house, cell % SIDE) for cell, house in found]
    print(f"{table(street, triples)}\n")
    print("order ", ", ".join(f"{name(cell)} in {house}" for cell, house in found))
    print("target", " ".join(str(number) for triple in triples for number in triple))
