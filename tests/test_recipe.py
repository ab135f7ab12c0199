"""Recipes: what is in them comes out, and every mistake is one line that names its place and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.families.ilm import IlmConfig
from insertlm.inference.settings import DecodeConfig
from insertlm.nn.spec import PRESETS as MODEL_PRESETS
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import (
    OptimConfig,
    Recipe,
    TrainConfig,
    build_family,
    change_decode,
    differences,
    load_recipe,
    parse_recipe,
    parse_value,
    to_yaml,
)
from insertlm.tasks.star import PRESETS as STAR_PRESETS
from insertlm.tasks.star import Star
from insertlm.text.subwords import train_bpe

RECIPES = Path(__file__).parents[1] / "recipes"
MODELS = "paper, mini, zebra, zebra-19m, smollm2-135m"
SMALL: dict[str, Any] = {"task": {"preset": "star-easy"}, "model": {"preset": "mini"}, "train": {"steps": 5}}


def message(tree: dict[Any, Any]) -> str:
    with pytest.raises(InsertlmError) as caught:
        parse_recipe(tree, "r.yaml")
    return str(caught.value)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- What is in a recipe


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_of_the_repository_loads(path: Path) -> None:
    assert load_recipe(path).train.steps > 0


ENGLISH = sorted((RECIPES / "english").glob("*.yaml"))


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_recipes_of_english_describe_models_that_can_be_trained_and_write(path: Path, tmp_path: Path) -> None:
    """The files that they name are not in the repository; a tokenizer takes the place of theirs."""
    train_bpe(["a cat and a dog"], 270).save(tmp_path / "tokenizer.json")
    recipe = load_recipe(path, [("task.tokenizer", str(tmp_path / "tokenizer.json"))])
    with torch.device("meta"):
        family = build_family(recipe)
    family.abilities.check(recipe.decode)
    assert family.vocabulary == 270
    assert family.backbone.embedding.weight.shape[1] == 576
    assert recipe.train.start, "all begin with a pretrained model"


def test_rivals_in_english_differ_in_their_family_alone() -> None:
    rivals = [load_recipe(RECIPES / "english" / f"{name}.yaml") for name in ("fill", "both", "ilm", "mdm", "arm")]
    assert len({recipe.family.tag for recipe in rivals}) == len(rivals)
    for recipe in rivals:
        assert (recipe.task, recipe.model, recipe.optim) == (rivals[0].task, rivals[0].model, rivals[0].optim)
        assert msgspec.structs.replace(recipe.train, batch_size=1) == msgspec.structs.replace(
            rivals[0].train, batch_size=1
        )


@pytest.mark.parametrize("task", ["easy", "medium", "hard"])
def test_rivals_get_the_budget_of_the_ilm(task: str) -> None:
    """The same graphs, model, batch and steps; only the order of the oracle's targets and the rate may differ."""

    def budget(path: Path) -> tuple[Any, ...]:
        recipe = load_recipe(path)
        graphs = {key: value for key, value in msgspec.to_builtins(recipe.task).items() if key != "order"}
        return graphs, recipe.model, recipe.train, msgspec.structs.replace(recipe.optim, learning_rate=0.0)

    folder = RECIPES / f"star_{task}"
    ilm = budget(folder / "ilm.yaml")
    assert ilm[0].items() >= STAR_PRESETS[f"star-{task}"].items()
    for name in ("arm", "mdm", "it", *(["armo"] if task == "easy" else [])):
        assert budget(folder / f"{name}.yaml") == ilm


def test_what_is_not_said_is_default() -> None:
    recipe = parse_recipe(SMALL, "r.yaml")
    assert recipe.train == TrainConfig(steps=5)
    assert (recipe.family, recipe.optim, recipe.decode) == (IlmConfig(), OptimConfig(), DecodeConfig())


@pytest.mark.parametrize("name", STAR_PRESETS)
def test_presets_lie_beneath_the_keys_given(name: str) -> None:
    tree = {**SMALL, "task": {"preset": name, "seed": 7}, "model": {"preset": "paper", "dropout": 0.0}}
    recipe = parse_recipe(tree, "r.yaml")
    assert recipe.task == Star(**STAR_PRESETS[name], seed=7)
    assert recipe.model == ModelConfig(**{**MODEL_PRESETS["paper"], "dropout": 0.0})


def test_a_section_without_keys_is_empty() -> None:
    assert parse_recipe({**SMALL, "optim": None, "family": {}}, "r.yaml") == parse_recipe(SMALL, "r.yaml")


