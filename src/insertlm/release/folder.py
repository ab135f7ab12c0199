"""A trained model as a folder that transformers can load without insertlm; `insertlm.load` reads it, too.

- The folder is written under another name and renamed when it is complete, so an export is there whole or not at all.
- SHA256SUMS has the hash of every file but the model card, which its owner may edit. Loading checks them.
- Only an empty folder, or one that holds nothing but an earlier export, is replaced.
- Weights are float32 under the names of the package, bit for bit those of the model.
- recipe.yaml is the model's recipe. It names files without their folders, which are private.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import safetensors.torch
import tokenizers

from insertlm.core.errors import InsertlmError
from insertlm.core.files import sync, write_durably, writing
from insertlm.core.version import VERSION
from insertlm.families.both import Both
from insertlm.families.corruption.blanks import MOST
from insertlm.families.corruption.laid_out import HINTS
from insertlm.families.fill import FillConfig, Filler
from insertlm.families.ilm import ILM
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import Recipe, portable, to_yaml
from insertlm.release.card import model_card
from insertlm.storage.checksums import SUMS, sums_of
from insertlm.storage.hub import FILES

if TYPE_CHECKING:
    from insertlm.model import Model

__all__ = ["check_exportable", "check_place", "export"]

_CODE = Path(__file__).with_name("modeling_insertlm.py")
_BESIDE = ("filling_insertlm.py", "writing_insertlm.py")  # what it imports from
_FAMILIES = ("fill", "both", "ilm", "it", "arm")
_REASONS = {"mdm": ": an mdm must be told how long every blank is, and its network is another one"}
# What transformers calls our special tokens.
_ROLES = {"stop": "cls", "bos": "bos", "eos": "eos", "unk": "unk", "pad": "pad", "mask": "mask"}


def check_place(folder: Path) -> None:
    """Refuse a place where no export may go, before the work starts."""
    with writing(folder):
        if not folder.parent.is_dir():
            raise InsertlmError(f"cannot write {folder}: there is no folder {folder.parent}")
        if not os.access(folder.parent, os.W_OK):
            raise InsertlmError(f"cannot write {folder}: no permission to write to the folder {folder.parent}")
        if folder.exists() and not folder.is_dir():
            raise InsertlmError(f"cannot write {folder}: it is a file; expected a new folder")
        found = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    # Only a folder with our code in it can be an export; any other file in it belongs to the user.
    strange = found - set(FILES) if _CODE.name in found else found
    if strange:
        raise InsertlmError(
            f"cannot write {folder}: it holds {min(strange)}; expected a new folder, or an export to replace"
        )


def check_exportable(recipe: Recipe, name: str) -> None:
    """Refuse models that modeling_insertlm.py does not support."""
    if recipe.task.kind != "text":
        raise InsertlmError(f"{name}: this is a model of the task {recipe.task.tag}; expected a model of text")
    if (family := recipe.family.tag) not in _FAMILIES:
        raise InsertlmError(
            f"{name}: this is a model of the family {family}; only {', '.join(_FAMILIES)} can be exported"
            + _REASONS.get(family, "")
        )
    if isinstance(recipe.family, FillConfig) and (recipe.family.sight, recipe.family.positions) != ("both", "blank"):
        raise InsertlmError(
            f"{name}: the exported code knows fillers with sight: both and positions: blank only; this one has sight: "
            f"{recipe.family.sight} and positions: {recipe.family.positions}"
        )
    if family == "both" and recipe.decode.order != "auto":
        raise InsertlmError(
            f"{name}: an export of the family both writes from left to right; expected decode.order auto in its "
            f"recipe, got {recipe.decode.order}"
        )


def export(model: Model, folder: Path, name: str | None = None) -> None:
    """Write the model, completely or not at all. name: for the model card (default: the name of the folder)"""
    check_exportable(model.recipe, model.name)
    place = folder.resolve()
    check_place(place)
    new, old = (place.with_name(f".{place.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        with writing(folder):
            new.mkdir()
            # The files reach the disk before the rename does, so a power cut leaves no half export either.
            for file, data in _contents(model, name or place.name).items():
                write_durably(new / file, data)
            sync(new)
            if place.exists():
                place.rename(old)
            new.rename(place)
            sync(place.parent)
    finally:
        if old.exists() and not place.exists():  # the rename failed, so put the earlier export back
            old.rename(place)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def _contents(model: Model, name: str) -> dict[str, bytes]:
    """The files of the folder, by name."""
    recipe, files = portable(model.recipe), model.recipe.task.files()
    weights = {key: value.detach().float().contiguous().cpu() for key, value in model.family.state_dict().items()}
    written = {
        "README.md": model_card(model, recipe, name),
        "config.json": _json(_config(model)),
        **{name: _CODE.with_name(name).read_text(encoding="utf-8") for name in (_CODE.name, *_BESIDE)},
        "recipe.yaml": to_yaml(recipe),
        "tokenizer_config.json": _json(_tokenizer_config(model, files["tokenizer.json"])),
    }
    binary = {"model.safetensors": safetensors.torch.save(weights, metadata={"format": "pt"})}
    contents = {**{key: text.encode() for key, text in written.items()}, **files, **binary}
    contents[SUMS] = sums_of({key: data for key, data in contents.items() if key != "README.md"})
    assert contents.keys() == set(FILES)  # else check_place would not recognise its own exports
    return contents


def _config(model: Model) -> dict[str, Any]:
    """The keys of InsertlmConfig in modeling_insertlm.py, which are named as in transformers."""
    family, shape, tokenizer = model.family, model.recipe.model, model.text_tokenizer
    specials, rows = tokenizer.specials, family.backbone.embedding.num_embeddings
    return {
        "model_type": "insertlm",
        "architectures": ["InsertlmModel"],
        "auto_map": {name: f"{_CODE.stem}.Insertlm{name.removeprefix('Auto')}" for name in ("AutoConfig", "AutoModel")},
        "dtype": "float32",
        "family": model.recipe.family.tag,
        "gates": isinstance(family, ILM | Both) and family.gated,
        "framing": family.framing,
        "fill": _fill_config(family) if isinstance(family, Filler) else None,
        "vocab_size": rows,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.max_length,
        "shape": _differences(shape),
        "tie_word_embeddings": shape.tied,
        "stop_token_id": specials.stop,
        "bos_token_id": specials.bos,
        "eos_token_id": specials.eos,
        "pad_token_id": specials.pad,
        "reserved": sorted(set(range(rows)) - set(tokenizer.writable)),
        "decode": _decode(model),
        "insertlm_version": VERSION,
    }


def _fill_config(family: Filler) -> dict[str, Any]:
    layout = family.layout
    hints = layout.hints if family.abilities.takes_hints else 0  # 0 is the id of no hint
    return {"most": MOST, "jump": layout.jump, "mask_id": layout.blank, "hint_ids": hints, "hints": HINTS}


def _decode(model: Model) -> dict[str, Any]:
    """The decode settings that the model can use there. Only a filler writes several tokens in a step."""
    family, settings = model.family, msgspec.to_builtins(model.recipe.decode)
    can = family.from_left_to_right if isinstance(family, Both) else family.abilities
    used = {
        "stop_threshold": can.stop_threshold,
        "order": bool(can.orders),
        "parallel": isinstance(family, Filler) and can.parallel,
        "confidence": False,
        "joint": can.draws_places,
        "position_top_k": can.draws_places,
        "best_of": False,
    }
    return {key: value for key, value in settings.items() if used.get(key, True)}


def _differences(shape: ModelConfig) -> dict[str, Any]:
    """Keys of the transformer that are not the default."""
    plain = ModelConfig(layers=1, width=2, heads=1, hidden=1)
    known = {"layers", "width", "heads", "hidden", "max_length", "dropout", "prefix_lm", "tied"}
    keys = {key: value for key, value in msgspec.to_builtins(shape).items() if key not in known}
    return {key: value for key, value in keys.items() if value != getattr(plain, key)}


def _tokenizer_config(model: Model, tokenizer: bytes) -> dict[str, Any]:
    """Special tokens outside the tokenizer's vocabulary have no name there; config.json holds their ids."""
    inner, specials = tokenizers.Tokenizer.from_buffer(tokenizer), model.text_tokenizer.specials
    names = {f"{_ROLES[role]}_token": inner.id_to_token(i) for role, i in specials._asdict().items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.family.longest_text,
        **{role: name for role, name in names.items() if name is not None},
    }


def _json(values: Mapping[str, Any]) -> str:
    return f"{json.dumps(values, indent=2)}\n"
