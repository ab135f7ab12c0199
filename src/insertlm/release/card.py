"""The model card of an export: what the model is, how to use it and how it was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insertlm.core.version import VERSION
from insertlm.recipe import Recipe

if TYPE_CHECKING:
    from insertlm.model import Model

__all__ = ["model_card"]

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- insertion-language-model
- infilling
- insertlm
---

# {name}

An insertion language model: it writes a text by inserting one token at a time, anywhere in it, and decides itself when
the text is complete. It fills in any number of blanks of unknown length, all together.

```python
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
print(model.infill("Lily found ___. She ___ all day.", tokenizer).text)
```

The name is the path of this folder, or its id on the Hub. Only torch and transformers are needed; the code is one file,
`modeling_insertlm.py`. `model.infill("___", tokenizer, temperature=0.8, seed=1)` writes a text from nothing. Everything
else (several samples at once, banned and required words, trajectories, training) is in the package:

```python
import insertlm
model = insertlm.load("{name}")
print(model.infill("Lily found ___. She ___ all day.")[0].text)
```

## The model

| | |
|---|---|
| parameters | {parameters:,} |
| layers × width, heads, feed-forward | {layers} × {width}, {heads}, {hidden} |
| vocabulary | {vocabulary:,} |
| most tokens of a text | {longest:,} |
| trained | {steps} steps of {batch} texts of at most {block} tokens, seed {seed} |
| on | {data} |
| exported by | insertlm {version} |

`recipe.yaml` holds every key of the training run. The decode settings in `config.json` are the recipe's.

## Limits

It writes like the texts it was trained on, and knows nothing else. It was not aligned, and no output is checked.
{cut}
"""


def model_card(model: Model, recipe: Recipe, name: str) -> str:
    """recipe: without paths, as it is published"""
    task, shape, train = recipe.task, recipe.model, recipe.train
    step = train.steps if model.step is None else model.step
    cut = (
        f"Training ended early, at step {step:,} of {train.steps:,}."
        if step < train.steps and not train.minutes
        else ""
    )
    card = _CARD.format(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.family.parameters()),
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        hidden=shape.hidden,
        vocabulary=model.text_tokenizer.size,
        longest=model.family.longest_text,
        steps=f"{step:,}",
        batch=f"{train.batch_size:,}",
        block=f"{task.longest_target:,}",
        seed=train.seed,
        data=", ".join(f"`{source}`" for source in task.sources),
        version=VERSION,
        cut=cut,
    )
    return f"{card.rstrip()}\n"
