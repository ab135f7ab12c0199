"""The recipe: everything that defines a run, as one tree of typed sections, from YAML with dotted overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from insertlm.backbone.transformer import PRESETS as MODEL_PRESETS
from insertlm.backbone.transformer import ModelConfig
from insertlm.decoding.settings import DecodeConfig
from insertlm.errors import InsertlmError
from insertlm.families.ilm import IlmConfig
from insertlm.section import Count, Index, Section
from insertlm.tasks.star import PRESETS as STAR_PRESETS
from insertlm.tasks.star import Star
from insertlm.training.optim import OptimConfig

__all__ = ["TASK_PRESETS", "Recipe", "TrainConfig", "differences", "load_recipe", "parse_recipe", "to_yaml"]

TASK_PRESETS: dict[str, dict[str, Any]] = {name: {"name": "star", **keys} for name, keys in STAR_PRESETS.items()}
_PRESETS = {"task": TASK_PRESETS, "model": MODEL_PRESETS}


class TrainConfig(Section, frozen=True, kw_only=True):
    """The `train` section of a recipe."""

    steps: Count
    batch_size: Count = 64
    seed: Index = 1  # of initial weights, data order and corruption
    log_every: Count = 100
    save_every: Count = 2000
    keep: Count = 1  # checkpoints kept
    validate_every: Index = 0  # steps between validations, 0 = never
    compile: bool | None = None  # None = on CUDA
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # beside metrics.jsonl


class Recipe(Section, frozen=True, kw_only=True):
    task: Star
    model: ModelConfig
    train: TrainConfig
    family: IlmConfig = IlmConfig()
    optim: OptimConfig = OptimConfig()
    decode: DecodeConfig = DecodeConfig()


def load_recipe(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Read a recipe; `overrides` are pairs such as ("train.steps", "200")."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InsertlmError(f"{path}: no such recipe ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InsertlmError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise InsertlmError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    for key, value in overrides:
        _override(tree, key, value)
    return parse_recipe(tree, str(path))


def parse_recipe(tree: Mapping[str, Any], source: str) -> Recipe:
    """`source` names the origin in messages."""
    expanded = {section: _expand(section, keys, source) for section, keys in tree.items()}
    try:
        return msgspec.convert(expanded, Recipe, strict=False)
    except msgspec.ValidationError as error:
        raise InsertlmError(f"{source}: {_explain(str(error))}") from error


def to_yaml(recipe: Recipe) -> str:
    text: str = yaml.safe_dump(msgspec.to_builtins(recipe), sort_keys=False)
    return text


def differences(ours: Recipe, theirs: Recipe) -> list[str]:
    """`key: ours, not theirs` for every key that differs."""
    a, b = _flatten(msgspec.to_builtins(ours)), _flatten(msgspec.to_builtins(theirs))
    return [f"{key} is {b.get(key)}, not {a.get(key)}" for key in sorted(a | b) if a.get(key) != b.get(key)]


def _flatten(tree: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def _override(tree: dict[str, Any], key: str, value: str) -> None:
    section, dot, name = key.partition(".")
    if not dot or not name:
        raise InsertlmError(f"--{key}: expected --section.key value, for example --train.steps 200")
    keys = tree.setdefault(section, {})
    if isinstance(keys, dict):  # else parsing says what is wrong with it
        keys[name] = yaml.safe_load(value) if value else value


def _expand(section: str, keys: Any, source: str) -> Any:
    """Put the keys of `preset: NAME` beneath those given."""
    if section not in _PRESETS or not isinstance(keys, dict) or "preset" not in keys:
        return keys
    name = keys["preset"]
    if name not in _PRESETS[section]:
        known = ", ".join(_PRESETS[section])
        raise InsertlmError(f"{source}: {section}.preset: unknown preset {name!r}; expected one of {known}")
    return {**_PRESETS[section][name], **{key: value for key, value in keys.items() if key != "preset"}}


def _explain(message: str) -> str:
    """msgspec's message with the place first, and the nearest real key for an unknown one."""
    what, _, place = message.rpartition(" - at `$")
    where = place.strip("`.") if what else ""
    what = what or message
    if unknown := re.search(r"unknown field `(.+)`", what):
        where = f"{where}.{unknown[1]}".strip(".")
        near = difflib.get_close_matches(where, _all_keys(), n=1)
        what = "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    return f"{where}: {what}" if where else what


def _all_keys() -> list[str]:
    sections = {field.name: field.type for field in msgspec.structs.fields(Recipe)}
    return [*sections, *(f"{name}.{key.name}" for name, kind in sections.items() for key in msgspec.structs.fields(kind))]
