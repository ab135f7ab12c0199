"""How many milliseconds does a training step on star-hard take, with corruption and optimiser?

python benchmarks/train_step.py --preset paper                        # on a GPU
python benchmarks/train_step.py --layers 4 --width 256 --threads 2    # on a CPU
python benchmarks/train_step.py --preset paper --task stories --batch-size 512    # texts as long as stories
python benchmarks/train_step.py --preset paper --deterministic        # twice: `weights` must be the same

Families see rows of different lengths (--family arm, mdm, it), so compare their microseconds per row.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from common import STORIES, model_arguments, recipe_of, report

from insertlm.data.order import Order
from insertlm.evaluation.generation import fingerprint
from insertlm.families.base import Family
from insertlm.model import choose_device
from insertlm.recipe import build_family
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.deterministic import deterministic
from insertlm.training.step import TrainStep

BLOCK, WORDS = 1024, 30_516  # with six special tokens this is the published vocabulary


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="steps per repetition")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--deterministic", action="store_true", help="steps that give the same bits again")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    torch.set_float32_matmul_precision("high")
    repetitions = 5
    steps = arguments.warmup + repetitions * arguments.steps
    recipe = recipe_of(arguments, train={"steps": steps, "batch_size": arguments.batch_size})
    if arguments.task == STORIES:
        words = WordTokenizer(tuple(map(str, range(WORDS))))
        family: Family = recipe.family.build(recipe.model, words)
        rows = family.rows(stories())
    else:
        family = build_family(recipe)
        rows = family.rows(recipe.task.examples("train", 20_000))
    family.to(device).train()
    order = Order(len(rows.target), arguments.batch_size, recipe.train.seed)
    precision = arguments.precision
    step = TrainStep(
        family, rows, order, optim=recipe.optim, steps=steps, device=device, compiled=True, precision=precision
    )
    visible, times = 0, []
    number = 0
    with deterministic(arguments.deterministic):
        for _ in range(arguments.warmup):
            step(number)
            number += 1
        for _ in range(repetitions):
            _wait(device)
            started = time.perf_counter()
            for _ in range(arguments.steps):
                visible += step(number).visible
                number += 1
            _wait(device)
            times.append((time.perf_counter() - started) / arguments.steps * 1000)
    milliseconds = statistics.median(times)
    visible_rows = visible / (repetitions * arguments.steps)
    report(
        "training step",
        device,
        task=arguments.task,
        family=arguments.family,
        layers=recipe.model.layers,
        width=recipe.model.width,
        dropout=recipe.model.dropout,
        prefix_lm=recipe.model.prefix_lm,
        batch_size=arguments.batch_size,
        deterministic=arguments.deterministic,
        weights=fingerprint(family)[:16],
        precision="bfloat16" if step.bf16 else "float32",
        rows_per_step=round(visible_rows),
        milliseconds=round(milliseconds, 2),
        examples_per_second=round(1e3 * arguments.batch_size / milliseconds),
        microseconds_per_row=round(1e3 * milliseconds / visible_rows, 3),
        spread=[round(min(times), 2), round(max(times), 2)],
        peak_gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
    )


def stories(count: int = 20_000) -> Examples:
    """Texts of random words, as long as those of TinyStories (mean 205, standard deviation 75), cut at BLOCK."""
    draw = np.random.default_rng(0)
    length = np.clip(draw.gamma(7.5, 205 / 7.5, count), 20, BLOCK).astype(np.int32)
    target = draw.integers(0, WORDS, (count, BLOCK), dtype=np.int32)
    return Examples(np.zeros((count, 0), np.int32), np.zeros(count, np.int32), target, length)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
