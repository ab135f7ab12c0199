"""Star graphs as recipes ask for them and as people type and read them."""

from __future__ import annotations

import msgspec
import pytest

from insertlm.core.errors import InsertlmError
from insertlm.core.section import Section
from insertlm.tasks.base import Example
from insertlm.tasks.star import PRESETS, Star, path_of

EASY = Star(**PRESETS["star-easy"])

# --- Parameters


class Recipe(Section, frozen=True, kw_only=True):
    task: Star


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"min_nodes": 6}, "min_nodes 6 is more than max_nodes 5 - at `$.task`"),
        ({"min_plan": 5}, "min_plan 5 does not fit into min_nodes 5; expected at most 4 - at `$.task`"),
        ({"nodes": 12}, "nodes 12 are too few for 3 paths of 5 nodes; expected at least 13 - at `$.task`"),
        ({"degree": 0}, "Expected `int` >= 1 - at `$.task.degree`"),
        ({"seed": -1}, "Expected `int` >= 0 - at `$.task.seed`"),
        ({"order": "random"}, "Invalid enum value 'random' - at `$.task.order`"),
        ({"arms": 3}, "Object contains unknown field `arms` - at `$.task`"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, int | str], line: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"task": {"name": "star", **PRESETS["star-easy"], **change}}, Recipe)
    assert str(caught.value) == line


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recipes(name: str) -> None:
    task = msgspec.convert({"name": "star", **PRESETS[name]}, Star)
    assert (task.train, task.validation, task.test, task.seed) == (50_000, 1_000, 5_000, 1)
    assert msgspec.to_builtins(task)["name"] == "star"


# --- Text in and out

BACKWARD = Star(**PRESETS["star-easy"], order="reversed")
EXAMPLE = Example(prefix=[3, 8, 0, 7, 8, 12, 3, 12], target=[3, 8, 8, 12])


def test_render() -> None:
    assert EASY.render(EXAMPLE) == "3→8 0→7 8→12\nsource 3  goal 12\npath 3 → 8 → 12"


def test_paths_read_from_source_to_goal_in_whichever_order_they_are_written() -> None:
    there = EXAMPLE._replace(target=EXAMPLE.target[::-1])
    assert BACKWARD.render(there) == EASY.render(EXAMPLE)
    assert BACKWARD.path(there.target) == EASY.path(EXAMPLE.target) == [3, 8, 12]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ([12, 8, 8], [8, 12]),  # cut short: the source is missing
        ([12, 8, 9, 3], [3, 9, 8, 12]),  # a gap stays
        ([], []),
    ],
)
def test_a_wrong_path_written_from_the_goal(target: list[int], path: list[int]) -> None:
    assert BACKWARD.path(target) == path


def test_render_shows_what_a_model_got_wrong() -> None:
    wrong = EXAMPLE._replace(target=[3, 8, 7, EASY.tokenizer.specials.pad])
    assert EASY.render(wrong).splitlines()[-1] == "path 3 → 8 → 7 → <pad>"


@pytest.mark.parametrize(
    "text",
    [
        "3>8 0>7 8>12 : 3 12",
        "3→8 0→7 8→12 | 3 12",
        "3->8, 0->7, 8->12; 3->12",
        "3 8 0 7 8 12 3 12",
        " 3 > 8  0 > 7\n8 > 12: source 3 goal 12\n",
    ],
)
def test_prompts_may_be_written_in_many_ways(text: str) -> None:
    assert EASY.parse_prompt(text) == EXAMPLE.prefix


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("3>8 0>7 99>1 : 3 8", "unknown node '99' at word 5; expected 0 … 19"),
        ("3>8 : 3 -1", "unknown node '-1' at word 4; expected 0 … 19"),
        ("", "expected one or more edges, then source and goal; got 0 nodes"),
        ("3 8", "expected one or more edges, then source and goal; got 2 nodes"),
        ("3>8 8>12 : 3", "expected one or more edges, then source and goal; got 5 nodes"),
        ("1>2 " * 13 + ": 1 2", "prefix of 28 tokens is longer than the 26 this task allows"),
        ("3>8 8>12 : 4 12", "source 4 is in none of the edges"),
        ("3>8 8>12 : 3 5", "goal 5 is in none of the edges"),
    ],
)
def test_bad_prompts_get_one_clear_line(text: str, line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        EASY.parse_prompt(text)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ([3, 8, 8, 12, 12, 13], [3, 8, 12, 13]),
        ([3, 8], [3, 8]),
        ([], []),
        ([3], [3]),
        ([3, 8, 9, 12], [3, 8, 9, 12]),  # a gap stays
        ([3, 8, 8, 8, 8, 12], [3, 8, 8, 12]),  # so does an edge from a node to itself
        ([3, 8, 8], [3, 8]),
    ],
)
def test_path_of(target: list[int], path: list[int]) -> None:
    assert path_of(target) == path