def test_numbers_may_be_written_the_yaml_way(tmp_path: Path) -> None:
    path = written(tmp_path, "task: {preset: star-easy}\nmodel: {preset: mini}\ntrain: {steps: 1_000}\n")
    overrides = [("optim.learning_rate", "1e-3"), ("decode.max_length", "null"), ("model.prefix_lm", "true")]
    recipe = load_recipe(path, overrides)
    assert recipe.train.steps == 1000
    assert recipe.optim.learning_rate == 1e-3
    assert recipe.decode.max_length is None
    assert recipe.model.prefix_lm is True


def test_overrides_go_on_top_and_the_last_one_wins(tmp_path: Path) -> None:
    path = written(tmp_path, yaml.safe_dump(SMALL))
    overrides = [("train.steps", "7"), ("model.preset", "paper"), ("train.steps", "8"), ("family.stop_weight", "2")]
    recipe = load_recipe(path, overrides)
    assert (recipe.train.steps, recipe.model.width, recipe.family) == (8, 768, IlmConfig(stop_weight=2.0))


def test_differences_name_every_key_that_differs() -> None:
    ours = parse_recipe(SMALL, "r.yaml")
    theirs = parse_recipe({**SMALL, "train": {"steps": 6, "seed": 2}}, "r.yaml")
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == ["train.seed is 2, not 1", "train.steps is 6, not 5"]


# --- Mistakes in a tree


@pytest.mark.parametrize(
    ("section", "keys", "expected"),
    [
        ("train", {"steps": "abc"}, "train.steps: expected int, got 'abc'"),
        ("train", {"steps": 1.5}, "train.steps: expected int, got 1.5"),
        ("train", {"steps": True}, "train.steps: expected int, got True"),
        ("train", {"steps": None}, "train.steps: expected int, got None"),
        ("train", {"steps": [5]}, "train.steps: expected int, got [5]"),
        ("train", {"steps": 0}, "train.steps: expected int >= 1, got 0"),
        ("train", {"steps": 10**30}, f"train.steps: expected int <= 2147483647, got {10**30}"),
        ("train", {"steps": 5, "compile": "maybe"}, "train.compile: expected bool, got 'maybe'"),
        (
            "train",
            {"steps": 5, "precision": "int8"},
            "train.precision: expected one of auto, float32, bfloat16, got 'int8'",
        ),
        ("train", {"steps": 5, "tracker": "x"}, "train.tracker: expected one of none, tensorboard, wandb, got 'x'"),
        ("train", {"steps": 5, "step": 6}, "train.step: unknown key; did you mean steps?"),
        (
            "family",
            {"ends": 0.5},
            "family.ends: a key of an older version; remove it if it is 0, else write family.group and family.frame",
        ),
        ("train", {"steps": 5, "compile": None}, "train.compile: null is a value of an older version; write true"),
        ("train", {"steps": 5, "precision": None}, "train.precision: null is a value of an older version; write auto"),
        ("train", {"steps": 5, 1: 2}, "train: expected names as keys, got 1"),
        ("train", {"steps": 5, "a`b": 2}, "train: expected names as keys, got 'a`b'"),
        ("train", {}, "train.steps: missing; expected this key"),
        ("train", None, "train.steps: missing; expected this key"),
        ("train", [1, 2], "train: expected a mapping of keys, got [1, 2]"),
        ("train", 3, "train: expected a mapping of keys, got 3"),
        ("optim", {"beta1": 1.5}, "optim.beta1: expected float < 1.0, got 1.5"),
        ("optim", {"learning_rate": float("nan")}, "optim.learning_rate: expected float >= 0.0, got nan"),
        ("optim", {"learning_rate": ".inf"}, "optim.learning_rate: expected float, got '.inf'"),
        ("optim", {"learning_rate": float("inf")}, "optim.learning_rate: expected a number below 2^63, got inf"),
        ("optim", {"lr": 1}, "optim.lr: unknown key; expected one of "),
        (
            "model",
            {"preset": "huge"},
            f"model.preset: expected one of {MODELS}, got 'huge'",
        ),
        (
            "model",
            {"preset": [1]},
            f"model.preset: expected one of {MODELS}, got [1]",
        ),
        (
            "model",
            {"layers": 2},
            f"model.width: missing; expected this key, or model.preset: one of {MODELS}",
        ),
        ("model", {"preset": "mini", "max_length": 9}, "recipe: the task has rows of 36 tokens; model.max_length is 9"),
        ("family", {"solver": 0.5}, "recipe: family.solver is 0.5; expected 0 for a task without a solver"),
        ("family", {"name": "mdm", "block": 5}, "recipe: "),
        ("model", {"preset": "mini", "heads": 3}, "model: width 128 does not split into 3 heads of an even size"),
        ("task", {"name": "chess"}, "task.name: expected one of star, zebra, sudoku, text, got 'chess'"),
        ("task", {"preset": "zebra", "order": "forward"}, "task.order: expected one of sorted, solver, got 'forward'"),
        (
            "task",
            {"preset": "star-easy", "order": "solver"},
            "task.order: expected one of forward, reversed, got 'solver'",
        ),
        ("task", {"preset": "zebra", "max_houses": 7}, "task.max_houses: expected int <= 6, got 7"),
        ("task", {"preset": "zebra", "min_houses": 2}, "task.min_houses: expected int >= 3, got 2"),
        (
            "task",
            {"preset": "zebra", "degree": 7},
            "task.degree: unknown key; expected one of preset, name, ",
        ),
        ("task", {"name": "zebra", "min_houses": 5, "max_houses": 4}, "task: min_houses 5 is more than max_houses 4"),
        ("task", {"preset": "star-easy", "nodes": 3}, "task: nodes 3 are too few for 3 paths of 5 nodes; expected "),
        ("family", {"name": "lstm"}, "family.name: expected one of "),
        ("decode", {"top_p": 0}, "decode: top_p is 0; expected 0 < top_p <= 1"),
        ("decoding", {}, "decoding: unknown section; did you mean decode?"),
        (3, {}, "expected names as keys, got 3"),
    ],
)
def test_a_mistake_names_its_place_and_what_was_expected(section: Any, keys: Any, expected: str) -> None:
    found = message({**SMALL, section: keys})
    assert found.startswith(f"r.yaml: {expected}")
    assert expected.endswith((" ", "one of ")) or found == f"r.yaml: {expected}"


