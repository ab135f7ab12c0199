"""The processes of a run: who they are, what they say to each other, and how they end together.

`torchrun` starts the same command several times. Each process learns its number here and does its part; model code
knows nothing of it.

Design choices:
- One line of complaint for all processes. Rank 0 says it; another one only if rank 0 has nothing to say. All end with
  the code of whoever spoke.
- Tensors travel by NCCL on GPUs and by gloo on CPUs. Everything else (objects, signals) travels by gloo on the host, so
  that it never waits for a device.
- Waiting is not limited: one node may tokenise a corpus for an hour longer than another. Instead every process watches
  its neighbour's sign of life, and its launcher's, and ends when one of them is gone.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from insertlm.core.errors import OUT_OF_MEMORY, InsertlmError, is_out_of_memory

__all__ = ["RESUME", "Processes", "joined"]

RESUME = 75  # exit code: nothing is wrong with the run, start it again to go on (EX_TEMPFAIL of sysexits.h)

_MEET = timedelta(minutes=5)  # until all processes must have found each other
_WAIT = timedelta(days=1)  # for each other's results
_BEAT = 1.0  # seconds between signs of life
_PATIENCE = 40.0  # seconds without one
_WORD = timedelta(seconds=5)  # that others wait for rank 0 to complain, and for each other to end by themselves

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Processes:
    """One process among `world`. Alone, all of this costs nothing.

    store: a dictionary that all share, torch's (which has no types)
    """

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.device, self.rank, self.world, self.store = device, rank, world, store
        self._code = 0  # with which another process has told us to end
        self._asked_to_stop = False
        self._asking: tuple[Tensor, Any] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that prints, logs and writes what is written once."""
        return self.rank == 0

    def own_store(self) -> Any:
        """The store that all share, for another thread: a connection waits for one answer at a time."""
        return None if self.store is None else self.store.clone()

    def sum(self, values: Tensor) -> None:
        """Of all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)

    def gather(self, thing: _Item) -> list[_Item]:
        """What every process gives, in the order of their ranks."""
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing)
        return things

    def map(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """The results of all items, in their order; each process does every `world`-th."""
        done = [work(item) for item in items[self.rank :: self.world]]
        shares = self.gather(done)
        return [shares[number % self.world][number // self.world] for number in range(len(items))]

    def agree(self, what: str, text: str) -> None:
        """Refuse to go on with processes that have another text; its first line that differs is named."""
        texts = [each.splitlines() for each in self.gather(text)]
        for rank, theirs in enumerate(texts):
            for a, b in zip_longest(texts[0], theirs, fillvalue="nothing"):
                if a != b:
                    raise InsertlmError(
                        f"process {rank} has another {what} than process 0: {b.strip()}, not {a.strip()}"
                    )

    # --- Signals

    @contextmanager
    def heeding_sigterm(self) -> Iterator[None]:
        """SIGTERM, which a cluster sends before it takes a machine away, makes `stopping` true."""

        def ask(number: int, frame: FrameType | None) -> None:
            self._asked_to_stop = True

        if current_thread() is not main_thread():  # where Python hears no signals
            yield
            return
        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
            if self._asking is not None:  # nobody leaves with a question open
                self._asking[1].wait()
        finally:
            if not self._asked_to_stop:  # a launcher may ask twice, and we are on our way
                signal.signal(signal.SIGTERM, before)

    def stopping(self) -> bool:
        """Whether any process has been asked to stop: to be called by all after every step, and answered alike.

        What it tells is one step old, so nobody waits for the answer.
        """
        if self.world == 1:
            return self._asked_to_stop
        asked = torch.tensor([int(self._asked_to_stop)])
        before, self._asking = self._asking, (asked, dist.all_reduce(asked, async_op=True))
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    # --- The end

    def complain(self, message: str, code: int) -> int:
        """Say why all must end, unless someone else has; the code to end with."""
        try:
            if self.rank and self._heard():
                return self._code
            if self.store.add("complaints", 1) > 1:
                return self._code if self._heard() else code
            self.store.set("code", str(code))
            self._say(message)
            if self.rank == 0:  # it may hold the store, which the others still need
                self._wait_for_the_others()
        except RuntimeError:  # the store went away with the process that held it, a launcher or the first of us
            if self._code:
                return self._code
            if self.rank == (0 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else 1):
                self._say(message)
        return code

    def _heard(self) -> bool:
        """Whether someone has complained."""
        if self._code:
            return True
        try:
            self.store.wait(["code"], _WORD)
        except dist.DistStoreError:
            return False
        self._code = int(self.store.get("code"))
        self.store.set(f"heard/{self.rank}", "")
        return True

    def _wait_for_the_others(self) -> None:
        with suppress(dist.DistStoreError):
            self.store.wait([f"heard/{rank}" for rank in range(1, self.world)], _WORD)

    def _say(self, message: str) -> None:
        who = f"process {self.rank} of {self.world}: " if self.rank else ""
        print(f"insertlm: {who}{' '.join(message.split())}", file=sys.stderr, flush=True)


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """This process among those that torchrun has started, or alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device)
        return
    processes = _meet(device)
    watch = _Watch(processes)
    watch.start()
    try:
        yield processes
        processes.gather(None)  # who ends early is taken for dead
    except BrokenPipeError:
        raise
    except (InsertlmError, OSError) as error:
        _leave(processes.complain(str(error), 2))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            _leave(processes.complain(OUT_OF_MEMORY, 2))
        if not _is_lost(error):
            raise
        _leave(processes.complain(_LOST, RESUME))
    finally:
        watch.stop()
        gc.collect()  # what still holds gloo's threads: at the interpreter's end they would be cut off, with an abort
        dist.destroy_process_group()


