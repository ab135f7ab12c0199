"""What produced a number: the hardware, the versions and the commit, kept with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from insertlm.core.version import VERSION

__all__ = ["provenance"]


def provenance(device: torch.device) -> dict[str, str | None]:
    """The device, the versions and, in a git checkout, the commit."""
    return {
        "device": _hardware(device),
        "torch": torch.__version__,
        "insertlm": VERSION,
        "commit": _commit(),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":  # the GPU decides the speed there, the CPU and its threads elsewhere
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The model of the CPU: from /proc/cpuinfo on Linux, elsewhere what the platform module knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine() or "CPU"


def _commit() -> str | None:
    """The commit of this checkout, with `-dirty` if files have changed since; None outside a checkout."""
    here = Path(__file__)
    try:
        # An installed copy may lie inside another repository, which does not track this file.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    read_only = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # else git may refresh its index
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True, env=read_only
    )
    return done.stdout.strip()
