"""How long is a training step on star-hard? (milliseconds, corruption and optimiser included)

python benchmarks/train_step.py --preset paper                        # on a GPU
python benchmarks/train_step.py --layers 4 --width 256 --threads 2    # on a CPU

Families see rows of different lengths (--family arm, mdm, it), so compare their microseconds per row.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import model_arguments, recipe_of, report

from insertlm.api import choose_device
from insertlm.training.loop import build_family
from insertlm.training.order import Order
from insertlm.training.step import TrainStep


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="steps per repetition")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    torch.set_float32_matmul_precision("high")
    repetitions = 5
    steps = arguments.warmup + repetitions * arguments.steps
    recipe = recipe_of(arguments, task={"train": 20_000}, train={"steps": steps, "batch_size": arguments.batch_size})
    family = build_family(recipe).to(device).train()
    rows = family.rows(recipe.task.examples("train"))
    order = Order(len(rows.target), arguments.batch_size, recipe.train.seed)
    precision = arguments.precision
    step = TrainStep(
        family, rows, order, optim=recipe.optim, steps=steps, device=device, compiled=True, precision=precision
    )
    visible, times = 0, []
    number = 0
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
    rows = visible / (repetitions * arguments.steps)
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
        precision="bfloat16" if step.halved else "float32",
        rows_per_step=round(rows),
        milliseconds=round(milliseconds, 2),
        microseconds_per_row=round(1e3 * milliseconds / rows, 3),
        spread=[round(min(times), 2), round(max(times), 2)],
        peak_gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
