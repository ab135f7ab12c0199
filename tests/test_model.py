"""The door for Python users: the README's example, and what they can get wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import insertlm
from insertlm import model as api
from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.model import choose_device
from insertlm.nn.eight_bits import EightBits, supported
from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.storage import checkpoints
from insertlm.storage.weights import pack_groups

GRAPH = "1>2 2>3 4>2 2>5 : 1 3"
RECIPE = parse_recipe(
    {
        "task": {"name": "star", "degree": 2, "min_nodes": 3, "max_nodes": 3, "min_plan": 2, "nodes": 8},
        "model": {"layers": 2, "width": 16, "heads": 2, "hidden": 32},
        "train": {"steps": 1},
        "decode": {"max_steps": 6, "stop_threshold": 1.0},
    },
    "test",
)


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one bundled model, not trained."""
    folder = tmp_path / "assets" / api.ENGLISH
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(RECIPE), encoding="utf-8")
    save_file(build_family(RECIPE).state_dict(), folder / "model.safetensors")
    monkeypatch.setattr("insertlm.core.assets._ASSETS", folder.parent)
    return folder.parent


def message(name: str | Path) -> str:
    with pytest.raises(InsertlmError) as caught:
        insertlm.load(name, "cpu")
    return str(caught.value)


# --- The package


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, insertlm; insertlm.InsertlmError; insertlm.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_package_offers() -> None:
    assert insertlm.load is api.load
    assert insertlm.Model is api.Model
    assert insertlm.InsertlmError is InsertlmError
    assert insertlm.__version__[0].isdigit()
    assert set(insertlm.__all__) <= set(dir(insertlm))
    with pytest.raises(AttributeError, match="module 'insertlm' has no attribute 'lod'"):
        insertlm.lod  # type: ignore[attr-defined]  # noqa: B018


# --- Models


def test_the_example_of_the_readme(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = insertlm.load()
    [path] = model.generate([GRAPH])
    print(model.decode(path.ids))
    for event in path.events:
        print(event)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[0].split()) == 6
    assert [line.startswith("Insertion(step=") for line in lines[1:]] == [True] * 6
    assert model.bundled
    assert model.step is None
    assert not model.family.training


def test_a_text_depends_on_its_prompt_and_seed_alone(assets: Path) -> None:
    model = insertlm.load(device="cpu")
    prompts = [GRAPH, "6>2 2>7 0>2 2>5 : 6 5", GRAPH]
    together = model.generate(prompts, seed=5, temperature=1.0, position_top_k=0)
    apart = model.generate(prompts, seed=5, batch_size=1, temperature=1.0, position_top_k=0)
    [last] = model.generate(prompts[2:], seed=7, temperature=1.0, position_top_k=0)
    assert [path.ids for path in together] == [path.ids for path in apart]
    assert last.ids == together[2].ids
    assert model.generate([]) == []


def test_a_stream_is_decoded_as_asked(assets: Path) -> None:
    model = insertlm.load(device="cpu")
    drawn = model.generate([GRAPH] * 4, seed=5, temperature=3.0, position_top_k=0)
    stream = model.generate([GRAPH] * 4, seed=5, temperature=3.0, position_top_k=0, stream=True)
    assert [path.ids for path in stream.results] == [path.ids for path in drawn]
    assert [path.ids for path in model.generate([GRAPH] * 4, seed=5)] != [path.ids for path in drawn]


def test_weights_are_halved_if_asked(assets: Path) -> None:
    kinds = [insertlm.load(device="cpu", halved=halved).family.parameters() for halved in (True, False)]
    assert [{value.dtype for value in values} for values in kinds] == [{torch.bfloat16, torch.float32}, {torch.float32}]


