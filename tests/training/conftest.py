"""What tests of training share: real processes, forked, so that they need not import everything again."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes, joined

_FORK = get_context("fork")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def launch() -> Callable[[int], list[dict[str, str]]]:
    """What torchrun would set in the environment of each of so many processes. It hosts their store, too."""
    stores: list[Any] = []

    def variables(world: int) -> list[dict[str, str]]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        stores.append(store)
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return [
            {**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)
        ]

    return variables


@pytest.fixture(scope="session")
def in_processes(
    launch: Callable[[int], list[dict[str, str]]],
) -> Callable[[int, Callable[[Processes], Any]], list[Any]]:
    """Runs a function in so many processes; what it gives in each."""

    def run(world: int, work: Callable[[Processes], Any]) -> list[Any]:
        pipes = [_FORK.Pipe(duplex=False) for _ in range(world)]
        children = [
            _FORK.Process(target=_child, args=(variables, work, out), daemon=True)
            for variables, (_, out) in zip(launch(world), pipes, strict=True)
        ]
        for child in children:
            child.start()
        found = [receive.recv() for receive, _ in pipes]
        for child in children:
            child.join()
        for good, value in found:
            assert good, value
        return [value for _, value in found]

    return run


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A step is taken here, so that forked processes find everything imported."""
    folder = tmp_path_factory.mktemp("warm")
    star = {"name": "star", "degree": 2, "min_nodes": 3, "max_nodes": 3, "min_plan": 2, "nodes": 8, "train": 4}
    model = {"layers": 1, "width": 8, "heads": 2, "hidden": 8}
    recipe = {"task": star, "model": model, "train": {"steps": 1, "batch_size": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(folder / "recipe.yaml"), "--run", str(folder / "run"), "--device", "cpu"]) == 0


@pytest.fixture
def commands(tmp_path: Path, warm: None) -> Iterator[Callable[[Sequence[str], dict[str, str]], Command]]:
    """Starts `insertlm` with these arguments and variables in a process of its own."""
    started: list[Command] = []

    def start(arguments: Sequence[str], variables: dict[str, str]) -> Command:
        said = tmp_path / f"said-{len(started)}"
        child = _FORK.Process(target=_command, args=(arguments, variables, said), daemon=True)
        child.start()
        started.append(Command(child, said))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()


@dataclass(frozen=True)
class Command:
    process: Any
    said: Path

    @property
    def printed(self) -> str:
        return self.said.with_suffix(".out").read_text()

    def end(self, seconds: float = 60) -> tuple[int, list[str]]:
        """Its code, and its lines on standard error; those on standard output are in `printed`."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "it does not end"
        return self.process.exitcode, self.said.read_text().splitlines()


def _command(arguments: Sequence[str], variables: dict[str, str], said: Path) -> None:
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w")
    sys.stdout = said.with_suffix(".out").open("w")
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _child(variables: dict[str, str], work: Callable[[Processes], Any], out: Any) -> None:
    os.environ.update(variables)
    try:
        with joined(torch.device("cpu")) as processes:
            try:
                out.send((True, work(processes)))
            except BaseException:  # whatever it is, the test is to show it
                out.send((False, traceback.format_exc()))
                raise
    except InsertlmError:  # they have not met
        out.send((False, traceback.format_exc()))
