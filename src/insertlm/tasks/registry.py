"""All tasks. A new one is a file of its own, its import and its place in the union here, and a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from insertlm.core.errors import InsertlmError
from insertlm.tasks.base import Task
from insertlm.tasks.star import Star
from insertlm.tasks.sudoku import Sudoku
from insertlm.tasks.text import Text
from insertlm.tasks.zebra.task import Zebra

__all__ = ["PRESETS", "AnyTask", "name_and_things", "preset"]

# The `name` in a recipe, which is the tag of each, decides which of these the section is read as.
AnyTask = Star | Zebra | Sudoku | Text

# Built when this module is imported, so that a preset that is no valid task fails in every test.
_PRESETS: dict[str, Task] = {name: kind(**keys) for kind in get_args(AnyTask) for name, keys in kind.presets.items()}
# As a recipe would write them out: the keys of the section `task`.
PRESETS: dict[str, dict[str, Any]] = {name: {"name": task.tag, **task.presets[name]} for name, task in _PRESETS.items()}
_THINGS = {task.tag: task.things for task in _PRESETS.values()}


def preset(name: str) -> Task:
    """The task of that name, such as star-hard."""
    if name not in _PRESETS:
        raise InsertlmError(f"unknown dataset {name!r}; expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]


def name_and_things(section: Mapping[str, Any]) -> tuple[str, str]:
    """Of the section `task` of a recipe: the preset whose keys it has, such as star-hard with however many examples, or
    else its own name; and what its examples are called. Sections of older versions will do, so they are not parsed."""
    tag = str(section.get("name", ""))
    name = next((name for name, keys in PRESETS.items() if keys.items() <= section.items()), tag)
    return name, _THINGS.get(tag, "examples")
