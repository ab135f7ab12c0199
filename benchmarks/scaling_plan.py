"""What would 8 and 64 GPUs give? The table of docs/scaling.md, from measured step times and the bytes that are sent.

python benchmarks/scaling_plan.py            # prints it
python benchmarks/scaling_plan.py --write    # writes it into the page

Measured are docs/results/train_step-h200.json and, if it is there, train_step-stories-h200.json. Everything else is an
assumption that is named here and on the page.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
RESULTS = PAGE.parent / "results"
MARKS = "<!-- plan -->\n", "<!-- end of plan -->\n"

# One GPU, in bytes and floating-point operations per second.
INSIDE = 0.8 * 450e9  # NVLink of an H200: 900 GB/s, both directions together; four fifths of one
BETWEEN = 0.8 * 400e9  # a node's eight 400 Gb/s adapters, shared by its GPUs; four fifths of it
MEMORY = 4.8e12  # HBM3e
TF32 = 0.4 * 494e12  # of the dense peak, the share that blocks reach
# Our step.
KERNELS = 710  # for 12 layers, as profiled
REPLAYED, LAUNCHED = 2e-6, 10e-6  # shortest seconds per kernel: in a CUDA graph, and launched by the host
EAGER = 22.7 / 12.6  # eager over compiled kernels, both measured on star-hard (docs/log.md)
GRAPHS_ROWS = 64 * 92  # packed rows of a star-hard step, on average
BLOCK = 12 * 12 * 768**2  # weights in the blocks of the `paper` preset
OPTIMISER = 30  # bytes of memory traffic per weight: weights, moments, gradient, copy
REPLICATED, SHARDED = 26, 24  # bytes per weight: float32 weights, moments, average, gradients; bf16 copy
ACTIVATIONS = 34  # bytes per row, layer and unit of width
VOCABULARY = 30_524


@dataclass(frozen=True)
class Run:
    """rows: mean number of packed rows per example after corruption"""

    name: str
    layers: int
    width: int
    rows: int
    steps: int
    batch: int = 512

    @property
    def blocks(self) -> int:
        return 12 * self.layers * self.width**2

    @property
    def weights(self) -> int:
        return self.blocks + 2 * VOCABULARY * self.width + 4 * self.width**2


RUNS = (
    Run("Stories", 12, 768, 107, 100_000),
    Run("LM1B", 12, 768, 17, 1_000_000),
    Run("1B on Stories", 24, 1792, 107, 365_000),
)


def speed() -> float:
    """Operations per second in blocks, from the measured step: three passes of two operations per weight and row."""
    step = _read("train_step-h200.json")
    seconds: float = step["milliseconds"] / 1e3 - OPTIMISER * BLOCK / MEMORY
    return 6 * BLOCK * GRAPHS_ROWS / seconds


def computing(run: Run, gpus: int) -> float:
    """Seconds of a step without the optimiser. The head counts four passes, because its logits are recomputed."""
    rows = run.batch * run.rows / gpus
    seconds = 6 * run.blocks * rows / speed() + 8 * VOCABULARY * run.width * rows / TF32
    measured = RESULTS / "train_step-stories-h200.json"
    if run.width == 768 and measured.is_file():
        known = _read(measured.name)
        seconds = (known["milliseconds"] / 1e3 - OPTIMISER * run.weights / MEMORY) * rows / known["rows_per_step"]
    return seconds


def replicated(run: Run, gpus: int) -> tuple[float, float]:
    """Seconds of a step, and the share of communication, which here does not overlap computation."""
    least = KERNELS * run.layers / 12 * REPLAYED
    work = max(computing(run, gpus), least) + OPTIMISER * run.weights / MEMORY
    sending = 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * 4 * run.weights / _bandwidth(gpus)
    return work + sending, sending / (work + sending)


def sharded(run: Run, gpus: int) -> tuple[float, float]:
    """The same with FSDP: communication overlaps computation; kernels are eager and launched by the host."""
    work = max(EAGER * computing(run, gpus), KERNELS * run.layers / 12 * LAUNCHED)
    sending = 3 * (gpus - 1) / gpus * 4 * run.weights / _bandwidth(gpus)
    seconds = max(work, sending) + OPTIMISER * run.weights / gpus / MEMORY
    return seconds, min(1.0, sending / seconds)


def memory(run: Run, gpus: int) -> tuple[float, float]:
    """Bytes on a GPU, replicated and sharded: state, activations, and the weights that FSDP gathers at a time."""
    activations = ACTIVATIONS * run.layers * run.width * run.batch * run.rows / gpus
    gathered = 4 * (2 * run.blocks / run.layers + 2 * VOCABULARY * run.width)
    return REPLICATED * run.weights + activations, SHARDED * run.weights / gpus + gathered + activations


def table() -> str:
    columns = (
        "run | weights | GPUs | replicated: step | sending | time | memory | sharded: step | sending | time | memory"
    )
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    for run in RUNS:
        for gpus in (1, 8, 64):
            cells = [run.name, f"{run.weights / 1e6:,.0f}M", str(gpus)]
            ways = (replicated(run, gpus), sharded(run, gpus) if gpus > 1 else None)
            for way, room in zip(ways, memory(run, gpus), strict=True):
                cells += _cells(way, run.steps, room) if way else ["–"] * 4
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(way: tuple[float, float], steps: int, room: float) -> list[str]:
    seconds, share = way
    hours = seconds * steps / 3600
    time = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    return [f"{1e3 * seconds:.1f} ms", f"{share:.0%}", time, f"{room / 1e9:.1f} GB"]


def _bandwidth(gpus: int) -> float:
    return INSIDE if gpus <= 8 else BETWEEN


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it into docs/scaling.md")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(f"(?<={MARKS[0]}).*?(?={MARKS[1]})", re.DOTALL)
        PAGE.write_text(between.sub(table(), page), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