@pytest.fixture
def in_groups(assets: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """What its weights are, as they were stored: those of the bundled model are in groups now."""
    wide = msgspec.structs.replace(RECIPE, model=msgspec.structs.replace(RECIPE.model, width=64, hidden=96))
    (assets / api.ENGLISH / "recipe.yaml").write_text(to_yaml(wide), encoding="utf-8")
    save_file(pack_groups(build_family(wide).state_dict()), assets / api.ENGLISH / "model.safetensors")
    monkeypatch.setattr(api, "_has_bf16", lambda: True)
    return insertlm.load(device="cpu", halved=False).family


def linears(family: Family) -> set[type[nn.Module]]:
    names = "qkv", "out", "up", "down"
    return {type(block.get_submodule(name)) for block in family.backbone.blocks for name in names}


@pytest.mark.skipif(not supported(), reason="this torch has no such kernel for this CPU")
@pytest.mark.parametrize("halved", [None, True])
def test_weights_in_groups_are_written_with_in_eight_bits(in_groups: Family, halved: bool | None) -> None:
    found = insertlm.load(device="cpu", halved=halved)
    assert linears(found.family) == {EightBits}
    assert not linears(in_groups) & {EightBits}
    assert all(len(path.events) == 6 for path in found.generate([GRAPH] * 3))
    count, whole = (sum(value.numel() for value in each.parameters()) for each in (found.family, in_groups))
    assert count == whole
    # What is saved of it has the names of the model, and nearly its weights.
    saved, exact = found.family.state_dict(), in_groups.state_dict()
    assert [*saved] == [*exact]
    for name, value in exact.items():
        step = value.abs().amax(-1, keepdim=True) / 127 if value.dim() > 1 else torch.zeros(1)
        assert bool(((saved[name] - value).abs() <= 0.51 * step).all())


@pytest.mark.parametrize("lacking", ["_has_bf16", "supported"])
def test_without_the_kernel_weights_in_groups_stay_as_they_were(
    in_groups: Family, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, lacking, lambda: False)
    found = insertlm.load(device="cpu", halved=True).family
    assert not linears(found) & {EightBits}
    assert {value.dtype for value in found.backbone.blocks.parameters() if value.dim() == 2} == {torch.bfloat16}


def test_a_run_gives_the_averaged_weights_of_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(RECIPE), encoding="utf-8")
    weights = build_family(RECIPE).state_dict()
    for step in (10, 20):
        ema = {name: torch.full_like(value, step) for name, value in weights.items()}
        checkpoints.save(tmp_path / "checkpoints", step, {"weights": weights, "ema": ema, "optimizer": {}}, keep=2)
    model = insertlm.load(tmp_path, "cpu")
    assert model.step == 20
    assert not model.bundled
    assert all(bool((value == 20).all()) for value in model.family.parameters())


def test_half_precision_weights_are_read_as_full(assets: Path) -> None:
    file = assets / api.ENGLISH / "model.safetensors"
    save_file({name: value.half() for name, value in load_file(file).items()}, file)
    model = insertlm.load(device="cpu")
    assert {value.dtype for value in model.family.parameters()} == {torch.float32}


# --- Mistakes


def test_a_model_that_is_not_there(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "nowhere: no model there; expected a run folder with recipe.yaml"
    assert message("nowhere") == f"{expected}, or a bundled model (english)"
    assert message("x" * 300).endswith(": cannot be read: File name too long")
    monkeypatch.setattr("insertlm.core.assets._ASSETS", assets / "none")
    assert message("nowhere") == expected


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(RECIPE), encoding="utf-8")
    assert message(tmp_path) == f"{tmp_path}: no checkpoint yet; expected {tmp_path / 'checkpoints'}/step-…"


def test_weights_that_are_cut_short(assets: Path) -> None:
    file = assets / api.ENGLISH / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert message(api.ENGLISH).startswith(f"{file}: expected a safetensors file: ")
    file.write_bytes(b"")
    assert message(api.ENGLISH).startswith(f"{file}: expected a safetensors file: ")


