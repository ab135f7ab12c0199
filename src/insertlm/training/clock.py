"""How long a run has trained, which ends the run if its recipe says so."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

__all__ = ["Clock"]

_AHEAD = 2  # steps that the host may be ahead of a GPU


class Clock:
    """Seconds of training, across restarts, without validation and saving.

    budget: seconds after which a run ends; infinite if it ends by its steps alone
    """

    def __init__(self, minutes: float, device: torch.device) -> None:
        self.budget = 60 * minutes if minutes else float("inf")
        self._device, self._zero = device, time.monotonic()
        self._under_way: deque[Any] = deque()

    def set(self, seconds: float) -> None:
        """Go on from there."""
        self._zero = time.monotonic() - seconds

    def leave_out(self, seconds: float) -> None:
        """So much of the time since was no training."""
        self._zero += seconds

    def seconds(self) -> float:
        """After a step."""
        # The host only starts the work of a GPU. Without a limit it would be a hundred steps ahead of it, and its clock
        # would know nothing of them. Two are enough to keep the GPU busy.
        if self._device.type == "cuda" and self.budget < float("inf"):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._under_way.append(event)
            if len(self._under_way) > _AHEAD:
                self._under_way.popleft().synchronize()
        return time.monotonic() - self._zero

    def elapsed(self, seconds: float) -> float:
        """The share of the budget that is over."""
        return seconds / self.budget
