"""What tests of commands share: a tiny recipe, the place of its run (cli/conftest.py), and a command that succeeds."""

from __future__ import annotations

import pytest

from insertlm.cli.main import main

__all__ = ["RECIPE", "RUN", "output"]

RECIPE = """
task: {name: star, degree: 2, min_nodes: 3, max_nodes: 3, min_plan: 2, nodes: 8, train: 200, validation: 9, test: 30}
model: {layers: 2, width: 32, heads: 2, hidden: 64}
optim: {learning_rate: 3e-3, warmup: 5, ema: 0.5}
train: {steps: 20, batch_size: 16, log_every: 5, save_every: 10, validate_every: 10}
decode: {max_steps: 8}
"""
RUN = "runs/star_tiny-ilm"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints; it must not say anything on standard error."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out
