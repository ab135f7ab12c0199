"""How many tokens a second are inserted on star-hard? Random weights that never stop: every row gets 28 insertions.

python benchmarks/generation.py --preset paper --batch-size 512 [--prefix-lm]               # on a GPU
python benchmarks/generation.py --layers 4 --width 256 --batch-size 64 --threads 2 --prefix-lm    # on a CPU

Rows are those that went through the network: the whole text in every step, or less with a cache. A family that ends its
texts otherwise than by a threshold (--family arm, mdm) may write fewer tokens.
"""

from __future__ import annotations

import statistics
import time

from common import model_arguments, recipe_of, report

from insertlm.api import choose_device, prepare
from insertlm.decoding.settings import Prompt
from insertlm.training.loop import build_family

INSERTIONS = 28


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    recipe = recipe_of(arguments, train={"steps": 1}, decode={"stop_threshold": 1.0, "max_steps": INSERTIONS})
    family = prepare(build_family(recipe), device)
    rows: list[int] = []  # of every call of the network
    family.backbone.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    prompts = [Prompt(example.prefix) for example in recipe.task.examples("test", arguments.batch_size)]
    times = []
    for _ in range(4):
        rows.clear()
        started = time.perf_counter()
        trajectories = family.decode(prompts, recipe.decode)
        times.append(time.perf_counter() - started)
    inserted = sum(len(trajectory.events) for trajectory in trajectories)
    seconds = statistics.median(times[1:])  # the first call sets the libraries up
    report(
        "generation",
        device,
        task=arguments.task,
        family=arguments.family,
        layers=recipe.model.layers,
        width=recipe.model.width,
        prefix_cache=recipe.model.prefix_lm,
        batch_size=arguments.batch_size,
        insertions=inserted,
        rows=sum(rows),
        seconds=round(seconds, 3),
        tokens_per_second=round(inserted / seconds),
        microseconds_per_row=round(1e6 * seconds / sum(rows), 3),
    )


if __name__ == "__main__":
    main()
