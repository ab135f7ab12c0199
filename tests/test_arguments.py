"""Every argument of every public method, with values of every type: what makes no sense is refused in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import insertlm
from insertlm.core.errors import InsertlmError
from insertlm.model import Model
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.text.subwords import train_bpe

MODEL = {"layers": 1, "width": 16, "heads": 2, "hidden": 32}
STAR = {"name": "star", "degree": 2, "min_nodes": 3, "max_nodes": 3, "min_plan": 2, "nodes": 8}
GRAPH, BLANK, TEXT = "1>2 2>3 4>2 2>5 : 1 3", "Lily ___ a cat.", "a cat"


class Unspeakable:
    def __repr__(self) -> str:
        return "two\nlines"


ODD: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 1.5, 2.0, 10**9, 1 << 62, 10**30, -(10**30), math.nan, math.inf, -math.inf, 1j,
    "", "3", "x", "a\0", "\ud800", "a" * 5000, b"x", [], [1], ["x"], ["3"], [None], [True], [1.5], [[1]], ["\0"],
    ["\ud800"], (0, 1), [(0, 1)], [(1, 0)], [(0.5, 1)], [(True, 2)], [(0, 1, 2)], [(0, 10**30)], {}, {"a": 1}, set(),
    range(3), np.int64(3), np.int8(1), np.float32(0.5), np.float64(math.nan), np.array(3),
    np.array([1, 2]), torch.tensor(3), torch.tensor(0.5), Unspeakable(), object, print,
]  # fmt: skip


# What is accepted of them, as `repr` shows it.
BIG = {"1000000000", str(1 << 62), str(10**30)}
SMALL = {"1", "2", "3", "np.int64(3)", "np.int8(1)", "array(3)", "tensor(3)"}
COUNT, LENGTH, SEED = SMALL | BIG, {"None", "0", "[1]", "[None]"} | SMALL, {"0", "1000000000"} | SMALL
FLAG, FEW = {"True", "False"}, {"1", "2", "3", "np.int64(3)", "np.int8(1)"}
SETTING, FRACTION = FEW | {"1000000000"}, {"1", "np.int8(1)", "np.float32(0.5)"}
WORDS = {"[]", "{}", "set()", "['x']", "['3']", "{'a': 1}"}
READ = {"''", "'3'", "'x'", r"'a\x00'", r"'\ud800'"}
IDS = {"[]", "[1]", "(0, 1)", "{}", "set()", "range(0, 3)", "array([1, 2])"}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, set[str]]]] = {
    "generate": (
        lambda models, **more: models[0].generate(**{"prompts": [GRAPH]} | more),
        {
            "prompts": {"[]", "{}", "set()"},
            "seed": SEED,
            "batch_size": COUNT,
            "stream": FLAG,
            "temperature": {"0", "1.5", "2.0", str(1 << 62), "np.float32(0.5)"} | SETTING,
            "stop_threshold": {"0"} | FRACTION,
            "max_tokens": {"None"} | SETTING,
            "max_steps": SETTING,
            "joint": FLAG,
            "order": set(),
            "no_such_key": set(),
        },
    ),
    "infill": (
        lambda models, **more: models[1].infill(**{"text": BLANK} | more),
        {
            "text": set(),
            "blanks": {"None", "[(0, 1)]"},
            "samples": SMALL,
            "seed": SEED,
            "batch_size": COUNT,
            "stream": FLAG,
            "anywhere": FLAG,
            "min_length": LENGTH,
            "max_length": LENGTH | {"1000000000"},
            "words": {"None", "[None]"},
            "banned": WORDS,
            "required": WORDS,
            "top_p": FRACTION,
            "top_k": {"0"} | SETTING,
            "position_top_k": {"0"} | SETTING,
        },
    ),
    "likelihood": (
        lambda models, **more: models[1].likelihood(**{"text": TEXT, "exact": 0, "orders": 2, "states": 1} | more),
        {
            "text": READ,
            "prompt": {"''"},
            "exact": {"0"} | SMALL,
            "orders": SMALL - {"1", "np.int8(1)"},
            "states": SMALL,
            "seed": SEED,
            "batch_size": SMALL,
        },
    ),
    "likelihood of fills": (
        lambda models, fills: models[1].likelihood(BLANK, fills=fills, exact=3),
        {"fills": {"None", "['x']", "['3']", "{'a': 1}", r"['\x00']", r"['\ud800']"}},
    ),
    "score": (
        lambda models, **more: models[1].score(**{"text": TEXT} | more),
        {"text": READ, "prompt": {"''"}, "batch_size": COUNT},
    ),
    "begin": (
        lambda models, **more: models[0].begin(**{"prompt": GRAPH} | more),
        {"prompt": set(), "seed": SEED | {str(1 << 62)}},
    ),
    "decode": (lambda models, ids: models[1].decode(ids), {"ids": IDS}),
    "settings": (lambda models, pairs: models[1].settings(pairs), {"pairs": {"[]", "{}", "set()"}}),
    "load": (
        lambda models, **more: insertlm.load(**{"name_or_path": models[0].folder, "device": "cpu"} | more),
        {"name_or_path": set(), "device": {"None", "''"}, "halved": {"None"} | FLAG, "checkpoint": set()},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Model]]:
    """One of graphs, one of text; neither is trained."""
    folder = tmp_path_factory.mktemp("models")
    train_bpe(["Lily found a cat in the park."], 300).save(folder / "tokenizer.json")
    text = {"name": "text", "train": "a.txt", "tokenizer": str(folder / "tokenizer.json"), "block": 60}
    yield tuple(write(folder / name, task) for name, task in (("star", STAR), ("text", text)))  # type: ignore[misc]


def write(folder: Path, task: dict[str, Any]) -> Model:
    sizes = {**MODEL, "max_length": 64} if task["name"] == "text" else MODEL
    recipe = parse_recipe({"task": task, "model": sizes, "train": {"steps": 1}, "decode": {"max_steps": 2}}, "test")
    folder.mkdir()
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(build_family(recipe).state_dict(), folder / "model.safetensors")
    return insertlm.load(folder, "cpu")


@pytest.mark.parametrize(
    ("call", "argument"), [(call, argument) for call, (_, arguments) in CALLS.items() for argument in arguments]
)
def test_what_makes_no_sense_is_refused_in_one_line(models: tuple[Model, Model], call: str, argument: str) -> None:
    function, arguments = CALLS[call]
    for value in ODD:
        if argument in ("orders", "states") and repr(value) == "1000000000":
            continue  # it makes sense, and would take days
        message = None
        try:
            function(models, **{argument: value})
        except InsertlmError as error:
            message = str(error)
        assert (message is None) == (repr(value) in arguments[argument]), (repr(value)[:80], message)
        assert message is None or "\n" not in message
        assert message is None or len(message) < 400 or argument in ("name_or_path", "checkpoint")


def test_numbers_of_numpy_are_those_of_python(models: tuple[Model, Model]) -> None:
    star, text = models
    numpy: dict[str, Any] = {"seed": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int16(3)}
    plain: dict[str, Any] = {"seed": 3, "temperature": 0.5, "top_k": 3}
    assert star.generate([GRAPH], **numpy) == star.generate([GRAPH], **plain)
    [one], [other] = (text.infill(BLANK, max_length=4, **numbers) for numbers in (numpy, plain))
    assert one.trajectory == other.trajectory
    none: Any = np.int8(0)
    assert text.likelihood(TEXT, exact=none) == text.likelihood(TEXT, exact=0)


def test_words_may_come_from_an_iterator(models: tuple[Model, Model]) -> None:
    """It can be read once only, but every sample needs them."""
    words: Any = iter(["x"])
    filled = models[1].infill(BLANK, required=words, samples=3, max_length=9)
    assert all("x" in each.fills[0] for each in filled)


def test_a_long_text_is_refused_before_its_variants_are_made(models: tuple[Model, Model]) -> None:
    """A score reads a text once without each of its tokens; of a hundred thousand these do not fit into memory."""
    with pytest.raises(InsertlmError, match=r"^a prompt has \d+ tokens, 2 of them special; 64 are allowed$"):
        models[1].score("a" * 100_000)
