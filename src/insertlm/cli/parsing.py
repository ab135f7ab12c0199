"""How arguments are read: the types of their values, and a parser with the kinds of options that our commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from insertlm.core.errors import InsertlmError

__all__ = ["LENGTHS", "Parser", "folder", "one_of", "pattern", "sweep", "whole"]


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            # A pasted document should not fill the screen.
            shown = text if len(text) < 40 else f"{text[:39]}…"
            bound = f"at least {least}" if number < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number of {bound}, got {shown!r}")
        return number

    return parse


_COUNT, _SEED, _LENGTH = whole(1, 10**9), whole(0, (1 << 62) - 1), whole(0, 10**6)


def _lengths(text: str) -> int | list[int | None]:
    if "," not in text:
        return _LENGTH(text)
    return [_LENGTH(part) if part.strip() else None for part in text.split(",")]


LENGTHS: dict[str, Any] = {"type": _lengths, "metavar": "N"}


def folder(text: str) -> Path:
    if not text:  # such as a shell variable that is not set
        raise argparse.ArgumentTypeError("expected a folder, got an empty name")
    return Path(text)


def one_of(*known: str) -> Callable[[str], str]:
    # Instead of argparse's `choices`, for an error message in the form of all others.
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
        return text

    return parse


def sweep(text: str) -> tuple[str, list[str]]:
    key, _, values = text.partition("=")
    if not key or not all(listed := values.split(",")):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE,VALUE,… such as temperature=0.6,0.8,1, got {text!r}")
    return key.removeprefix("decode."), listed  # as --sweep decode.temperature=… would be typed, too


def pattern(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not (field and equals):
        raise argparse.ArgumentTypeError(f"expected FIELD=PATTERN such as source=wiki*, got {text!r}")
    return field, value


class Parser(argparse.ArgumentParser):
    """With the kinds of options that our commands have. The help of an option ends with its default, if it has one."""

    def error(self, message: str) -> NoReturn:
        """Raise one line instead of printing the usage, as argparse would."""
        raise InsertlmError(message)

    def option(self, name: str, about: str, default: object = None, **more: Any) -> None:
        shown = "" if default is None else f" (default: {default})"
        self.add_argument(name, default=default, help=f"{about}{shown}", **more)

    def number(
        self, name: str, about: str, default: Any = None, kind: Callable[[str], int] = _COUNT, **more: Any
    ) -> None:
        self.option(name, about, default, type=kind, metavar="N", **more)

    def seed(self, about: str, default: int = 0) -> None:
        self.number("--seed", f"seed of {about}", default, _SEED)

    def file(self, name: str, about: str, **more: Any) -> None:
        self.add_argument(name, type=Path, help=about, **{"metavar": "FILE", **more})

    def flag(self, name: str, about: str) -> None:
        self.add_argument(name, action="store_true", help=about)

    def device(self) -> None:
        self.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")

    def checkpoint(self) -> None:
        self.option(
            "--checkpoint", "of a run: last, best (the one that validated best) or a step", "last", metavar="WHICH"
        )

    def split(self) -> None:
        self.option("--split", "train, validation or test", "test", type=one_of("train", "validation", "test"))
