"""The training losses on held-out examples: a cheap measure for tasks without right answers."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from insertlm.core.processes import Processes
from insertlm.families.base import Family, Noise
from insertlm.tasks.base import Examples

__all__ = ["mean_losses"]

_SEED = 0x10557  # of the noise, the same for every model so that runs and steps can be compared


@torch.no_grad()
def mean_losses(
    family: Family, examples: Examples, batch_size: int, *, bf16: bool, processes: Processes
) -> dict[str, float]:
    """Means of the family's losses. Each example is corrupted once, in the same way whatever the batch size.
    bf16: matrix products in bfloat16"""

    def measure(first: int) -> dict[str, tuple[float, float]]:
        """The sum of each loss in a batch, and the number of terms in it."""
        chosen = np.arange(first, min(first + batch_size, len(examples)))
        number = torch.from_numpy(chosen)
        rows = family.rows(examples.take(chosen)).to(family.device)
        # Noise depends on an example's number alone, so neither the batch size nor the number of processes matters.
        noise = Noise(_SEED, number.to(family.device), torch.zeros_like(number, device=family.device))
        with torch.autocast(family.device.type, torch.bfloat16, enabled=bf16):
            losses = family.losses(rows, noise)
        values = {"loss": losses.total, **losses.parts}
        sizes = {name: float(losses.size(name, len(chosen))) for name in values}
        return {name: (float(value) * sizes[name], sizes[name]) for name, value in values.items()}

    sums, sizes = defaultdict[str, float](float), defaultdict[str, float](float)
    for found in processes.map(measure, range(0, len(examples), batch_size)):
        for name, (total, size) in found.items():
            sums[name] += total
            sizes[name] += size
    # Sums and sizes are added up before dividing, because batches have different numbers of terms.
    return {name: total / max(sizes[name], 1) for name, total in sums.items()}
