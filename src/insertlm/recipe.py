"""The recipe: everything that defines a run, as one tree of typed sections, from YAML with dotted overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
import torch
import yaml
from torch.overrides import TorchFunctionMode

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.core.section import Count, Factor, Fraction, Index, NonNegative, Section, Share
from insertlm.families.base import Family
from insertlm.families.registry import DEFAULT, AnyFamily
from insertlm.inference.settings import DecodeConfig
from insertlm.nn.spec import PRESETS as MODEL_PRESETS
from insertlm.nn.spec import ModelConfig
from insertlm.tasks.registry import PRESETS as TASK_PRESETS
from insertlm.tasks.registry import AnyTask

__all__ = [
    "OptimConfig",
    "Recipe",
    "TrainConfig",
    "build_family",
    "change_decode",
    "differences",
    "load_recipe",
    "override_decode",
    "parse_recipe",
    "parse_value",
    "portable",
    "to_yaml",
]

_MOST = (1 << 63) - 1  # the largest machine integer
_PRESETS = {"task": TASK_PRESETS, "model": MODEL_PRESETS}
_NAMES = {"task": "star", "family": DEFAULT.tag}  # for sections without a name


class OptimConfig(Section, frozen=True, kw_only=True):
    """The `optim` section of a recipe."""

    matrices: Literal["adamw", "muon"] = "adamw"  # the optimiser of the blocks' matrices; all else uses AdamW
    learning_rate: NonNegative = 1e-4  # its peak
    rates: dict[str, Factor] = msgspec.field(default_factory=dict)  # by name: {embedding: 0.1} a tenth, 0 freezes
    warmup: Index = 1000  # steps over which the rate rises from 0
    cooldown: Fraction = 0.0  # share of the run, at its end, over which it falls back to 0
    rounded: Fraction = 0.0  # share of the run, at its end, that sees weights as a release in groups rounds them
    weight_decay: NonNegative = 0.01  # of matrices; biases and norms are never decayed
    beta1: Share = 0.9  # decay of the average gradient
    beta2: Share = 0.999  # decay of the average squared gradient, of AdamW
    clip: NonNegative = 1.0  # largest norm of the gradient; 0 = no limit
    ema: Fraction = 0.9999  # of the weights, after a warm-up of its own
    ema_every: Count = 10  # steps between updates of the average

    def __hash__(self) -> int:  # recipes are keys of dicts, and `rates` is no such key by itself
        return hash(msgspec.json.encode(self))

    def rate(self, step: int, steps: int, elapsed: float = 0.0) -> float:
        """The learning rate of step `step` (from 0) of `steps`. elapsed: share of `train.minutes` that is over"""
        # The warm-up counts steps even where the clock ends a run: it lasts until the moments can be trusted.
        rise = (step + 1) / self.warmup if self.warmup else 1.0
        fall = min((steps - step) / (self.cooldown * steps), (1.0 - elapsed) / self.cooldown) if self.cooldown else 1.0
        return self.learning_rate * max(0.0, min(1.0, rise, fall))

    def rounds(self, step: int, steps: int, elapsed: float = 0.0) -> bool:
        """Whether this step sees rounded weights."""
        return step >= (1.0 - self.rounded) * steps or elapsed > 1.0 - self.rounded

    def scalars(self, step: int, steps: int) -> tuple[float, float, float]:
        """What a step needs: the rate, and how far both moments are on the way from zero."""
        return self.rate(step, steps), 1.0 - self.beta1 ** (step + 1), 1.0 - self.beta2 ** (step + 1)


class TrainConfig(Section, frozen=True, kw_only=True):
    """The `train` section of a recipe."""

    steps: Count  # updates of the weights
    minutes: NonNegative = 0.0  # of training, without validation and saving, after which a run ends; 0 = no limit
    start: str = ""  # whose weights, of another family its backbone, a fresh run begins with: a folder, a bundled name
    batch_size: Count = 64  # of all processes together
    accumulate: Count = 1  # pieces of the batch that a process computes one after the other
    parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes: each has the whole model, or a part of it
    seed: Index = 1  # of initial weights, data order and corruption
    log_every: Count = 100  # steps between lines of metrics.jsonl
    save_every: Count = 2000  # steps between checkpoints
    keep: Count = 1  # checkpoints kept
    keep_best: bool = False  # also the one that validated best; every better validation is saved
    validate_every: Index = 0  # steps between validations, 0 = never
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of products; auto = bfloat16 on CUDA, else float32
    compile: bool = True  # on CUDA; elsewhere steps run as they are written
    deterministic: bool = False  # on CUDA: the same bits for the same seed and GPU; on a CPU every run has them
    recompute: bool = False  # blocks again for the gradient, keeping only their inputs: slower, in far less memory
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # beside metrics.jsonl


class Recipe(Section, frozen=True, kw_only=True):
    """Everything that defines a run."""

    task: AnyTask
    model: ModelConfig
    train: TrainConfig
    family: AnyFamily = DEFAULT
    optim: OptimConfig = OptimConfig()
    decode: DecodeConfig = DecodeConfig()

    def __post_init__(self) -> None:
        longest = self.family.longest_row(self.task.longest_prefix, self.task.longest_target)
        if longest > self.model.max_length:
            raise ValueError(f"the task has rows of {longest} tokens; model.max_length is {self.model.max_length}")
        self.family.check_task(self.task)


def load_recipe(path: Path, overrides: Sequence[tuple[str, str]] = ()) -> Recipe:
    """Read a recipe; `overrides` are pairs such as ("train.steps", "200")."""
    tree = _read(path)
    for key, value in overrides:
        _override(tree, key, value)
    return parse_recipe(tree, str(path), [key for key, _ in overrides])


def parse_recipe(tree: Mapping[Any, Any], source: str, overridden: Collection[str] = ()) -> Recipe:
    """Check a recipe. source: its origin, for messages   overridden: the keys that came from the command line"""
    _check_names(tree, source)
    sections = {section: _expand(section, keys, source, overridden) for section, keys in tree.items()}
    return _convert(sections, Recipe, source, overridden)


def change_decode(
    config: DecodeConfig, changes: Mapping[str, Any], overridden: Collection[str] = (), *, strict: bool = False
) -> DecodeConfig:
    """The `decode` section with some keys changed. strict: whether "0.5" and 2.0 are refused where 0.5 and 2 are meant,
    as in Python; files and command lines know texts only"""
    keys = {**msgspec.to_builtins(config), **changes}
    return _convert({"decode": keys}, _DecodeOnly, "", overridden, strict).decode


def override_decode(config: DecodeConfig, overrides: Sequence[tuple[str, str]]) -> DecodeConfig:
    """The `decode` section with overrides of the command line, such as ("decode.temperature", "0.8")."""
    changes = {key.removeprefix("decode."): parse_value(key, value) for key, value in overrides}
    return change_decode(config, changes, [key for key, _ in overrides])


def parse_value(key: str, text: str) -> Any:
    """A value on the command line, read as it would be after `key:` in a recipe."""
    try:
        return _parse_yaml(text) if text else text
    except ValueError as error:
        raise InsertlmError(f"--{key}: not a YAML value: {_shown(text)}") from error


def to_yaml(recipe: Recipe) -> str:
    """The recipe with all keys, those at their defaults too, so that later defaults do not change a run."""
    text: str = yaml.safe_dump(msgspec.to_builtins(recipe), sort_keys=False)
    return text


def differences(ours: Recipe, theirs: Recipe) -> list[str]:
    """`key is theirs, not ours` for every key that differs."""
    a, b = _flatten(msgspec.to_builtins(ours)), _flatten(msgspec.to_builtins(theirs))
    return [f"{key} is {b.get(key)}, not {a.get(key)}" for key in sorted(a | b) if a.get(key) != b.get(key)]


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def portable(recipe: Recipe) -> Recipe:
    """The recipe as it is published: files, and the run it began with, by their names alone."""
    train = msgspec.structs.replace(recipe.train, start=Path(recipe.train.start).name)
    return msgspec.structs.replace(recipe, train=train, task=recipe.task.portable())


def build_family(recipe: Recipe, *, hollow: bool = False) -> Family:
    """A fresh model; its weights depend on `train.seed` alone. hollow: its parameters are on the meta device, where
    they have a shape and take neither memory nor time; see storage/loading.py"""
    with torch.random.fork_rng(devices=[]), _Hollow() if hollow else nullcontext():
        torch.manual_seed(recipe.train.seed)
        family = recipe.family.build(recipe.model, recipe.task.tokenizer)
    family.backbone.recompute = recipe.train.recompute
    return family


class _Hollow(TorchFunctionMode):
    """Modules make their parameters with torch.empty and draw them then. Buffers are made from values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            return func(*args, **{**given, "device": "meta"})
        # Nothing would be drawn, but torch would load a second's worth of modules for it.
        if getattr(func, "__name__", "") in ("kaiming_uniform_", "normal_", "uniform_"):
            return args[0] if args else given["tensor"]  # torch's modules name it, too
        return func(*args, **given)


