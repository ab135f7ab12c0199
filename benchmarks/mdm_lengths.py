"""How many errors of a masked diffusion model on star graphs are errors of length? With and without the true length.

python benchmarks/mdm_lengths.py runs/star_hard-mdm --order margin --count 500    # validation graphs; a line of JSON
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from common import report

import insertlm
from insertlm.inference.scheduler import generate
from insertlm.inference.settings import Bounds, Prompt
from insertlm.model import Model
from insertlm.tasks.base import Example

__all__ = ["written"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run or an exported folder of an mdm on star graphs")
    parser.add_argument("--order", choices=("random", "certainty", "margin"), default="margin")
    parser.add_argument("--count", type=int, default=500, help="validation graphs (default: 500)")
    parser.add_argument("--device")
    chosen = parser.parse_args(arguments)
    model = insertlm.load(chosen.model, chosen.device)
    examples = list(model.recipe.task.examples("validation", chosen.count))
    free, told = (written(model, examples, chosen.order, told) for told in (False, True))
    report(
        f"mdm-lengths {model.name}",
        model.family.device,
        order=chosen.order,
        graphs=len(examples),
        exact=sum(text == example.target for text, example in zip(free, examples, strict=True)),
        shorter=sum(len(text) < len(example.target) for text, example in zip(free, examples, strict=True)),
        longer=sum(len(text) > len(example.target) for text, example in zip(free, examples, strict=True)),
        exact_told_the_length=sum(text == example.target for text, example in zip(told, examples, strict=True)),
    )


def written(model: Model, examples: Sequence[Example], order: str, told: bool) -> list[list[int]]:
    """What the model writes. told: whether it is told the number of tokens"""
    lengths = [len(example.target) for example in examples]
    prompts = [
        Prompt(example.prefix, seed, bounds={0: Bounds(length, length)} if told else {})
        for seed, (example, length) in enumerate(zip(examples, lengths, strict=True))
    ]
    texts = generate(model.family, prompts, model.settings(order=order), batch_size=100)
    return [text.ids for text in texts]


if __name__ == "__main__":
    main()
