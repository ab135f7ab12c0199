"""How many zebra puzzles per second are generated on all cores that this process may use?

python benchmarks/zebra_rate.py                    # of the training split
python benchmarks/zebra_rate.py --split test       # nine in ten candidates belong to another split

On a busy machine look at per_core_second: puzzles per second of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import report

from insertlm.cli.data import example_line
from insertlm.core.cores import cores
from insertlm.tasks.base import SPLITS
from insertlm.tasks.zebra.task import Zebra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="train", choices=SPLITS)
    parser.add_argument("--count", type=int, default=20_000, help="puzzles")
    arguments = parser.parse_args()
    task = Zebra()
    task.puzzles(arguments.split, 1, seed=0)  # compiles
    started, spent = time.perf_counter(), time.process_time()
    puzzles = task.puzzles(arguments.split, arguments.count, seed=2)
    seconds, spent = time.perf_counter() - started, time.process_time() - spent
    started = time.perf_counter()
    examples = puzzles.examples(by_house=True)
    written, started = time.perf_counter() - started, time.perf_counter()
    for example in examples:
        example_line(task.tokenizer, example)
    report(
        "puzzles per second",
        torch.device("cpu"),
        split=arguments.split,
        count=arguments.count,
        cores=cores(),
        seconds=round(seconds, 2),
        per_second=round(arguments.count / seconds),
        per_core_second=round(arguments.count / spent),
        written_per_second=round(arguments.count / written),
        lines_per_second=round(arguments.count / (time.perf_counter() - started)),
        clues=round(statistics.fmean(puzzles.heads[:, 2].tolist()), 2),
        prefix_tokens=round(float(examples.prefix_length.mean()), 1),
        longest_prefix=int(examples.prefix_length.max()),
    )


if __name__ == "__main__":
    main()
