"""Checkpoints in the background, by all processes of a run together.

Training waits while the state is copied to the host's memory, and goes on while it is written. Every process writes its
own share. When all files are on the disk, the first process makes the checkpoint visible. It learns from the shared
store what the others wrote: a collective in this thread could meet those of training in another order elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import torch
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.storage import checkpoints

__all__ = ["Saver"]

_POLL = 0.02  # seconds between looks into the store for what the others have written

State = Mapping[str, Mapping[str, Tensor]]


class _Report(msgspec.Struct):
    """What a process wrote, or why it could not."""

    files: checkpoints.Files
    error: str = ""


class Saver:
    """Saves checkpoints of a run into `folder`. keep, keep_best: see the `train` section of a recipe"""

    def __init__(self, folder: Path, processes: Processes, keep: int, *, keep_best: bool = False) -> None:
        self.folder, self.processes, self.keep, self.keep_best = folder, processes, keep, keep_best
        self._store = processes.own_store()
        # Saves follow each other in one thread; a second one would need the memory twice.
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._under_way: Future[None] | None = None
        self._saved = -1
        self._alone = Event()  # another process has ended, so nobody may wait for it
        self._host: dict[str, dict[str, Tensor]] = {}

    def save(self, step: int, state: State, score: float | None = None, seconds: float = 0.0) -> None:
        """Start saving, after the save before. state: what this process writes of it   seconds: of training so far"""
        self.wait()
        # A validation and a save may be due at the same step, and the last step is always due.
        if step != self._saved:
            self._saved = step
            self._copy(state)
            self._under_way = self._thread.submit(self._write, step, score, seconds)

    def check(self) -> None:
        """Raise what went wrong, if that is known by now."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish the save that is under way, whatever ends the block, unless another process is gone."""
        try:
            yield
        except RuntimeError:
            self._alone.set()
            raise
        finally:
            self._thread.shutdown()
        self.wait()
        # Whoever goes on from here may read the checkpoint, so it has to be visible for all.
        self.processes.gather(None)

    def _copy(self, state: State) -> None:
        """To the host."""
        # The memory is kept from save to save: fresh pages cost more than the copy. Pinned, so that all copies are sent
        # to the device at once and waited for once.
        for part, named in state.items():
            held = self._host.setdefault(part, {})
            for name, tensor in named.items():
                if name not in held:
                    held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                held[name].copy_(tensor.detach(), non_blocking=True)
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize(self.processes.device)

    # --- In the thread

    def _write(self, step: int, score: float | None, seconds: float) -> None:
        """This process's files, then, by the first process, the checkpoint."""
        shard = checkpoints.Shard(self.processes.rank, self.processes.world)
        report = _Report({})
        try:
            self._check_finite(step)
            report.files = checkpoints.write(self.folder, step, self._host, shard)
        except InsertlmError as error:
            report.error = str(error)
        files: checkpoints.Files = {}
        for each in self._exchange(step, report):
            if each.error:
                raise InsertlmError(each.error)
            files |= each.files
        # Only now, with the files of all on the disk: a checkpoint that can be seen is complete.
        if self.processes.first:
            checkpoints.commit(self.folder, step, files, self.keep, score, keep_best=self.keep_best, seconds=seconds)

    def _exchange(self, step: int, report: _Report) -> list[_Report]:
        """All reports for the first process; for the others, whose part is done, their own."""
        if self._store is None:
            return [report]
        self._store.set(f"saved/{step}/{self.processes.rank}", msgspec.json.encode(report).decode())
        if not self.processes.first:
            return [report]
        keys = [f"saved/{step}/{rank}" for rank in range(self.processes.world)]
        while not self._store.check(keys):
            if self._alone.wait(_POLL):
                raise InsertlmError(f"the checkpoint of step {step} was given up")
        return [msgspec.json.decode(self._store.get(key), type=_Report) for key in keys]

    def _check_finite(self, step: int) -> None:
        """A gradient can be infinite before the loss is, and a broken checkpoint must not replace a good one."""
        for name, tensor in self._host["weights"].items():
            if not tensor.isfinite().all():
                good = checkpoints.latest(self.folder)
                raise InsertlmError(f"{name} is not finite after step {step}; the last good checkpoint is {good}")
