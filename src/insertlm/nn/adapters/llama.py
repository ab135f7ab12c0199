"""Llama-style checkpoints: a folder of transformers, an id on the Hugging Face Hub, or a GGUF file.

What differs from our layout:
- queries, keys and values are three matrices there, and so are gate and value of the feed-forward (two): here they lie
  one below the other in one;
- transformers turns pairs (i, i + half) of a head, as we do. GGUF files of this architecture turn pairs (2i, 2i + 1),
  for which their writer reordered the rows of queries and keys; here the order is put back;
- quantised weights of a GGUF file become float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.nn.spec import ModelConfig
from insertlm.nn.transformer import Transformer

__all__ = ["Pretrained", "read_pretrained"]

_BACKBONE = "backbone."
# Our names and those of both formats. What lies one below the other here has several there.
_WHOLE = {
    "backbone.embedding.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "backbone.norm.weight": ("model.norm.weight", "output_norm.weight"),
    "unembedding.weight": ("lm_head.weight", "output.weight"),
}
_BLOCK = {
    "attention_norm": (["input_layernorm"], ["attn_norm"]),
    "qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["attn_q", "attn_k", "attn_v"]),
    "out": (["self_attn.o_proj"], ["attn_output"]),
    "hidden_norm": (["post_attention_layernorm"], ["ffn_norm"]),
    "up": (["mlp.gate_proj", "mlp.up_proj"], ["ffn_gate", "ffn_up"]),
    "down": (["mlp.down_proj"], ["ffn_down"]),
}


class Pretrained(NamedTuple):
    """weights: float32, under the names they have in a family of models; without the unembedding if the model is
    tied"""

    config: ModelConfig
    weights: dict[str, Tensor]


def read_pretrained(name: str) -> Pretrained:
    """name: a folder with config.json and .safetensors files, a .gguf file, or `owner/model` on the Hub"""
    place = Path(name)
    try:
        if place.suffix == ".gguf":
            found = _read_gguf(place)
        else:
            found = _read_folder(place if place.is_dir() else _fetch(name))
    except InsertlmError as error:
        raise InsertlmError(f"{name}: {error}") from error
    except KeyError as error:
        raise InsertlmError(f"{name}: its description lacks {error.args[0]}") from error
    # What is no JSON, no safetensors file, no GGUF file; and values that are no numbers.
    except (OSError, ValueError, TypeError, ZeroDivisionError, SafetensorError) as error:
        text = reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise InsertlmError(f"{name}: cannot be read: {text}") from error
    _check(name, found)
    return found


# --- A folder of transformers


def _read_folder(folder: Path) -> Pretrained:
    if not (folder / "config.json").is_file():
        raise InsertlmError("no config.json there; expected a model as transformers saves it")
    config = _config(json.loads((folder / "config.json").read_bytes()))
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise InsertlmError("no .safetensors file there; expected the weights beside config.json")
    theirs = {name: value for part in parts for name, value in load_file(part).items()}
    return Pretrained(config, _renamed(theirs, config, 0))


def _config(keys: Mapping[str, Any]) -> ModelConfig:
    """What config.json says."""
    rotary = keys.get("rope_parameters") or keys.get("rope_scaling") or {}  # of transformers 5, and before
    _refuse("model_type", keys.get("model_type"), "llama")
    _refuse("hidden_act", keys.get("hidden_act", "silu"), "silu")
    _refuse("rope_type", rotary.get("rope_type", rotary.get("type", "default")), "default")
    heads, width = keys["num_attention_heads"], keys["hidden_size"]
    return _spec(
        layers=keys["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=keys.get("num_key_value_heads") or heads,
        head_size=keys.get("head_dim") or width // heads,
        hidden=keys["intermediate_size"],
        norm_epsilon=keys["rms_norm_eps"],
        attention_bias=keys.get("attention_bias", False),
        feed_forward_bias=keys.get("mlp_bias", False),
        rotary_base=rotary.get("rope_theta") or keys.get("rope_theta") or 10_000.0,
        max_length=keys["max_position_embeddings"],
        tied=keys.get("tie_word_embeddings", False),
    )


def _fetch(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InsertlmError("no model there; expected a folder, a .gguf file or owner/name on the Hub")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"], library_name="insertlm"))
    except ImportError as error:
        raise InsertlmError("huggingface_hub is not installed; pip install 'insertlm[hub]'") from error
    except Exception as error:  # those of several HTTP packages
        raise InsertlmError(f"no folder here, and the Hub gives none: {' '.join(str(error).split())}") from error


# --- A GGUF file


def _read_gguf(file: Path) -> Pretrained:
    try:
        import gguf
    except ImportError as error:
        raise InsertlmError("reading it needs the gguf package; pip install 'insertlm[text]'") from error
    reader = gguf.GGUFReader(file)
    keys = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    _refuse("general.architecture", keys.get("general.architecture"), "llama")
    theirs = {}
    for tensor in reader.tensors:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise InsertlmError(f"{tensor.name} has the type {kind}, which gguf cannot read") from error
        theirs[tensor.name] = torch.from_numpy(values.copy())  # the file is mapped for reading alone
    if keys.get("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in theirs:
        raise InsertlmError("its positions are scaled; expected plain rotary positions")
    heads, width = keys["attention.head_count"], keys["embedding_length"]
    config = _spec(
        layers=keys["block_count"],
        width=width,
        heads=heads,
        kv_heads=keys.get("attention.head_count_kv", heads),
        head_size=keys.get("attention.key_length", width // heads),
        hidden=keys["feed_forward_length"],
        norm_epsilon=float(f"{keys['attention.layer_norm_rms_epsilon']:.6g}"),  # stored in float32
        rotary_base=keys.get("rope.freq_base", 10_000.0),
        max_length=keys["context_length"],
        tied="output.weight" not in theirs,
    )
    for name, value in theirs.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            halves = value.view(-1, config.head_dim // 2, 2, value.shape[1])  # heads, pairs, both of a pair
            theirs[name] = halves.transpose(1, 2).reshape(value.shape)
    return Pretrained(config, _renamed(theirs, config, 1))


# --- What both have in common


def _spec(**keys: Any) -> ModelConfig:
    """A Llama with these sizes."""
    fixed = {"norm": "rms", "final_norm": True, "feed_forward": "swiglu", "feed_forward_bias": False}
    if keys["head_size"] * keys["heads"] == keys["width"]:
        del keys["head_size"]  # what it would be anyway
    head_dim = keys.get("head_size") or keys["width"] // keys["heads"]
    try:
        return msgspec.convert({**fixed, "rotary_dims": max(64, head_dim), **keys}, ModelConfig)
    except msgspec.ValidationError as error:
        raise InsertlmError(f"no transformer of ours: {error}") from error


def _refuse(key: str, found: object, expected: str) -> None:
    if found != expected:
        raise InsertlmError(f"{key} is {found}; expected {expected}, the only one that can be read")


def _renamed(theirs: Mapping[str, Tensor], config: ModelConfig, form: int) -> dict[str, Tensor]:
    """form: 0 for names of transformers, 1 for those of GGUF"""
    whole = {ours: [names[form]] for ours, names in _WHOLE.items() if not (config.tied and ours.startswith("un"))}
    for layer in range(config.layers):
        at = (f"model.layers.{layer}.", f"blk.{layer}.")[form]
        for ours, names in _BLOCK.items():
            for part in ("weight", "bias"):
                there = [f"{at}{name}.{part}" for name in names[form]]
                if part == "weight" or there[0] in theirs:
                    whole[f"{_BACKBONE}blocks.{layer}.{ours}.{part}"] = there
    if missing := [name for names in whole.values() for name in names if name not in theirs]:
        raise InsertlmError(f"the weights lack {missing[0]}")
    return {ours: torch.cat([theirs[name].float() for name in names]) for ours, names in whole.items()}


def _check(name: str, found: Pretrained) -> None:
    """Every weight that the description asks for, in its shape, and no other."""
    vocabulary = len(found.weights["backbone.embedding.weight"])
    with torch.device("meta"):
        backbone = Transformer(found.config, vocabulary)
    expected = {f"{_BACKBONE}{key}": tuple(value.shape) for key, value in backbone.state_dict().items()}
    if not found.config.tied:
        expected["unembedding.weight"] = vocabulary, found.config.width
    shapes = {key: tuple(value.shape) for key, value in found.weights.items()}
    for key in sorted(expected.keys() | shapes.keys()):
        if expected.get(key) != shapes.get(key):
            there, here = shapes.get(key, "missing"), expected.get(key, "nothing")
            raise InsertlmError(f"{name}: the weights do not fit its description: {key} is {there}, expected {here}")