# --- Reading


def _read(path: Path) -> dict[Any, Any]:
    try:
        tree = _parse_yaml(path.read_bytes())
    except FileNotFoundError as error:
        raise InsertlmError(f"{path}: no such file; expected a recipe, a YAML file") from error
    except IsADirectoryError as error:
        raise InsertlmError(f"{path}: is a folder; expected a recipe, a YAML file") from error
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise InsertlmError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        raise InsertlmError(f"{path}: is empty; expected the sections {_listed(_sections())}")
    if not isinstance(tree, dict):
        raise InsertlmError(f"{path}: expected the sections {_listed(_sections())}, got {_shown(tree)}")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys. PyYAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str | bytes) -> Any:
    """Raises ValueError for anything that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    # PyYAML raises the last three itself, for `!!bool x`, `!!timestamp x` and thousands of nested brackets.
    except (yaml.YAMLError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _override(tree: dict[Any, Any], key: str, value: str) -> None:
    section, _, name = key.partition(".")
    if not section or not name:
        raise InsertlmError(f"--{key}: expected --section.key value, for example --train.steps 200")
    if section not in _sections():
        raise InsertlmError(f"--{key}: {_unknown(section, _sections(), 'section')}")
    if name not in (known := _keys(section)):
        raise InsertlmError(f"--{key}: {_unknown(name, known, 'key')}")
    keys = tree.get(section)
    if keys is None:
        keys = tree[section] = {}
    if isinstance(keys, dict):  # otherwise parsing reports what is wrong
        keys[name] = parse_value(key, value)


def _expand(section: str, keys: Any, source: str, overridden: Collection[str]) -> Any:
    """Fill in the keys of `preset: NAME` where none are given. A section whose keys are all commented out is empty. A
    task or family without a name is the default one."""
    keys = {} if keys is None else keys
    if not isinstance(keys, dict):
        return keys
    if section in _PRESETS and "preset" in keys:
        name, presets = keys["preset"], _PRESETS[section]
        if not isinstance(name, str) or name not in presets:
            where = _where(f"{section}.preset", source, overridden)
            raise InsertlmError(f"{where}: expected one of {_listed(presets)}, got {_shown(name)}")
        keys = {**presets[name], **{key: value for key, value in keys.items() if key != "preset"}}
    return {"name": _NAMES[section], **keys} if section in _NAMES else keys


# --- Checking


class _DecodeOnly(Section, frozen=True, kw_only=True):
    decode: DecodeConfig


_Tree = TypeVar("_Tree", Recipe, _DecodeOnly)


def _convert(
    sections: Mapping[str, Any], kind: type[_Tree], source: str, overridden: Collection[str], strict: bool = False
) -> _Tree:
    try:
        tree = msgspec.convert(sections, kind, strict=strict)
    except UnicodeEncodeError as error:
        where = source or " ".join(f"--{key}" for key in overridden) or "settings"
        raise InsertlmError(f"{where}: not Unicode: {_shown(error.object)}") from error
    except msgspec.ValidationError as error:
        place, what = _explain(str(error), sections)
        what = _outdated(place, sections) or what
        raise InsertlmError(f"{_where(place, source, overridden)}: {what}") from error
    for place, value in _flatten(msgspec.to_builtins(tree)).items():
        if isinstance(value, int | float) and not -_MOST <= value <= _MOST:  # this also refuses NaN
            where = _where(place, source, overridden)
            raise InsertlmError(f"{where}: expected a number below 2^63, got {_shown(value)}")
    return tree


def _where(place: str, source: str, overridden: Collection[str]) -> str:
    return f"--{place}" if place in overridden else f"{source}: {place}" if source else place


def _check_names(tree: Mapping[Any, Any], source: str) -> None:
    """Refuse keys that are not names. In YAML a key can be of any type."""
    places = {"": tree, **{f"{section}: ": keys for section, keys in tree.items() if isinstance(keys, dict)}}
    for place, keys in places.items():
        for key in keys:
            if not isinstance(key, str) or not re.fullmatch(r"[\w .-]+", key):
                raise InsertlmError(f"{source}: {place}expected names as keys, got {_shown(key)}")


def _explain(message: str, sections: Mapping[str, Any]) -> tuple[str, str]:
    """Turn msgspec's message into the key and what is wrong with it: what was expected, and what is there instead."""
    what, found, place = message.rpartition(" - at `$")
    what, place = (what, place.strip("`.")) if found else (message, "")
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        known, kind = (_keys(place, sections[place].get("name")), "key") if place else (_sections(), "section")
        return f"{place}.{match[1]}".removeprefix("."), _unknown(match[1], known, kind)
    if match := re.fullmatch(r"Object missing required field `(.*)`", what):
        expected = f"this {'key' if place else 'section'}"
        if place in _PRESETS:
            expected += f", or {place}.preset: one of {_listed(_PRESETS[place])}"
        return f"{place}.{match[1]}".removeprefix("."), f"missing; expected {expected}"
    if not place:  # sections that do not fit together
        return "recipe", what
    section, _, key = place.partition("[")[0].partition(".")  # of a key with several values the place is key[...]
    value = sections[section][key] if key else sections[section]
    if what.startswith("Invalid"):
        return place, f"expected one of {_listed(_choices(section, key, sections[section]))}, got {_shown(value)}"
    if match := re.fullmatch(r"Expected `(.*?)`(| [<>].*?)(|, got .*)", what):
        expected = match[1].replace(" | ", " or ").replace("object", "a mapping of keys")
        return place, f"expected {expected}{match[2]}, got {_shown(value)}"
    return place, what


