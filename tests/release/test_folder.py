"""Exported folders: whole or not there, never in place of something else, and read back bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.core.files import write_durably
from insertlm.model import load
from insertlm.release import folder as module
from insertlm.release.folder import export
from insertlm.storage.checksums import SUMS
from insertlm.storage.hub import FILES
from insertlm.storage.weights import pack_groups


@pytest.fixture
def run(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_package_reads_it_back_bit_for_bit(text_run: Path, exported: Path) -> None:
    ours, theirs = load(text_run, "cpu"), load(exported, "cpu")
    weights = theirs.family.state_dict()
    assert all(weights[name].equal(value) for name, value in ours.family.state_dict().items())
    assert ours.text_tokenizer.specials == theirs.text_tokenizer.specials
    assert ours.recipe.decode == theirs.recipe.decode
    [mine], [yours] = (model.infill("The ___ sat.", seed=3, temperature=1.0) for model in (ours, theirs))
    assert mine.trajectory == yours.trajectory


def test_an_export_of_an_export_is_the_same(exported: Path, tmp_path: Path) -> None:
    export(load(exported, "cpu"), tmp_path / exported.name)
    assert content(tmp_path / exported.name) == content(exported)


def test_weights_that_a_cpu_rounds_to_write_are_exported_as_they_are_stored(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insertlm.model._has_bf16", lambda: True)
    stored = make_run(tmp_path / "run", "fill", model={"width": 32, "hidden": 64, "max_length": 90})
    released = tmp_path / "released"
    export(load(stored, "cpu"), released)
    save_file(pack_groups(load(stored, "cpu").family.state_dict()), released / "model.safetensors")
    (released / SUMS).unlink()
    expected = load(released, "cpu", halved=False).family.state_dict()
    assert main(["export", str(released), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(found[name].equal(value) for name, value in expected.items())
    rounded = load(released, "cpu").family.state_dict()
    assert not all(rounded[name].equal(value) for name, value in expected.items())


def test_it_holds_what_transformers_and_readers_look_for(exported: Path) -> None:
    assert set(content(exported)) == set(FILES)
    config = json.loads((exported / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_insertlm.InsertlmModel"
    _, front, card = (exported / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert 'AutoModel.from_pretrained("exported", trust_remote_code=True)' in card
    assert "20 steps of 64 texts" in card


def test_no_folder_of_this_machine_is_named(exported: Path) -> None:
    for name, data in content(exported).items():
        assert b"/home/me" not in data and str(exported.parent).encode() not in data, name
    assert "a.jsonl" in (exported / "recipe.yaml").read_text()


def test_the_code_imports_torch_and_transformers_alone() -> None:
    """And what lies beside it in the exported folder."""
    files = {module._CODE.name, *module._BESIDE}
    code = "".join(module._CODE.with_name(name).read_text(encoding="utf-8") for name in files)
    found = {line.split()[1] for line in code.splitlines() if line.startswith(("import ", "from "))}
    beside = {name for name in found if name.startswith(".")}
    assert {f"{name.removeprefix('.')}.py" for name in beside} < files
    others = {name.partition(".")[0] for name in found - beside}
    assert others - sys.stdlib_module_names == {"torch", "transformers"}


def test_a_run_that_ended_early_says_so(run: Path, tmp_path: Path) -> None:
    from insertlm.storage import checkpoints

    model = load(run, "cpu")
    (run / "model.safetensors").unlink()
    checkpoints.save(run / "checkpoints", 7, {"ema": model.family.state_dict()}, 1)
    export(load(run, "cpu"), tmp_path / "out")
    assert "Training ended early, at step 7 of 20." in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_an_mdm_is_refused(make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the others write is compared with the package in test_modeling.py."""
    make_run(tmp_path / "run", "mdm")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "insertlm: run: this is a model of the family mdm; only fill, both, ilm, it, arm can be exported: "
        "an mdm must be told how long every blank is, and its network is another one\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keys", [{"sight": "before"}, {"positions": "plain", "hints": 0.0, "in_step": 0.0}])
