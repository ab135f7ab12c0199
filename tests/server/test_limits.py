"""Limits, clients that go away, the end of a server, and what no answer may tell."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from insertlm.cli.main import main
from insertlm.inference.scheduler import Scheduler
from insertlm.model import Model
from insertlm.server.app import create_app

Serve = Callable[..., Any]
TEXT = "the ___ was ___."
ENDLESS = {"text": TEXT, "stop_threshold": 1.0, "min_length": 30, "max_tokens": 60}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Every step takes at least so long, from now on."""

    def set_(seconds: float) -> None:
        step = Scheduler.advance

        def slower(self: Scheduler) -> Any:
            time.sleep(seconds)
            return step(self)

        monkeypatch.setattr(Scheduler, "advance", slower)

    return set_


# --- What one request may ask for


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/infill", {"text": "a" * 301 + "___"}, 413, "expected at most 300 characters, got 304"),
        ("/v1/completions", {"prompt": "a" * 301}, 413, "expected at most 300 characters, got 301"),
        ("/v1/solve", {"prompt": "1" * 301}, 413, "expected at most 300 characters, got 301"),
        ("/v1/infill", {"text": "a" * 5000}, 413, "the request has more than 2000 bytes"),
        ("/v1/infill", {"text": "___a" * 5}, 422, "expected at most 4 blanks, got 5"),
        ("/v1/infill", {"text": "abcdef", "blanks": [[k, k] for k in range(5)]}, 422, "expected at most 4 blanks"),
        ("/v1/infill", {"text": "___", "max_tokens": 51}, 422, "expected at most 50 tokens, got 51"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 51}, 422, "expected at most 50 tokens, got 51"),
        ("/infill", {"input_prefix": "a", "n_predict": 51}, 422, "expected at most 50 tokens, got 51"),
        ("/v1/completions", {"prompt": ["a"] * 4}, 422, "expected 1 to 3 texts of one request, got 4"),
        ("/v1/completions", {"prompt": []}, 422, "expected 1 to 3 texts of one request, got 0"),
        ("/v1/infill", {"text": "___", "banned": ["a"] * 3}, 422, "expected at most 2 words, got 3"),
        ("/v1/infill", {"text": "___", "required": ["a"] * 3}, 422, "expected at most 2 words, got 3"),
    ],
)
def test_what_is_too_much_is_refused(small: Any, path: str, body: Any, status: int, message: str) -> None:
    with small.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(message)


@pytest.fixture(scope="module")
def small(serve: Serve) -> Any:
    with serve(bytes=2000, characters=300, blanks=4, tokens=50, samples=3, words=2) as running:
        yield running


def test_a_body_without_a_length_is_limited_too(small: Any) -> None:
    with small.client() as client:
        answer = client.post("/v1/infill", content=(b"x" * 500 for _ in range(10)))
    assert answer.status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    with serve(seconds=1) as running, socket.create_connection(("127.0.0.1", running.port)) as line:
        line.sendall(b"POST /v1/infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in line.recv(4096)


def test_a_text_that_takes_too_long_is_given_up(serve: Serve, slow: Callable[[float], None]) -> None:
    with serve(seconds=1) as running, running.client() as client:
        slow(0.1)
        answer = client.post("/v1/infill", json=ENDLESS)
        assert answer.status_code == 504
        assert answer.json()["error"] == {
            "message": "the text was not done within 1 seconds",
            "type": "timeout",
            "param": None,
            "code": None,
        }
        streamed = client.post("/v1/infill", json={**ENDLESS, "stream": True}).text
        assert "event: start" in streamed
        assert json.loads(streamed.split("event: error\ndata: ")[1])["error"]["type"] == "timeout"
        plain = client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 60, "stream": True}).text
        assert "not done within" in plain or "[DONE]" in plain
        assert running.idle()


# --- How many there may be


def test_more_wait_and_still_more_are_sent_away(serve: Serve, slow: Callable[[float], None]) -> None:
    with serve(concurrent=2, queue=3) as running, running.client() as client:
        slow(0.02)

        def ask(seed: int) -> httpx.Response:
            answer: httpx.Response = client.post("/v1/infill", json={**ENDLESS, "seed": seed})
            return answer

        [worker] = [one.worker for name, one in running.app.state.registry.served.items() if name == "letters"]
        most = 0
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, seed) for seed in range(12)]
            while not all(answer.done() for answer in answers):
                most = max(most, worker.running)
                time.sleep(0.005)
        codes = [answer.result().status_code for answer in answers]
        assert sorted(codes) == [200] * 5 + [429] * 7
        assert most == 2
        refused = next(answer.result() for answer in answers if answer.result().status_code == 429)
        assert refused.json()["error"]["type"] == "overloaded"
        never = client.post("/v1/completions", json={"prompt": TEXT, "n": 6})  # it would not help to try again
        assert (never.status_code, never.json()["error"]["message"]) == (422, "expected at most 5 texts at once, got 6")
        assert refused.headers["retry-after"] == "1"
        assert running.idle()
        assert ask(0).status_code == 200


