"""Checks of what Python users pass: whatever the type of a mistake, it is told in one line."""

from __future__ import annotations

import operator
import reprlib

from insertlm.core.errors import InsertlmError

__all__ = ["shown", "whole_number"]


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value as an int, if it is a whole number of any type, such as numpy's, within these bounds."""
    try:
        # bool is an int in Python, but who passes one has mixed up two arguments.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise InsertlmError(f"{name}: expected a whole number of at least {least}, got {shown(value)}")
    if most is not None and number > most:
        raise InsertlmError(f"{name}: expected a whole number of at most {most}, got {shown(value)}")
    return number


def shown(value: object) -> str:
    """The value for a message: short, and in one line."""
    return " ".join(reprlib.repr(value).split())
