"""Weak scaling on CPUs with gloo: how much longer is a step of two processes, each with as many examples as one?

python benchmarks/scaling.py --layers 4 --width 256

It starts torchrun itself: with one process, with two that replicate the model, and with two that shard it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import model_arguments, recipe_of, report

from insertlm.core.processes import Processes, joined
from insertlm.data.order import Order
from insertlm.training.parallel import build_step

WAYS = {"one": (1, "ddp"), "replicated": (2, "ddp"), "sharded": (2, "fsdp")}


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.way:
        with joined(torch.device("cpu")) as processes:
            found = measure(arguments, processes)
            if processes.first:
                print(json.dumps(found))
        return
    found = {way: _start(way) for way in WAYS}
    alone = found["one"]
    report(
        "weak scaling",
        torch.device("cpu"),
        layers=arguments.layers,
        width=arguments.width,
        examples_per_process=arguments.batch_size,
        parameters=found["one"]["parameters"],
        **{way: {**each, **_efficiency(alone, each)} for way, each in found.items()},
    )


def _efficiency(alone: dict[str, Any], each: dict[str, Any]) -> dict[str, float]:
    names = {"milliseconds": "efficiency", "processor_milliseconds": "processor_efficiency"}
    return {name: round(alone[measure] / each[measure], 3) for measure, name in names.items()}


def _parser() -> ArgumentParser:
    parser = model_arguments(__doc__)
    parser.add_argument("--batch-size", type=int, default=16, help="examples per process")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--way", choices=WAYS, help="set by the launcher: be one of the processes")
    return parser


def _start(way: str) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WAYS[way][0])]
    command = [sys.executable, *launcher, __file__, *sys.argv[1:], "--way", way]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE
    )
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def measure(arguments: Namespace, processes: Processes) -> dict[str, Any]:
    """Medians over steps. communication: time in collectives, which includes waiting for the other process   processor:
    processor time of this process, which other load does not change"""
    torch.set_num_threads(1)
    size = arguments.batch_size * processes.world
    train = {"steps": arguments.steps, "batch_size": size, "parallel": WAYS[arguments.way][1]}
    recipe = recipe_of(arguments, task={"train": 2_000}, train=train)
    data = recipe.task.training_set()
    step = build_step(recipe, data, Order(len(data), size, recipe.train.seed), processes)
    step.family.train()
    collectives = _Timed()
    times, working, shares = [], [], []
    for number in range(arguments.steps):
        started, worked, collectives.seconds = time.perf_counter(), time.process_time(), 0.0
        step(number)
        times.append(time.perf_counter() - started)
        working.append(time.process_time() - worked)
        shares.append(collectives.seconds / times[-1])
    count, others = sum(weights.numel() for weights in step.optimizer.weights), processes.world - 1
    parameters = sum(processes.gather(count)) if arguments.way == "sharded" else count
    passes = 3 if arguments.way == "sharded" else 2  # gathered twice and reduced, or reduced and gathered
    return {
        "milliseconds": round(1e3 * statistics.median(times[2:]), 1),
        "processor_milliseconds": round(1e3 * statistics.median(working[2:]), 1),
        "communication_share": round(statistics.median(shares[2:]), 3),
        "megabytes_sent": round(passes * 4 * parameters * others / processes.world / 1e6, 1),
        "parameters": parameters,
    }


class _Timed:
    """Adds up the time that this process spends in collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # FSDP's collectives have other names since torch 2.13.
        gathering = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
        for name in filter(partial(hasattr, dist), ("all_reduce", *gathering)):
            setattr(dist, name, self._timed(getattr(dist, name)))

    def _timed(self, collective: Any) -> Any:
        def call(*what: Any, **more: Any) -> Any:
            started = time.perf_counter()
            work = collective(*what, **more)
            if work is not None:
                work.wait()
            self.seconds += time.perf_counter() - started
            return work

        return call


if __name__ == "__main__":
    main()