@pytest.mark.parametrize("section", ["task", "model", "train"])
def test_a_missing_section_is_named(section: str) -> None:
    tree = {name: keys for name, keys in SMALL.items() if name != section}
    assert message(tree) == f"r.yaml: {section}: missing; expected this section"


# --- Mistakes on the command line and in files


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", "abc", "--train.steps: expected int, got 'abc'"),
        ("train.steps", "", "--train.steps: expected int, got ''"),
        ("train.steps", "-5", "--train.steps: expected int >= 1, got -5"),
        ("train.steps", "[", "--train.steps: not a YAML value: '['"),
        ("train.steps", "2024-13-45", "--train.steps: not a YAML value: '2024-13-45'"),
        ("train.stepz", "5", "--train.stepz: unknown key; did you mean steps?"),
        ("train.steps.more", "5", "--train.steps.more: unknown key; did you mean steps?"),
        ("train.", "5", "--train.: expected --section.key value, for example --train.steps 200"),
        ("train", "5", "--train: expected --section.key value, for example --train.steps 200"),
        ("trian.steps", "5", "--trian.steps: unknown section; did you mean train?"),
        (
            "model.preset",
            "huge",
            f"--model.preset: expected one of {MODELS}, got 'huge'",
        ),
        ("model.heads", "3", "r.yaml: model: width 128 does not split into 3 heads of an even size"),
    ],
)
def test_a_wrong_override_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, yaml.safe_dump(SMALL))
    with pytest.raises(InsertlmError) as caught:
        load_recipe(Path("r.yaml"), [(key, value)])
    assert str(caught.value) == expected


