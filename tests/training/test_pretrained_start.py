"""Training that begins with a pretrained causal model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from running import CPU, quiet
from safetensors.torch import load_file

from insertlm.core.errors import InsertlmError
from insertlm.model import load
from insertlm.nn.adapters.llama import read_pretrained
from insertlm.recipe import Recipe, parse_recipe
from insertlm.release import rounded
from insertlm.storage import checkpoints
from insertlm.text.subwords import load_tokenizer, train_bpe
from insertlm.training.loop import train

transformers = pytest.importorskip("transformers")

STORIES = [f"The {animal} number {i} sat on the mat." for i in range(30) for animal in ("cat", "dog")]
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 48,
    "feed_forward": "swiglu",
    "norm": "rms",
    "norm_epsilon": 1e-6,
    "final_norm": True,
    "feed_forward_bias": False,
}
FILL = {"name": "fill", "jump": 8}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random model with its tokenizer, as transformers saves them, and a corpus beside it."""
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    return saved(tmp_path / "base")


def saved(folder: Path, *, tied: bool = True, words: int = 300) -> Path:
    tokenizer = train_bpe(STORIES, words)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **LLAMA, num_key_value_heads=2, vocab_size=tokenizer.known, rms_norm_eps=1e-6, tie_word_embeddings=tied
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def recipe_of(base: Path, family: dict[str, Any] | None = None, **model: Any) -> Recipe:
    tree = {
        "task": {"name": "text", "train": str(base.parent / "a.jsonl"), "tokenizer": str(base), "block": 24},
        "model": {**SHAPE, "tied": True, "max_length": 96, **model},
        "family": family or FILL,
        "optim": {"learning_rate": 0.0, "warmup": 0, "weight_decay": 0.0},
        "train": {"steps": 1, "batch_size": 4, "start": str(base)},
    }
    return parse_recipe(tree, "test")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [FILL, {"name": "ilm"}, {"name": "mdm", "block": 24}, {"name": "arm"}], ids=str)
def test_every_family_begins_with_it(base: Path, family: dict[str, Any], tied: bool) -> None:
    """A step at a rate of 0 leaves what it began with. Tokens that are new to it have rows of their own."""
    base = saved(base.with_name("other"), tied=tied)
    run = base.parent / "run"
    train(recipe_of(base, family, tied=tied), run, CPU, quiet())
    found = checkpoints.load_part(checkpoints.select(run / "checkpoints", "last"), "ema")
    expected = read_pretrained(str(base)).weights
    known = load_tokenizer(str(base)).known
    for name, value in expected.items():
        place = found[name]
        if name.endswith(("embedding.weight", "unembedding.weight")):
            new, place = place[known:], place[:known]
            if len(new):  # near the mean, and not the same
                assert len({tuple(row) for row in new.tolist()}) == len(new)
                near = (new - value.mean(0)).norm(dim=1)
                assert bool((near < 0.5 * (value - value.mean(0)).norm(dim=1).mean()).all())
        torch.testing.assert_close(place, value, rtol=0, atol=0)
    assert ("unembedding.weight" in found) is not tied
    load(run, "cpu")


def test_what_it_has_learnt_is_kept(base: Path) -> None:
    """An ARM predicts what the causal model predicts."""
    run = base.parent / "run"
    train(recipe_of(base, {"name": "arm"}), run, CPU, quiet())
    model, text = load(run, "cpu"), "The cat number 3 sat"
    tokenizer = load_tokenizer(str(base))
    [written] = model.generate([""], max_tokens=1, temperature=0.0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.tensor([[tokenizer.specials.bos, *tokenizer.encode(text)]])
    with torch.no_grad():
        logits = theirs(ids).logits[0].log_softmax(-1)
    in_play = [*tokenizer.writable, tokenizer.specials.eos]
    first = logits[0][in_play].log_softmax(-1)
    if written.events:
        assert written.events[0].token == in_play[int(first.argmax())]
        assert written.events[0].log_probability == pytest.approx(first.max().item(), abs=1e-4)
    else:
        assert int(first.argmax()) == len(in_play) - 1
    assert math.isfinite(first.max().item())


def test_a_bundled_model_in_few_bits_is_a_start_by_its_name(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.start: english` and `task.tokenizer: english`, as recipes/english/domain_cpu.yaml has them."""
    tree, run = _tree(recipe_of(base)), base.parent / "run"
    train(parse_recipe({**tree, "optim": {**tree["optim"], "rounded": 1.0}}, "test"), run, CPU, quiet())
    rounded.main(str(run), str(base.parent / "assets" / "small"))
    packed = load_file(base.parent / "assets" / "small" / "model.safetensors")
    assert any(value.dtype == torch.uint8 for value in packed.values())

    monkeypatch.setattr("insertlm.core.assets._ASSETS", base.parent / "assets")
    again = base.parent / "again"
    task, started = {**tree["task"], "tokenizer": "small"}, {**tree["train"], "start": "small"}
    train(parse_recipe({**tree, "task": task, "train": started}, "test"), again, CPU, quiet())
    expected = load("small", "cpu", halved=False).family.state_dict()
    found = load(again, "cpu").family.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_its_shape_is_what_the_section_model_must_say(base: Path) -> None:
    with pytest.raises(InsertlmError, match=r"another network; expected there layers: 2, tied: True$"):
        train(recipe_of(base, layers=3, tied=False), base.parent / "run", CPU, quiet())


def test_another_tokenizer_is_refused(base: Path) -> None:
    other = saved(base.with_name("other"), words=290)
    recipe = recipe_of(base)
    tree = recipe_of(other)
    changed = type(recipe)(task=tree.task, model=recipe.model, train=recipe.train, family=recipe.family)
    with pytest.raises(
        InsertlmError, match=r"train\.start: .*base: has another tokenizer than task\.tokenizer; expected"
    ):
        train(changed, base.parent / "run", CPU, quiet())


def test_a_vocabulary_that_does_not_fit_is_refused(base: Path) -> None:
    """Where nothing beside the weights says which tokenizer they were trained with."""
    other = saved(base.with_name("other"), words=290)
    (other / "tokenizer.json").unlink()
    recipe = parse_recipe(
        {**_tree(recipe_of(base)), "train": {"steps": 1, "batch_size": 4, "start": str(other)}}, "test"
    )
    with pytest.raises(InsertlmError, match=r"has 290 words; task\.tokenizer has 300"):
        train(recipe, base.parent / "run", CPU, quiet())


def test_it_is_no_start_for_graphs(base: Path) -> None:
    tree = {"task": {"preset": "star-easy"}, "model": SHAPE, "train": {"steps": 1, "start": str(base)}}
    with pytest.raises(InsertlmError, match="is a model of text; expected one of the task star"):
        train(parse_recipe(tree, "test"), base.parent / "run", CPU, quiet())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "missing.gguf: no such file; expected a GGUF file"),
        ("empty", "empty: no model there"),
        ("none", "none: no model there; expected a run folder"),
    ],
)
def test_what_is_no_model(base: Path, name: str, message: str) -> None:
    (base.parent / "empty").mkdir()
    place = str(base.parent / name) if name != "none" else "none"
    tree = _tree(recipe_of(base))
    with pytest.raises(InsertlmError, match=message):
        train(
            parse_recipe({**tree, "train": {"steps": 1, "batch_size": 4, "start": place}}, "test"),
            base.parent / "run",
            CPU,
            quiet(),
        )


def _tree(recipe: Recipe) -> dict[str, Any]:
    import msgspec

    tree: dict[str, Any] = msgspec.to_builtins(recipe)
    return tree
