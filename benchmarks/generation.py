"""How many tokens per second are inserted on star-hard? Random weights never stop, so every row gets 28 insertions.
With --task stories: texts from nothing with 180 insertions, drawn from a nucleus of 4,090 words.

python benchmarks/generation.py --preset paper --batch-size 512 [--prefix-lm]               # on a GPU
python benchmarks/generation.py --layers 4 --width 256 --batch-size 64 --threads 2 --prefix-lm    # on a CPU
python benchmarks/generation.py --task stories --layers 7 --width 512 --batch-size 1024  # like stories-mini

"rows" counts the rows that went through the network: the whole text in every step, or fewer with a cache. (On a GPU
steps with a cache are replayed as CUDA graphs, and only rows before the first replay are counted.) A family that ends
its texts without a threshold (--family arm, mdm) may write fewer tokens.
"""

from __future__ import annotations

import statistics
import time

from common import STORIES, model_arguments, recipe_of, report

from insertlm.families.base import Family
from insertlm.inference.settings import Prompt
from insertlm.model import choose_device, prepare
from insertlm.recipe import build_family
from insertlm.text.tokenizers import WordTokenizer

WORDS = 4090


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--halved", action="store_true", help="bfloat16 on a CPU, too; on a GPU it is always used")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    stories = arguments.task == STORIES
    sampling = {"temperature": 1.0, "top_p": 0.9, "max_steps": 180} if stories else {"max_steps": 28}
    recipe = recipe_of(arguments, train={"steps": 1}, decode={"stop_threshold": 1.0, **sampling})
    if stories:
        family: Family = recipe.family.build(recipe.model, WordTokenizer(tuple(map(str, range(WORDS)))))
        prompts = [Prompt([], seed) for seed in range(arguments.batch_size)]
    else:
        family = build_family(recipe)
        prompts = [Prompt(example.prefix) for example in recipe.task.examples("test", arguments.batch_size)]
    prepare(family, device, arguments.halved)
    rows: list[int] = []  # rows of every call of the network
    family.backbone.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    times = []
    for _ in range(4):
        rows.clear()
        started = time.perf_counter()
        trajectories = family.decode(prompts, recipe.decode)
        times.append(time.perf_counter() - started)
    inserted = sum(len(trajectory.events) for trajectory in trajectories)
    seconds = statistics.median(times[1:])  # the first call initialises libraries
    report(
        "generation",
        device,
        task=arguments.task,
        family=arguments.family,
        layers=recipe.model.layers,
        width=recipe.model.width,
        prefix_cache=recipe.model.prefix_lm,
        batch_size=arguments.batch_size,
        precision="bfloat16" if arguments.halved or device.type == "cuda" else "float32",
        insertions=inserted,
        rows=sum(rows),
        seconds=round(seconds, 3),
        tokens_per_second=round(inserted / seconds),
        microseconds_per_row=round(1e6 * seconds / sum(rows), 3),
    )


if __name__ == "__main__":
    main()
