"""Checks of what Python users pass: whatever the type of a mistake, it is told in one line."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from insertlm.core.errors import InsertlmError

__all__ = ["as_whole", "check_flag", "check_text", "listed", "shown", "whole_number"]


def as_whole(value: object) -> int | None:
    """The value as an int, if it is a whole number of any type, such as numpy's."""
    try:
        # bool is an int in Python, but who passes one has mixed up two arguments.
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """The same, within these bounds; anything else is refused."""
    number = as_whole(value)
    if number is None or number < least:
        raise InsertlmError(f"{name}: expected a whole number of at least {least}, got {shown(value)}")
    if most is not None and number > most:
        raise InsertlmError(f"{name}: expected a whole number of at most {most}, got {shown(value)}")
    return number


def listed(name: str, value: object, what: str) -> list[Any]:
    """The items of a list or another collection. A text is refused, although it is a collection of letters.
    what: the items are, for the message"""
    try:
        if not isinstance(value, str | bytes):
            return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:  # arrays without a dimension can be asked for items, but have none
        pass
    raise InsertlmError(f"{name}: expected a list of {what}, got {shown(value)}")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InsertlmError(f"{name}: expected a text, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Whether it is True or False. Nothing else is taken for one of them, because "no" would be true."""
    if not isinstance(value, bool):
        raise InsertlmError(f"{name}: expected True or False, got {shown(value)}")


def shown(value: object) -> str:
    """The value for a message: short, and in one line."""
    return " ".join(reprlib.repr(value).split())
