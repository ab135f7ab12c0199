"""How many rows a second does a model of the size of SmolLM2-135M learn from, as an ILM, on packed texts?

python benchmarks/pretrained_step.py                                         # on a GPU
python benchmarks/pretrained_step.py --profile                               # and where the time goes
python benchmarks/pretrained_step.py --attention auto flash --chunk 26 28    # one line for every combination
python benchmarks/pretrained_step.py --layers 1 --vocabulary 300 --rows 200 --no-compile    # on a CPU

Texts have 6 to 256 random words, log-uniformly; a step sees as many of them as make --rows visible rows on average.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from common import report
from torch.profiler import ProfilerActivity, profile

from insertlm.data.order import Order
from insertlm.families.ilm import IlmConfig
from insertlm.model import choose_device
from insertlm.nn import attention, losses
from insertlm.nn.adapters.llama import read_pretrained
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.step import TrainStep

SHORTEST, LONGEST = 6, 256
EXAMPLES, REPETITIONS = 20_000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65_536, help="visible ones in a step")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--weights", help="a Llama-style checkpoint to begin with: a folder, a Hub id, a GGUF file")
    parser.add_argument("--steps", type=int, default=10, help="per repetition")
    parser.add_argument("--warmup", type=int, default=40, help="a capacity is captured at its third visit")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action="store_true", help="as train.recompute")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most of the time")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    variants = parser.add_argument_group("variants: one value or several")
    variants.add_argument("--attention", nargs="+", default=["auto"], choices=["auto", "short", "flash"])
    variants.add_argument("--tile", nargs="+", type=int, default=[64], help="keys whose gradients are summed at once")
    variants.add_argument("--chunk", nargs="+", type=int, default=[28], help="2^N logits are held at once")
    variants.add_argument("--residual", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    combinations = itertools.product(arguments.attention, arguments.tile, arguments.chunk, arguments.residual)
    for backend, tile, chunk, residual in combinations:
        variant = {"attention": backend, "tile": tile, "chunk": chunk, "residual": residual}
        measure(arguments, choose_device(arguments.device), variant)


def measure(arguments: argparse.Namespace, device: torch.device, variant: dict[str, Any]) -> None:
    torch._dynamo.reset()
    step = build(arguments, device, variant)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    numbers = itertools.count()
    for _ in range(arguments.warmup):
        step(next(numbers))
    visible, times = 0, []
    for _ in range(REPETITIONS):
        _wait(device)
        started = time.perf_counter()
        visible += sum(step(next(numbers)).visible for _ in range(arguments.steps))
        _wait(device)
        times.append((time.perf_counter() - started) / arguments.steps)
    rows = visible / (REPETITIONS * arguments.steps)
    report(
        "pretrained step",
        device,
        **variant,
        layers=arguments.layers,
        compiled=arguments.compile,
        recompute=arguments.recompute,
        rows_per_step=round(rows),
        texts_per_step=step.order.batch_size,
        milliseconds=round(1e3 * statistics.median(times), 2),
        rows_per_second=round(rows / statistics.median(times)),
        loss=round(step.ledger.means(next(numbers))["loss"], 3),
        peak_gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
    )
    if arguments.profile:
        _profile(step, arguments.warmup + REPETITIONS * arguments.steps, device)


def build(arguments: argparse.Namespace, device: torch.device, variant: dict[str, Any]) -> TrainStep:
    """A step of a fresh or a pretrained model. Variants replace what the package would choose."""
    losses._CHUNK_ELEMENTS[device.type] = 1 << variant["chunk"]
    if device.type == "cuda":
        from insertlm.nn import attention_kernels

        attention_kernels._SHARED_TILE = variant["tile"]
    if variant["attention"] != "auto":
        backend = attention.Backend(variant["attention"])
        attention.choose_backend = lambda *_: backend
    config = ModelConfig(**{**PRESETS["smollm2-135m"], "layers": arguments.layers})
    specials = len(WordTokenizer(()).specials)
    tokenizer = WordTokenizer(tuple(map(str, range(arguments.vocabulary - specials))))
    torch.manual_seed(0)
    family = IlmConfig().build(config, tokenizer)
    if arguments.weights:
        family.load_state_dict(read_pretrained(arguments.weights).weights, strict=False)  # not the stop classifier's
    if variant["residual"] == "bfloat16":
        family.backbone.embedding.register_forward_hook(lambda *call: call[-1].bfloat16())
    family.backbone.recompute = arguments.recompute
    family.to(device).train()
    examples = texts(arguments.vocabulary - specials)
    seen = 2 + float(examples.target_length.mean()) / 2  # half of the words are deleted on average
    order = Order(EXAMPLES, max(1, round(arguments.rows / seen)), 1)
    steps = arguments.warmup + REPETITIONS * arguments.steps + 1
    settings: dict[str, Any] = {"optim": OptimConfig(), "steps": steps, "device": device, "compiled": arguments.compile}
    return TrainStep(family, family.rows(examples), order, **settings)


def texts(words: int) -> Examples:
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST), EXAMPLES)).round().astype(np.int32)
    target = draw.integers(0, words, (EXAMPLES, LONGEST), dtype=np.int32)
    return Examples(np.zeros((EXAMPLES, 0), np.int32), np.zeros(EXAMPLES, np.int32), target, length)


def _profile(step: TrainStep, first: int, device: torch.device) -> None:
    """Of one step, to stderr: the figures stay alone on stdout."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (device.type == "cuda")]) as found:
        step(first)
        _wait(device)
    key = f"self_{device.type}_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=80)
    print(table, file=sys.stderr)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
