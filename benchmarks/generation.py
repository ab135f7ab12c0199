"""How many tokens a second are inserted on star-hard? Random weights that never stop: every row gets 28 insertions.

python benchmarks/generation.py --preset paper --batch-size 512 [--prefix-lm]               # on a GPU
python benchmarks/generation.py --layers 4 --width 256 --batch-size 64 --threads 2 --prefix-lm    # on a CPU
"""

from __future__ import annotations

import statistics
import time

from common import model_arguments, model_section, report

from insertlm.api import choose_device, prepare
from insertlm.config import parse_recipe
from insertlm.decoding.settings import Prompt
from insertlm.training.loop import build_family

INSERTIONS = 28


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    arguments = parser.parse_args()
    model = model_section(arguments)
    device = choose_device(arguments.device)
    tree = {
        "task": {"preset": arguments.task},
        "model": model,
        "train": {"steps": 1},
        "decode": {"stop_threshold": 1.0, "max_steps": INSERTIONS},
    }
    recipe = parse_recipe(tree, "benchmark")
    family = prepare(build_family(recipe), device)
    prompts = [Prompt(example.prefix) for example in recipe.task.examples("test", arguments.batch_size)]
    times = []
    for _ in range(4):
        started = time.perf_counter()
        trajectories = family.decode(prompts, recipe.decode)
        times.append(time.perf_counter() - started)
    inserted = sum(len(trajectory.events) for trajectory in trajectories)
    seconds = statistics.median(times[1:])  # the first call sets the libraries up
    report(
        "generation",
        device,
        task=arguments.task,
        layers=recipe.model.layers,
        width=recipe.model.width,
        prefix_cache=recipe.model.prefix_lm,
        batch_size=arguments.batch_size,
        insertions=inserted,
        seconds=round(seconds, 3),
        tokens_per_second=round(inserted / seconds),
    )


if __name__ == "__main__":
    main()
