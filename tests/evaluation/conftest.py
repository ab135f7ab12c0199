"""A causal language model as transformers saves it: tiny, random, with a tokenizer of letters."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LETTERS = string.printable


def save(folder: Path, *, bos: str | None = "<s>", eos: str | None = "</s>", context: int = 64) -> Path:
    """Every letter is a token; unknown ones share another."""
    pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *LETTERS]
    letters = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    letters.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = Fuse()
    special: dict[str, Any] = {"unk_token": "<unk>", "bos_token": bos, "eos_token": eos}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **{k: v for k, v in special.items() if v})
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,  # far from uniform, so that mistakes show
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    return save


@pytest.fixture(scope="session")
def causal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("causal") / "tiny-lm")