def test_weights_that_do_not_fit(assets: Path) -> None:
    folder = assets / api.ENGLISH
    weights = load_file(folder / "model.safetensors")
    name = "unembedding.weight"
    save_file({**weights, name: torch.zeros(3, 16)}, folder / "model.safetensors")
    expected = f"{folder}: the weights do not fit the recipe: {name} is"
    assert message(api.ENGLISH) == f"{expected} (3, 16), expected (16, 16)"
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")
    assert message(api.ENGLISH) == f"{expected} missing, expected (16, 16)"
    save_file({**weights, "more": torch.zeros(1)}, folder / "model.safetensors")
    assert message(api.ENGLISH).endswith("more is (1,), expected nothing of that name")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "expected one or more edges, then source and goal; got 0 nodes"),
        ("1>2 2>9 : 1 2", "unknown node '9' at word 4; expected 0 … 7"),
        ("1>2 2>3 : 1 7", "goal 7 is in none of the edges"),
        (" ".join(["1>2"] * 5) + " : 1 2", "prefix of 12 tokens is longer than the 10 this task allows"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_number(assets: Path, prompt: str, expected: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        insertlm.load(device="cpu").generate([GRAPH, prompt])
    assert str(caught.value) == f"prompt 1: {expected}"


def test_wrong_arguments_of_generate(assets: Path) -> None:
    model = insertlm.load(device="cpu")
    for prompts in (GRAPH, None, 7):
        with pytest.raises(InsertlmError, match=r"^generate: expected a list of prompts, got ('1>2|None|7)"):
            model.generate(cast(Any, prompts))
    with pytest.raises(InsertlmError, match=r"^prompt 1: expected a prompt as text, got \[1, 2, 3\]$"):
        model.generate(cast(Any, [GRAPH, [1, 2, 3]]))
    wrong: dict[str, list[Any]] = {"seed": [-1, 1 << 62, 1.5, "1", None, True], "batch_size": [0, -3, "x", 2.0]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InsertlmError, match=rf"^{name}: expected a whole number of at (least|most) .*, got "):
                model.generate([GRAPH], **{name: value})
    with pytest.raises(InsertlmError, match=r"^decode.top_p: expected float <= 1.0, got 2$"):
        model.generate([GRAPH], top_p=2)
    with pytest.raises(InsertlmError, match=r"^decode.top_q: unknown key; did you mean top_p\?$"):
        model.generate([GRAPH], top_q=1)


def test_numbers_of_numpy_are_numbers(assets: Path) -> None:
    model = insertlm.load(device="cpu")
    [path] = model.generate([GRAPH], seed=3, temperature=0.5, top_k=2)
    [same] = model.generate([GRAPH], seed=cast(int, np.int64(3)), temperature=np.float32(0.5), top_k=np.int32(2))
    assert path == same
    arrays: list[Any] = [np.array(path.ids), torch.tensor(path.ids)]
    assert [model.decode(array) for array in arrays] == [model.decode(path.ids)] * 2


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([-1], "decode: an id: expected a whole number of at least 0, got -1"),
        ([10**9], "decode: an id: expected a whole number of at most 15, got 1000000000"),
        ([0, 1.5], "decode: an id: expected a whole number of at least 0, got 1.5"),
        (None, "decode: expected a list of ids, got None"),
        ("12", "decode: expected a list of ids, got '12'"),
    ],
)
def test_ids_that_the_vocabulary_does_not_have(assets: Path, ids: Any, expected: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        insertlm.load(device="cpu").decode(ids)
    assert str(caught.value) == expected


def test_a_score_is_that_of_a_text(assets: Path) -> None:
    model = insertlm.load(device="cpu")
    with pytest.raises(InsertlmError, match=r"^score: expected a text, got None$"):
        model.score(cast(Any, None), GRAPH)
    with pytest.raises(InsertlmError, match=r"^expected a prompt as text, got 7$"):
        model.score("1 2", cast(Any, 7))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tpu", "unknown device 'tpu'; expected cpu or cuda"),
        ("meta", "device meta is not supported; expected cpu or cuda"),
        ("cuda", "device cuda: torch finds no GPU; expected cpu"),
    ],
)
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InsertlmError) as caught:
        choose_device(name)
    assert str(caught.value) == expected


def test_without_a_name_a_gpu_is_used_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device() == torch.device("cuda")
    with pytest.raises(InsertlmError, match=r"^device cuda:1: torch finds 1 GPU; expected cpu or cuda$"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == torch.device("cpu")