def _leave(code: int) -> NoReturn:
    """At once: threads may still wait for processes that are gone, and an orderly end would wait for them."""
    sys.stdout.flush()
    os._exit(code)


_LOST = "a process of this run has ended; start it again to go on from the last checkpoint"
_ORPHANED = "the launcher of this run has ended; start it again to go on from the last checkpoint"


def _is_lost(error: Exception) -> bool:
    """gloo has no class for it, only the place in its sources."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in str(error)


def _meet(device: torch.device) -> Processes:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not os.environ.get(name)]:
        world = os.environ["WORLD_SIZE"]
        raise InsertlmError(
            f"one of {world} processes, but {' and '.join(missing)} not set; expected torchrun to start them"
        )
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if device.type == "cuda":
        device = _own_gpu()
    try:
        whole, rank, world = next(iter(rendezvous("env://", timeout=_MEET)))
        store = _fresh(whole, rank, world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=_WAIT)
        processes = Processes(device, rank, world, PrefixStore("word", store))
        processes.gather(None)  # everyone is there
    except (RuntimeError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise InsertlmError(
            f"cannot meet the other processes at {place}: {what:.200}; expected torchrun to start them"
        ) from error
    return processes


def _fresh(store: Any, rank: int, world: int) -> Any:
    """A part of the store that nobody has used: torchrun keeps it when it starts workers again, and what those before
    them wrote there (addresses, complaints) would be believed.

    Rank 0 makes up a name. The others answer under it with a number of their own, and believe a name once rank 0 has
    repeated their number. How often each machine's launcher has started its workers does not tell: they count apart.
    """
    own, end = secrets.token_hex(8), time.monotonic() + _MEET.total_seconds()
    if rank == 0:
        store.set("name", own)
        answers = [f"{own}/{other}" for other in range(1, world)]
        store.wait(answers, _MEET)
        store.set(f"{own}/all", " ".join(store.get(answer).decode() for answer in answers))
        return PrefixStore(own, store)
    while time.monotonic() < end:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/all"]) and own in store.get(f"{name}/all").decode():
            return PrefixStore(name, store)
        time.sleep(0.02)
    raise InsertlmError("the first process does not answer")


def _own_gpu() -> torch.device:
    number, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= gpus:
        raise InsertlmError(f"process {number} of this machine has no GPU; expected --nproc-per-node {gpus} at most")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


class _Watch(Thread):
    """Gives a sign of life, and ends this process when its neighbour gives none, or its launcher is gone, or somebody
    has complained and this process is too busy to notice."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(name="watch", daemon=True)
        assert processes.store is not None
        self._processes, self._store = processes, processes.own_store()
        self._launcher = os.getppid()
        self._over = Event()

    def stop(self) -> None:
        self._over.set()
        self.join(_BEAT)

    def run(self) -> None:
        beat, heard, silent = 0, b"", 0
        neighbour = (self._processes.rank + 1) % self._processes.world
        while not self._over.wait(_BEAT):
            beat += 1
            try:
                self._store.set(f"beat/{self._processes.rank}", str(beat))
                said = self._store.get(f"beat/{neighbour}") if self._store.check([f"beat/{neighbour}"]) else b""
                spoken = self._store.check(["code"])
            except RuntimeError:
                self._end(_ORPHANED)
                return
            # In beats, not by the clock: a thread that was kept from running has no right to complain of others.
            heard, silent = said, silent + 1 if said == heard else 0
            if os.getppid() != self._launcher:
                self._end(_ORPHANED)
            if silent * _BEAT > _PATIENCE:
                self._end(_LOST)
            if spoken:
                self._end(_LOST, _WORD.total_seconds())  # it may be about to end by itself

    def _end(self, why: str, patience: float = 0.0) -> None:
        code = self._processes.complain(why, RESUME)
        if not self._over.wait(patience):
            os._exit(code)
