"""What every benchmark reports beside its figure."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

__all__ = ["report"]


def report(question: str, device: torch.device, **figures: Any) -> None:
    """Print one JSON line."""
    print(json.dumps({"question": question, **figures, **_hardware(device)}), flush=True)


def _hardware(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else _processor(),
        "threads": None if on_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _commit() -> str | None:
    call = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return call.stdout.strip() or None
