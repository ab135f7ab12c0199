"""`insertlm train | evaluate | generate | data | plot`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from insertlm.errors import InsertlmError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input: one line on stderr, exit code 2."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    try:
        if rest and known.command != "train":
            raise InsertlmError(f"unknown argument {rest[0]}; see insertlm {known.command} --help")
        known.run_command(known, rest)
    except InsertlmError as error:
        print(f"insertlm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("insertlm: interrupted", file=sys.stderr)
        return 130
    return 0
