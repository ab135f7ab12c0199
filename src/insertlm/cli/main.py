"""The command `insertlm`: reads the arguments and runs the command they name.

arguments.py declares what each command takes, and the modules beside it carry the commands out. Every mistake of a user
ends as one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from insertlm.cli.arguments import OVERRIDES, parser
from insertlm.core.errors import OUT_OF_MEMORY, InsertlmError, is_out_of_memory
from insertlm.core.files import place_and_reason
from insertlm.core.version import VERSION

__all__ = ["main"]

# OpenMP's threads spin while they wait; on a machine with other work that makes torch several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if sys.stdout is None:  # daemons may start us with it closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # stays open until we exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that a terminal cannot show is no reason to fail
    # Every expected failure becomes one line. Other exceptions are mistakes of ours and keep their traceback.
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here rather than at exit, so that a closed pipe is noticed in this `try`
    except InsertlmError as error:
        return _complain(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; the work may be unfinished
        # Python flushes once more at exit; this keeps it from complaining about the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("insertlm: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        return _complain(place_and_reason(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _complain(OUT_OF_MEMORY)
    return 0


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["lm-eval"]:  # all that follows is for lm_eval to read, --help too
        from insertlm.cli.lm_eval import lm_eval

        lm_eval(arguments[1:])
        return
    plain, overrides = _split_off_overrides(arguments)
    parsed, rest = _parse(plain)
    if parsed.version:
        print(f"insertlm {VERSION}")
        return
    if parsed.command is None:
        raise InsertlmError(f"expected a command, one of {', '.join(_commands())}; see insertlm --help")
    _refuse_unknown(parsed, rest, overrides)
    parsed.overrides, parsed.line = overrides, shlex.join(["insertlm", *arguments])
    from insertlm.cli import commands  # slow to import; help and mistakes do not need it

    getattr(commands, parsed.function)(parsed)


def _commands() -> list[str]:
    return [name for name in OVERRIDES if " " not in name]


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """`evaluate nll FILE` is a command of two words; `evaluate RUN` is not."""
    words = " ".join(arguments[:2])
    # argparse has no commands of two words, so both words are passed to it as one.
    if len(arguments) < 2 or words not in OVERRIDES:
        try:
            return parser().parse_known_args(arguments)
        except InsertlmError as error:
            raise InsertlmError(f"{error}{_dash_hint(arguments) if 'required: TEXT' in str(error) else ''}") from error
    try:
        return parser().parse_known_args([words, *arguments[2:]])
    except InsertlmError as error:
        name = Path(arguments[1])
        if not (name / "recipe.yaml").is_file():
            raise
        raise InsertlmError(f"{error}; for the run folder of that name: insertlm evaluate ./{name}") from error


def _refuse_unknown(parsed: argparse.Namespace, rest: Sequence[str], overrides: Sequence[tuple[str, str]]) -> None:
    command = parsed.command
    sections = getattr(parsed, "sections", OVERRIDES[command])
    if rest:
        section = rest[0].removeprefix("--").partition("=")[0]
        hint = f"expected --{section}.KEY VALUE" if section in sections else f"see insertlm {command} --help"
        raise InsertlmError(f"unknown argument {rest[0]}; {hint}")
    for key, _ in overrides:
        if key.partition(".")[0] not in sections:
            known = " or ".join(f"--{section}.KEY" for section in sections)
            hint = f"expected {known}" if known else f"see insertlm {command} --help"
            raise InsertlmError(f"unknown argument --{key}; {hint}")


def _split_off_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take out `--section.key value` and `--section.key=value`, which argparse does not know one by one. What follows
    `--` stays as it is, and so does a text such as "--Well. ___", which is no name of a key."""
    plain: list[str] = []
    overrides: list[tuple[str, str]] = []
    queue = deque(arguments)
    while queue:
        argument = queue.popleft()
        if argument == "--":
            return [*plain, argument, *queue], overrides
        name, equals, value = argument.partition("=")
        if not re.fullmatch(r"--\w[^\s.]*\.\S*", name):
            plain.append(argument)
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise InsertlmError(f"{name}: expected a value, as in {name} VALUE{_dash_hint(arguments)}")
            value = queue.popleft()
        overrides.append((name[2:], value))
    return plain, overrides


def _dash_hint(arguments: Sequence[str]) -> str:
    """For a text that was taken for an option."""
    dashed = any(argument.startswith("-") for argument in arguments[1:])
    return "; write -- before a text that begins with a dash" if arguments[0] == "infill" and dashed else ""


def _complain(message: str) -> int:
    if (
        os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
    ):  # under torchrun only one process complains
        print("insertlm:", " ".join(message.splitlines()), file=sys.stderr)
    return 2