# --- Clients that go away


def send(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    line = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return line


def kill(line: socket.socket, roughly: bool) -> None:
    if roughly:  # a reset instead of a farewell
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def killed_at_random(running: Any, count: int, seed: int = 0) -> None:
    """Requests of all kinds, each left after a random while, a few at a time."""
    draw = random.Random(seed)
    kinds = [
        ("/v1/infill", {**ENDLESS, "stream": True}),
        ("/v1/infill", ENDLESS),
        ("/v1/infill", {**ENDLESS, "stream": True, "banned": ["cat"]}),
        ("/v1/completions", {"prompt": "a ", "suffix": " b", "max_tokens": 60, "stream": True}),
        ("/infill", {"input_prefix": "a ", "n_predict": 60}),
        ("/v1/solve", {"prompt": "1>2 2>3 4>2 2>5 : 1 3", "stream": True}),
    ]

    def one(number: int, pause: float, roughly: bool) -> None:
        path, body = kinds[number % len(kinds)]
        line = send(running.port, path, {**body, "seed": number} if "seed" not in body else body)
        time.sleep(pause)
        kill(line, roughly)

    with ThreadPoolExecutor(8) as pool:
        for number in range(count):
            pool.submit(one, number, draw.random() * 0.15, draw.random() < 0.5)


def test_clients_that_go_away_leave_nothing_behind(
    serve: Serve, models: list[Model], slow: Callable[[float], None]
) -> None:
    """The long form, with 200 of them, is in benchmarks/server.py."""
    with serve(concurrent=4) as running:
        slow(0.01)
        killed_at_random(running, 40)
        assert running.idle()
        assert all(len(worker._scheduler) == 0 for worker in running.workers())
        assert sum(worker.cancelled for worker in running.workers()) > 10
        with running.client() as client:
            answer = client.post("/v1/infill", json={"text": TEXT, "max_length": 3, "seed": 1}).json()
        assert answer["text"] == models[0].infill(TEXT, max_length=3, seed=1)[0].text


def test_one_that_waits_and_goes_away_never_begins(serve: Serve, slow: Callable[[float], None]) -> None:
    with serve(concurrent=1) as running:
        slow(0.02)
        first = send(running.port, "/v1/infill", ENDLESS)
        time.sleep(0.1)
        kill(send(running.port, "/v1/infill", ENDLESS), False)
        time.sleep(0.2)
        [worker] = [one.worker for name, one in running.app.state.registry.served.items() if name == "letters"]
        assert (worker.running, worker.waiting, worker.cancelled) == (1, 0, 1)
        kill(first, True)
        assert running.idle()


def test_a_stream_that_nobody_reads_is_left(serve: Serve, slow: Callable[[float], None]) -> None:
    with serve() as running:
        slow(0.3)  # it would take eighteen seconds to its end
        line = send(running.port, "/v1/infill", {**ENDLESS, "stream": True})
        assert b" 200 OK" in line.recv(100)
        kill(line, False)
        until(lambda: sum(worker.cancelled for worker in running.workers()) == 1, 8)
        assert running.idle(4)


# --- What goes wrong inside


def test_a_fault_is_told_to_those_it_hit_and_tells_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as running:
        step = Scheduler.advance

        def broken(self: Scheduler) -> Any:
            raise RuntimeError(f"secret of {__file__}")

        monkeypatch.setattr(Scheduler, "advance", broken)
        for body in (ENDLESS, {**ENDLESS, "stream": True}):
            answer = httpx.post(f"{running.url}/v1/infill", json=body)  # a fault closes the connection
            assert answer.status_code == (200 if "stream" in body else 500)
            assert "something went wrong on the server" in answer.text
            assert all(word not in answer.text for word in ("secret", "Traceback", "/", ".py"))
        monkeypatch.setattr(Scheduler, "advance", step)
        with running.client() as client:
            assert client.post("/v1/infill", json={"text": TEXT}).status_code == 200
            assert client.get("/health").status_code == 200


def test_files_of_the_server_are_not_given_away(client: httpx.Client) -> None:
    for path in ("/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "//etc/passwd", "/assets/model.safetensors"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", ["/", "/app.js", "/health", "/nowhere"])
def test_answers_are_neither_guessed_at_nor_framed_nor_kept(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["cache-control"] == "no-cache"


# --- The end


def test_what_runs_is_finished_and_nothing_new_is_taken(serve: Serve, slow: Callable[[float], None]) -> None:
    with serve() as running, running.client() as client, ThreadPoolExecutor(4) as pool:
        slow(0.01)
        answers = [pool.submit(client.post, "/v1/infill", json={**ENDLESS, "stream": bool(k)}) for k in range(3)]
        while sum(worker.running for worker in running.workers()) < 3:
            time.sleep(0.01)
        running.server.should_exit = True
        codes = [answer.result().status_code for answer in answers]
        assert codes == [200, 200, 200]
        assert "event: done" in answers[2].result().text
        with pytest.raises(httpx.TransportError):
            client.get("/health")


def test_a_closed_worker_takes_nothing(models: list[Model]) -> None:
    app = create_app(models)
    app.state.registry.close()
    [worker, *_] = [one.worker for one in app.state.registry.served.values()]
    assert not worker.alive
    with pytest.raises(Exception, match="the server is shutting down"):
        worker.submit(None)


def test_a_worker_has_a_thread_only_while_it_writes(serve: Serve, slow: Callable[[float], None]) -> None:
    def computing() -> int:
        return sum(thread.name.startswith("insertlm-") for thread in threading.enumerate())

    before = computing()  # of other servers
    with serve() as running, running.client() as client, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            slow(0.01)
            answer = pool.submit(client.post, "/v1/infill", json=ENDLESS)
            until(lambda: computing() == before + 1)
            assert answer.result().status_code == 200
            until(lambda: computing() == before)


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


@contextmanager
def command_at_work(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`insertlm serve`, once it answers, and its address. What it says goes into `folder`."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "insertlm", "serve", "--port", str(port), "--device", "cpu"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log, cwd=folder) as process:
        try:
            until(lambda: process.poll() is not None or answers(f"{address}/health"), 60)
            yield process, address
        finally:
            process.kill()


def answers(address: str) -> bool:
    try:
        return httpx.get(address).status_code == 200
    except httpx.TransportError:
        return False


def test_the_command_serves_bundled_models_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with command_at_work(tmp_path) as (process, address):
        names = [m["id"] for m in httpx.get(f"{address}/v1/models").json()["data"]]
        assert "star-hard-mini" in names
        graph = httpx.get(f"{address}/v1/graphs/example?seed=3").json()
        answer = httpx.post(f"{address}/v1/solve", json={"prompt": graph["prompt"]}, timeout=60).json()
        assert answer["nodes"] == graph["path"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_a_second_interrupt_leaves_what_runs(tmp_path: Path) -> None:
    with command_at_work(tmp_path) as (process, address), ThreadPoolExecutor(1) as pool:
        body = {"text": "Lily ___.", "min_length": 500, "max_length": 500, "best_of": 1}
        asked = pool.submit(httpx.post, f"{address}/v1/infill", json=body, timeout=60)
        until(lambda: 'texts_running{model="english"} 1.0' in httpx.get(f"{address}/metrics").text)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.wait(20) in (0, -signal.SIGINT)
        assert asked.exception() is not None or asked.result().status_code >= 500


@pytest.mark.parametrize("package", ["fastapi_swagger", "prometheus_client", "uvicorn"])
def test_without_the_extra_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve"]) == 2
    line = f"insertlm: serve needs the package {package}: pip install 'insertlm[serve]'\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "nowhere: no model there; expected a run folder with recipe.yaml"),
        (["star-hard-mini", "star-hard-mini"], "two models have the same name; expected folders of different names"),
        (["--port", "99999"], "argument --port: expected a whole number of at most 65535, got '99999'"),
        (["--api-key", " "], "argument --api-key: expected a key, got an empty one"),
        (["--api-key", "s\xe9cret"], "argument --api-key: expected a key of ASCII characters alone"),
        (["--api-key", "ses\name"], "argument --api-key: expected a key of ASCII characters alone, without line ends"),
        (["--api-key", "sesame\x00"], "argument --api-key: expected a key of ASCII characters alone"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid, port 8000: "),
        (["--max-tokens", "0"], "argument --max-tokens: expected a whole number of at least 1, got '0'"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["serve", *arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"insertlm: {line}")


def test_a_port_that_is_taken_is_told_before_models_are_loaded(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insertlm.model.load", None)
    assert main(["serve", "--port", str(server.port)]) == 2
    line = f"cannot listen on 127.0.0.1, port {server.port}: Address already in use; see --host and --port"
    assert capsys.readouterr().err == f"insertlm: {line}\n"
