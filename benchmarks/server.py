"""How much load does a server take? It starts `insertlm serve` and sends requests through sockets.

python benchmarks/server.py models/stories-mini               # the figures of docs/serving.md: ten minutes on 2 cores
python benchmarks/server.py MODEL --seconds 5 --requests 200 --kills 20 --pairs 3

- Throughput: one client, then several at once, send requests of a fixed number of tokens one after the other.
- Latency: the median difference between a request through HTTP and the same call in Python, taken alternately.
- Kills: clients disconnect at a random moment, cleanly or not; afterwards no text may be running.
- Memory: of the server process during many short requests of several clients, after the first tenth of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from common import report

import insertlm
from insertlm.infill.results import Infilling
from insertlm.server.app import create_app

TEXT = "One day a little girl named Lily ___. Her mother said it was time to go home and they were both very happy."


class Server:
    """A process of `insertlm serve`."""

    def __init__(self, model: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "insertlm", "serve", model, "--port", str(port), "--device", "cpu"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                httpx.get(f"{self.url}/health")
                return
            except httpx.TransportError:
                time.sleep(0.1)

    def running_texts(self) -> int:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(int(float(value)) for value in re.findall(r"^insertlm_texts_\w+\{.*\} (\S+)$", text, re.MULTILINE))

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def body(tokens: int, seed: int) -> dict[str, Any]:
    return {"text": TEXT, "min_length": tokens, "max_length": tokens, "max_tokens": tokens, "seed": seed}


@asynccontextmanager
async def connected(server: Server, clients: int) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        yield client


async def load(server: Server, clients: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Several clients send requests for some seconds. Requests that run at the end are finished and counted."""
    waits, errors, written, began = list[float](), 0, 0, time.perf_counter()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal errors, written
        sent = 0
        while (started := time.perf_counter()) < began + seconds:
            answer = await client.post("/v1/infill", json=body(tokens, 1000 * number + sent))
            waits.append(time.perf_counter() - started)
            errors += answer.status_code != 200
            if answer.status_code == 200:
                written += answer.json()["usage"]["completion_tokens"]
            sent += 1

    async with connected(server, clients) as client:
        await asyncio.gather(*(one(client, number) for number in range(clients)))
    mean = statistics.fmean(waits)
    return {
        "requests": len(waits),
        "errors": errors,
        "tokens_per_second": round(written / (time.perf_counter() - began), 1),
        "mean_seconds": round(mean, 3),
        "longest_over_mean": round(max(waits) / mean, 2),
    }


def added_milliseconds(model: insertlm.Model, pairs: int, tokens: int) -> dict[str, float]:
    differences, alone = list[float](), list[float]()

    def filled(seed: int) -> list[Infilling]:
        return model.infill(TEXT, min_length=tokens, max_length=tokens, max_tokens=tokens, seed=seed)

    with served_here(model) as url, httpx.Client(base_url=url, timeout=120) as client:
        for number in range(-2, pairs):
            started = time.perf_counter()
            seed = number + 2
            [there] = aside(filled, seed)
            between = time.perf_counter()
            here = client.post("/v1/infill", json=body(tokens, seed)).json()
            if here["text"] != there.text:
                raise SystemExit("the server and the Python API do not agree")
            if number >= 0:  # the first ones initialise libraries
                alone.append(1000 * (between - started))
                differences.append(1000 * (time.perf_counter() - between) - alone[-1])
    return {
        "python_milliseconds": round(statistics.median(alone), 1),
        "added_milliseconds": round(statistics.median(differences), 1),
    }


@contextmanager
def served_here(model: insertlm.Model) -> Iterator[str]:
    """Served by this process with the same weights: on a shared machine one of two processes may be a fifth slower."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app([model]), port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def aside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread that ends, as the server does (see server/worker.py)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


async def kills(server: Server, count: int, tokens: int) -> dict[str, int]:
    """Clients that disconnect before or during their stream."""
    draw = random.Random(0)

    async def one(number: int, pause: float, abort: bool) -> None:
        data = json.dumps({**body(tokens, number), "stream": number % 4 > 0}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = "POST /v1/infill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.sleep(pause)
        if abort:
            writer.transport.abort()
        writer.close()

    places = asyncio.Semaphore(16)

    async def placed(*arguments: Any) -> None:
        async with places:
            await one(*arguments)

    await asyncio.gather(*(placed(number, draw.random(), draw.random() < 0.5) for number in range(count)))
    for _ in range(100):
        if not (left := server.running_texts()):
            break
        await asyncio.sleep(0.1)
    return {"kills": count, "left_after_kills": left}


async def memory(server: Server, requests: int, clients: int, tokens: int = 3) -> dict[str, Any]:
    sizes, numbers = list[float](), iter(range(requests))

    async def one(client: httpx.AsyncClient) -> None:
        for number in numbers:
            (await client.post("/v1/infill", json=body(tokens, number))).raise_for_status()
            if number % max(1, requests // 20) == 0 and number >= requests // 10:
                sizes.append(server.megabytes())

    async with connected(server, clients) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    sizes.append(server.megabytes())
    return {
        "memory_requests": requests,
        "megabytes": round(sizes[0]),
        "megabytes_change_percent": round(100 * (sizes[-1] / sizes[0] - 1), 1),
        "megabytes_range_percent": round(100 * (max(sizes) - min(sizes)) / sizes[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model of text")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2000, help="for memory")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=20, help="for latency")
    arguments = parser.parse_args()
    model = aside(insertlm.load, arguments.model, "cpu")
    latency = added_milliseconds(model, arguments.pairs, arguments.tokens)
    server = Server(arguments.model)
    try:
        server.wait()
        one = asyncio.run(load(server, 1, arguments.seconds, arguments.tokens))
        many = asyncio.run(load(server, arguments.clients, arguments.seconds, arguments.tokens))
        ends = asyncio.run(kills(server, arguments.kills, arguments.tokens))
        size = asyncio.run(memory(server, arguments.requests, arguments.clients))
    finally:
        server.stop()
    report(
        "server",
        torch.device("cpu"),
        model=Path(arguments.model).name,
        parameters=sum(weight.numel() for weight in model.family.parameters()),
        tokens=arguments.tokens,
        seconds=arguments.seconds,
        one_client=one,
        clients=arguments.clients,
        many_clients=many,
        speedup=round(many["tokens_per_second"] / max(one["tokens_per_second"], 1e-9), 2),
        **latency,
        **ends,
        **size,
    )


if __name__ == "__main__":
    main()
