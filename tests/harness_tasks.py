"""For tests of lm-evaluation-harness: models that are not trained, and tasks of a few lines that need no connection."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from insertlm.recipe import build_family, parse_recipe, to_yaml
from insertlm.text.subwords import train_bpe

STORIES = [f"The {animal} number {i} sat on the mat." for i in range(30) for animal in ("cat", "dog")]
TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "The {{animal}} sat on"
doc_to_choice: [" the mat.", " the cat and the dog."]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "perplexity": """
task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The {{animal}} sat on the mat, and on the mat sat the {{animal}}."
metric_list: [{metric: word_perplexity}]
""",
    "writing": """
task: writing
output_type: generate_until
doc_to_text: "The {{animal}}"
doc_to_target: " sat"
generation_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
OWN = {"mdm": {"block": 40}, "fill": {"jump": 6}}  # keys of a family
SHARED = """
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
num_fewshot: 0
"""


def save_run(folder: Path, family: str = "ilm") -> Path:
    train_bpe(STORIES, 290).save(folder / "tokenizer.json")
    tree = {
        "task": {"name": "text", "train": "a.jsonl", "tokenizer": str(folder / "tokenizer.json"), "block": 40},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 24, "max_length": 84 if family == "fill" else 42},
        "family": {"name": family, **OWN.get(family, {})},
        "train": {"steps": 20},
    }
    recipe = parse_recipe(tree, "test")
    noise = torch.Generator().manual_seed(0)
    weights = {
        key: value + 0.1 * torch.randn(value.shape, generator=noise)
        for key, value in build_family(recipe).state_dict().items()
    }
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    return folder


def save_tasks(folder: Path) -> Path:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"animal": animal}) + "\n" for animal in ("cat", "dog", "mat")))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + SHARED.replace("FILE", str(data)))
    return folder