def test_fillers_that_the_exported_code_does_not_know_are_refused(
    make_run: Callable[..., Path], tmp_path: Path, keys: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", "fill", keys=keys, model={"max_length": 90})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert "sight: both and positions: blank only" in line and line.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_both_is_exported_as_it_writes_from_left_to_right(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", "both", model={"max_length": 90}, order="certainty")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "insertlm: run: an export of the family both writes from left to right; expected decode.order auto in its "
        "recipe, got certainty\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "keys"), [("fill", {}), ("both", {}), ("it", {}), ("arm", {}), ("ilm", {"stop": "slots"})]
)
def test_other_families_are_read_back_bit_for_bit(
    make_run: Callable[..., Path], tmp_path: Path, family: str, keys: dict[str, Any]
) -> None:
    ours = load(make_run(tmp_path / "run", family, keys=keys, model={"max_length": 90}), "cpu")
    export(ours, tmp_path / "out")
    theirs = load(tmp_path / "out", "cpu")
    weights = theirs.family.state_dict()
    assert all(weights[name].equal(value) for name, value in ours.family.state_dict().items())
    assert theirs.recipe.family == ours.recipe.family


def test_models_of_tasks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "star-hard-mini", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("this is a model of the task star; expected a model of text\n")


# --- The folder's place


def test_an_earlier_export_is_replaced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    assert main(["export", str(run), str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}; in Python: AutoModel.from_pretrained(")
    before = content(out)
    (out / "model.safetensors").write_bytes(b"spoilt")
    assert main(["export", str(run), str(out)]) == 0
    assert content(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "checkpoints/step-1"])
def test_other_folders_are_left_alone(run: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(InsertlmError, match=f"it holds {name.partition('/')[0]}; expected a new folder, or an export"):
        export(load(run, "cpu"), tmp_path / "out")
    assert file.read_text() == "mine"


def test_an_export_with_a_file_of_ones_own_is_left_alone(run: Path, tmp_path: Path) -> None:
    export(load(run, "cpu"), tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(InsertlmError, match=r"it holds notes\.txt"):
        export(load(run, "cpu"), tmp_path / "out")


@pytest.mark.parametrize(
    ("place", "complaint"),
    [("no/such/out", "there is no folder"), ("run/recipe.yaml", "it is a file"), ("run", "it holds model.safetensors")],
)
def test_bad_places_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, complaint: str
) -> None:
    before = content(run)
    assert main(["export", str(run), str(tmp_path / place)]) == 2
    assert complaint in capsys.readouterr().err
    assert content(run) == before


def test_it_wants_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "star-hard-mini"]) == 2
    assert capsys.readouterr().err == "insertlm: expected a FOLDER to write, or --push OWNER/NAME\n"
    assert main(["export", "star-hard-mini", "out", "--private"]) == 2
    assert capsys.readouterr().err == "insertlm: --private: expected --push OWNER/NAME\n"


@pytest.mark.parametrize("files", range(len(FILES)))
def test_a_failure_leaves_all_of_the_old_or_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """The disk is full after so many files."""
    model, left = load(run, "cpu"), [files]

    def fail(path: Path, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write_durably(path, data)

    export(model, tmp_path / "old")
    before = content(tmp_path / "old")
    monkeypatch.setattr(module, "write_durably", fail)
    for name in ("old", "new"):
        left[0] = files
        with pytest.raises(InsertlmError, match=r"cannot write .*: No space left on device"):
            export(model, tmp_path / name)
    assert content(tmp_path / "old") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "run"]


def test_a_failed_swap_brings_the_old_one_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, rename = load(run, "cpu"), tmp_path / "out", Path.rename
    export(model, out)
    before = content(out)

    def fail(path: Path, target: Any) -> Path:
        if path.suffix == ".new":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InsertlmError, match="Input/output error"):
        export(model, out)
    assert content(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_weights_are_in_full_precision(exported: Path) -> None:
    from safetensors.torch import load_file

    assert {value.dtype for value in load_file(exported / "model.safetensors").values()} == {torch.float32}
