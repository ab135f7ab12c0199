"""What tests of training share: real processes, forked, so that they need not import everything again."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from insertlm.training.distributed import Processes, joined

_FORK = get_context("fork")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def launch() -> Callable[[int], list[dict[str, str]]]:
    """What torchrun would set in the environment of each of so many processes."""

    def variables(world: int) -> list[dict[str, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
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


def _child(variables: dict[str, str], work: Callable[[Processes], Any], out: Any) -> None:
    os.environ.update(variables)
    try:
        with joined(torch.device("cpu")) as processes:
            out.send((True, work(processes)))
    except BaseException:  # whatever it is, the test is to show it
        out.send((False, traceback.format_exc()))
