"""The processes of a run: who they are, what they tell each other, and how they end together.

torchrun starts the same command several times, gives each process its number in the environment, ends the others when
one fails, and starts all of them again if it is told to (`--max-restarts`). Model code knows nothing of this.

Design choices:
- All processes print one line of complaint between them: the first one that fails speaks, and all end with its code.
- Tensors travel by NCCL on GPUs and by gloo on CPUs. Objects and signals travel by gloo on the host, so that they never
  wait for a device.
- Collectives may wait for a day, because one node may tokenise a corpus for an hour longer than another. So their
  timeout says nothing about who is dead. A thread finds that out: it repeats a small all-reduce over gloo, which fails
  at once when a process is killed and after `_PATIENCE` when one hangs. The collectives of training cannot stand in
  for it: a process that waits for its GPU, which waits for NCCL, learns of a killed peer only from NCCL's timeout.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from threading import Event, Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from insertlm.core.errors import OUT_OF_MEMORY, InsertlmError, is_out_of_memory
from insertlm.core.files import place_and_reason

__all__ = ["RESUME", "Processes", "joined"]

RESUME = 75  # exit code: nothing is wrong with the run, start it again to go on (EX_TEMPFAIL of sysexits.h)

_MEET = timedelta(minutes=5)  # until all processes must have found each other
_WAIT = timedelta(days=1)  # for each other's results
_BEAT = 0.5  # seconds between signs of life
_PATIENCE = timedelta(minutes=2)  # without a sign of life, until a process counts as dead
_FIRST_WORD = 1.0  # seconds that rank 0 has to complain before another process does
_LOST = "a process of this run has ended; start it again to go on from the last checkpoint"
_ORPHANED = "the launcher of this run has ended; start it again to go on from the last checkpoint"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Processes:
    """One process among `world`. Alone, all of this costs nothing.

    store: a dictionary that all share, torch's (which has no types)
    stop_signal: which signal has made `stopping` true, 0 if none has
    seconds: the most that any process has said to `stopping`
    """

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1, store: Any = None) -> None:
        self.device, self.rank, self.world, self.store = device, rank, world, store
        self.stop_signal, self.seconds = 0, 0.0
        self._asked = 0  # the signal that this process got
        self._asking: tuple[Tensor, Any] | None = None
        self._ending = Lock()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and writes what is written once."""
        return self.rank == 0

    def own_store(self) -> Any:
        """The shared store for another thread: a connection waits for one answer at a time."""
        return None if self.store is None else self.store.clone()

    def sum(self, values: Tensor) -> None:
        """Over all processes, in place."""
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
        """Refuse to go on with processes that have another text, and name the first line that differs."""
        texts = [each.splitlines() for each in self.gather(text)]
        for rank, theirs in enumerate(texts):
            for a, b in zip_longest(texts[0], theirs, fillvalue="nothing"):
                if a != b:
                    raise InsertlmError(
                        f"process {rank} has another {what} than process 0: {b.strip()}, not {a.strip()}"
                    )

    # --- Signals

    @contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """SIGTERM, which a cluster sends before it takes a machine away, and Ctrl-C make `stopping` true."""

        def ask(number: int, frame: FrameType | None) -> None:
            self._asked = max(self._asked, number)
            # A second Ctrl-C ends the run at once; but of the first one, torchrun's workers hear twice.
            if number == signal.SIGINT and self.world == 1:
                signal.signal(number, before[signal.SIGINT])

        if current_thread() is not main_thread():  # where Python hears no signals
            yield
            return
        # A shell lets the jobs in its background ignore Ctrl-C, and so they shall.
        numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
            if self._asking is not None:  # nobody leaves with a question open
                self._asking[1].wait()
        finally:
            if not self._asked:  # a launcher may ask twice, and we are on our way
                for number, handler in before.items():
                    signal.signal(number, handler)

    def stopping(self, seconds: float) -> bool:
        """Whether any process has been asked to stop. All processes call this after every step and get the same answer.
        seconds: how long this process has trained; afterwards `seconds` is the same in all

        The answer is one step old, so that nobody waits for it.
        """
        if self.world == 1:
            self.stop_signal, self.seconds = self._asked, seconds
        else:
            # The clock travels with the signal: a second collective in every step would cost as much again.
            asked = torch.tensor([self._asked, seconds], dtype=torch.float64)
            before, self._asking = self._asking, (asked, dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True))
            if before is not None:
                before[1].wait()
                self.stop_signal, self.seconds = int(before[0][0]), float(before[0][1])
        return self.stop_signal > 0

    # --- The end

    def end(self, message: str, code: int) -> NoReturn:
        """End this process at once: threads may wait for processes that are gone, and an orderly end would wait for
        them. The first process that gets here says why, and all end with its code."""
        self._ending.acquire()  # for good: the first thread to get here ends the process
        if self.rank:  # a mistake that all make is rank 0's to tell
            time.sleep(_FIRST_WORD)
        ours = f"{self.rank} {code}"
        try:
            first = self.store.compare_set("end", "", ours).decode()
        except dist.DistError:  # the store went away with the launcher
            first = f"0 {code}"
        if first == ours:
            who = f"process {self.rank} of {self.world}: " if self.rank else ""
            print(f"insertlm: {who}{' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(int(first.split()[1]))

    def watch(self, group: Any, leaving: Event) -> None:
        """End this process if another one is gone, or the launcher, until all processes are `leaving`. Runs in a
        thread."""
        launcher = os.getppid()
        while True:
            leaving.wait(_BEAT)
            if os.getppid() != launcher:  # torchrun ends its workers unless it is killed itself
                self.end(_ORPHANED, RESUME)
            all_leave = torch.tensor([leaving.is_set()], dtype=torch.int32)
            try:
                dist.all_reduce(all_leave, dist.ReduceOp.MIN, group=group)
            except RuntimeError:
                self.end(_LOST, RESUME)
            if all_leave:
                return


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """This process among those that torchrun has started, or alone."""
    # torchrun with one process sets it too. Then there is nobody to wait for.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device)
        return
    processes = _meet(device)
    # A group of its own: collectives of two threads in one group could meet in another order elsewhere.
    leaving = Event()
    group = dist.new_group(timeout=_PATIENCE, backend="gloo")
    watch = Thread(target=processes.watch, args=(group, leaving), daemon=True)
    watch.start()
    try:
        yield processes
    except SystemExit:  # all have been asked to stop
        _leave(watch, leaving)
        raise
    except KeyboardInterrupt:
        processes.end("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        processes.end("nobody reads the output any more", 128 + signal.SIGPIPE)
    except InsertlmError as error:
        processes.end(str(error), 2)
    except OSError as error:
        processes.end(place_and_reason(error), 2)
    except Exception as error:
        if is_out_of_memory(error):
            processes.end(OUT_OF_MEMORY, 2)
        if _is_lost(error):
            processes.end(_LOST, RESUME)
        traceback.print_exception(error)  # a fault of the program
        processes.end(f"{type(error).__name__}: {error}", 1)
    _leave(watch, leaving)


def _leave(watch: Thread, leaving: Event) -> None:
    """Once all are here: who ends early is taken for dead."""
    leaving.set()
    watch.join()
    gc.collect()  # what still holds gloo's threads: at the interpreter's end they would be cut off, with an abort
    dist.destroy_process_group()


def _is_lost(error: Exception) -> bool:
    """Whether it comes from a collective with a process that is gone. gloo raises plain RuntimeErrors, which only the
    place in its sources tells from others."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


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
        store = _unused_part(whole, rank, world)
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


def _unused_part(store: Any, rank: int, world: int) -> Any:
    """A part of the store that nobody has used. torchrun keeps its store when it starts workers again, and gloo would
    believe the addresses that the workers before have left there (torch 2.13: "Gloo connectFullMesh failed").

    Rank 0 makes up a name. The others answer under it with a number of their own, and believe a name once rank 0 has
    repeated their number. TORCHELASTIC_RESTART_COUNT cannot be that name, because every node counts its own restarts.
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