# Keys that older versions wrote and this one does not know, and keys for which they wrote null.
_REMOVED = {"family.ends": "remove it if it is 0, else write family.group and family.frame"}
_NULLS = {"train.compile": "true", "train.precision": "auto"}


def _outdated(place: str, sections: Mapping[str, Any]) -> str | None:
    """What to change in a recipe that an older version wrote."""
    if place in _REMOVED:
        return f"a key of an older version; {_REMOVED[place]}"
    section, _, key = place.partition(".")
    if place in _NULLS and sections[section][key] is None:
        return f"null is a value of an older version; write {_NULLS[place]}"
    return None


def _unknown(name: str, known: Sequence[str], kind: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind}; " + (f"did you mean {near[0]}?" if near else f"expected one of {_listed(known)}")


def _sections() -> list[str]:
    return [field.name for field in msgspec.structs.fields(Recipe)]


def _kinds(section: str) -> list[Any]:
    """The types that a section may have; several if its `name` selects one."""
    kind = next(field.type for field in msgspec.structs.fields(Recipe) if field.name == section)
    return list(get_args(kind)) or [kind]


def _named(section: str, name: Any) -> list[Any]:
    """The type of that name, or all types if there is none."""
    kinds = _kinds(section)
    return [kind for kind in kinds if kind.__struct_config__.tag == name] or kinds


def _keys(section: str, name: str | None = None) -> list[str]:
    """All keys that a section may have in a file; with `name`, those of the type of that name."""
    kinds = _named(section, name)
    tag = kinds[0].__struct_config__.tag_field
    preset = ["preset"] if section in _PRESETS else []
    keys = dict.fromkeys(field.encode_name for kind in kinds for field in msgspec.structs.fields(kind))
    return [*preset, *([tag] if tag else []), *keys]


def _choices(section: str, key: str, keys: Mapping[str, Any]) -> Sequence[str]:
    """The values of a key that has only a few. keys: the whole section"""
    kinds = _kinds(section)
    if key == kinds[0].__struct_config__.tag_field:
        return [kind.__struct_config__.tag for kind in kinds]
    fields = (field for kind in _named(section, keys.get("name")) for field in msgspec.structs.fields(kind))
    return next(get_args(field.type) for field in fields if field.name == key)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)


def _shown(value: Any) -> str:
    """A value as Python writes it, shortened for a message."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # Python does not write numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:59]}…"