SECTIONS = "expected the sections task, model, train, family, optim, decode"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", f"is empty; {SECTIONS}"),
        ("# nothing\n", f"is empty; {SECTIONS}"),
        ("- a\n- b\n", f"{SECTIONS}, got ['a', 'b']"),
        ("text", f"{SECTIONS}, got 'text'"),
        ("a: b: c", "not YAML: mapping values are not allowed here "),
        ("train: {steps: !!bool x}", "not YAML: 'x'"),
        ("train: {steps: 5, seed: 1, steps: 3}", "not YAML: steps is there twice in "),
        ("? [1, 2]\n: 3", "not YAML: while constructing a mapping "),
        ("train: &a {steps: *b}", "not YAML: found undefined alias 'b' "),
        ("[" * 5000, "not YAML: maximum recursion depth exceeded"),
        (b"\xff\xfe\x00", "not YAML: "),
        (b"a: \xc3\x28", "not YAML: "),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, content: str | bytes, expected: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InsertlmError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: {expected}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InsertlmError) as caught:
        load_recipe(tmp_path / "none.yaml")
    assert str(caught.value) == f"{tmp_path / 'none.yaml'}: no such file; expected a recipe, a YAML file"
    with pytest.raises(InsertlmError) as caught:
        load_recipe(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a folder; expected a recipe, a YAML file"
    with pytest.raises(InsertlmError, match="cannot be read: File name too long"):
        load_recipe(tmp_path / ("x" * 300))


def test_changes_of_the_decode_section() -> None:
    assert change_decode(DecodeConfig(), {"temperature": 1, "joint": True}) == DecodeConfig(temperature=1.0, joint=True)
    with pytest.raises(InsertlmError, match=r"^decode.temperature: expected float >= 0.0, got -1$"):
        change_decode(DecodeConfig(), {"temperature": -1})
    with pytest.raises(InsertlmError, match=r"^--decode.temprature: unknown key; did you mean temperature\?$"):
        change_decode(DecodeConfig(), {"temprature": 1}, ["decode.temprature"])


# --- Properties

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
sections = [field.name for field in msgspec.structs.fields(Recipe)]
kinds = [kind for field in msgspec.structs.fields(Recipe) for kind in get_args(field.type) or (field.type,)]
known_keys = sorted({key.name for kind in kinds for key in msgspec.structs.fields(kind)} | {"name", "preset"})
keys = st.sampled_from(known_keys) | st.text(max_size=6) | st.integers() | st.none()
names = st.sampled_from(sections) | st.text(max_size=6) | st.booleans()


@given(st.dictionaries(names, anything | st.dictionaries(keys, anything, max_size=4), max_size=4))
def test_no_tree_gives_anything_but_a_recipe_or_one_line(tree: dict[Any, Any]) -> None:
    try:
        recipe = parse_recipe({**SMALL, **tree}, "r.yaml")
    except InsertlmError as error:
        assert str(error).startswith("r.yaml: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(recipe, Recipe)


@given(
    st.tuples(st.sampled_from(sections) | st.text(max_size=6), st.sampled_from(known_keys) | st.text(max_size=6)),
    st.text(max_size=12)
    | anything.map(str)
    | st.sampled_from(["!!bool x", "!!timestamp x", "0b_", "=", "0x" + "f" * 5000]),
)
def test_no_override_gives_anything_but_a_recipe_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, str], value: str
) -> None:
    path = written(tmp_path_factory.getbasetemp(), yaml.safe_dump(SMALL))
    try:
        load_recipe(path, [(".".join(place), value)])
    except InsertlmError as error:
        assert str(error).startswith((f"--{'.'.join(place)}: ", f"{path}: "))


@given(st.binary(max_size=30) | st.text(alphabet="ab:[]{}-,&*!'\"\n #<=>|%@`0.", max_size=30).map(str.encode))
def test_no_file_gives_anything_but_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = written(tmp_path_factory.getbasetemp(), content)
    with pytest.raises(InsertlmError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe whose values are in range."""
    shares = st.floats(0, 1)
    counts = st.integers(1, 2**31 - 1)
    min_nodes = draw(st.integers(2, 9))
    max_nodes = min_nodes + draw(st.integers(0, 5))
    degree, heads = draw(st.integers(1, 9)), draw(st.integers(1, 16))
    task = Star(
        degree=degree,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        min_plan=draw(st.integers(1, min_nodes - 1)),
        nodes=degree * (max_nodes - 1) + 1 + draw(st.integers(0, 9)),
    )
    model = ModelConfig(
        layers=draw(counts),
        width=2 * heads * draw(st.integers(1, 64)),
        heads=heads,
        hidden=draw(counts),
        dropout=draw(st.floats(0, 1, exclude_max=True)),
        prefix_lm=draw(st.booleans()),
    )
    train = TrainConfig(
        steps=draw(counts),
        seed=draw(st.integers(0, 2**31 - 1)),
        compile=draw(st.booleans()),
        precision=draw(st.sampled_from(["auto", "float32", "bfloat16"])),
        tracker=draw(st.sampled_from(["none", "tensorboard", "wandb"])),
    )
    optim = OptimConfig(learning_rate=draw(st.floats(0, 1e18)), ema=draw(shares), warmup=draw(st.integers(0, 10**6)))
    decode = DecodeConfig(stop_threshold=draw(shares), temperature=draw(st.floats(0, 100)), joint=draw(st.booleans()))
    return Recipe(task=task, model=model, train=train, optim=optim, decode=decode)


@given(recipes())
def test_a_recipe_survives_yaml(recipe: Recipe) -> None:
    assert parse_recipe(yaml.safe_load(to_yaml(recipe)), "r.yaml") == recipe


@given(recipes())
def test_every_key_of_a_recipe_can_be_given_as_an_override(recipe: Recipe) -> None:
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(recipe)
    typed = {
        section: {key: parse_value(f"{section}.{key}", yaml.safe_dump(value)) for key, value in values.items()}
        for section, values in tree.items()
    }
    assert parse_recipe(typed, "r.yaml") == recipe


@pytest.mark.parametrize("recompute", [False, True])
def test_the_backbone_knows_whether_to_recompute(recompute: bool) -> None:
    recipe = parse_recipe({**SMALL, "train": {"steps": 1, "recompute": recompute}}, "r.yaml")
    assert build_family(recipe).backbone.recompute is recompute
