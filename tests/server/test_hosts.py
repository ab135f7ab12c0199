"""A server answers to its own names only, and does not wait for ever for a client that does not speak."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from insertlm.cli.main import main
from insertlm.server.connections import Connection
from insertlm.server.hosts import Hosts

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


# --- Names


@pytest.mark.parametrize(
    ("bound", "more", "header", "allowed"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "LocalHost.", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "10.0.0.7", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", (), "localhost:80:80", False),
        ("127.0.0.1", (), "evil.example@localhost", False),
        ("127.0.0.1", ("models.lan",), "models.lan:8000", True),
        ("127.0.0.1", ("models.lan",), "more.models.lan", False),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("box.lan", (), "BOX.lan", True),
        ("10.0.0.7", (), "10.0.0.7", True),
        ("10.0.0.7", (), "10.0.0.8", False),
        ("0.0.0.0", (), "10.0.0.7:8000", True),
        ("0.0.0.0", (), "localhost:8000", True),
        ("0.0.0.0", (), "evil.example", False),
        ("::", (), "[fe80::1]:8000", True),
        ("::", (), "[evil.example]", False),
    ],
)
def test_who_is_meant(bound: str, more: tuple[str, ...], header: str, allowed: bool) -> None:
    assert Hosts(bound, more).allows(header) is allowed


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/infill", "/nowhere"])
def test_a_request_to_another_name_is_refused_everywhere(server: Any, path: str) -> None:
    with server.client() as client:
        for headers in ({"host": "evil.example"}, {"host": ""}):
            answer = client.post(path, json={"text": "a ___"}, headers=headers)
            assert answer.status_code == 421
            line = "this is not the host that the request names; see insertlm serve --allowed-host"
            assert answer.json()["error"]["message"] == line
        assert client.post(path, json={"text": "a ___"}).status_code in (200, 404, 405)


def test_of_two_names_none_counts(server: Any) -> None:
    assert b" 200 OK" in ask(server.port, REQUEST)
    assert b" 4" in ask(server.port, REQUEST.replace(b"Host", b"Host: evil.example\r\nHost"))[:20]
    assert b" 421 " in ask(server.port, b"GET /health HTTP/1.0\r\n\r\n")


def test_the_command_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **more: started.update(app=app, **more))
    serve = ["serve", "star-hard-mini", "--device", "cpu", "--port", "0"]
    assert main([*serve, "--allowed-host", "models.lan", "--allowed-host", "box"]) == 0
    assert started["http"] is Connection
    client = TestClient(started["app"])
    names = ("models.lan", "box:80", "localhost", "testserver")
    assert [client.get("/v1/models", headers={"host": name}).status_code for name in names] == [200, 200, 200, 421]
    for wrong in ("models.lan:80", "a b", ""):
        assert main([*serve, "--allowed-host", wrong]) == 2
        line = f"insertlm: argument --allowed-host: expected a name without a port, or *, got {wrong!r}\n"
        assert capsys.readouterr().err.endswith(line)


# --- Clients that do not speak


def ask(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(data)
        return line.recv(4096)


@pytest.mark.parametrize("begun", [b"", b"GET /health", REQUEST[:-2], REQUEST + REQUEST[:-9]])
def test_headers_that_do_not_come_are_not_waited_for(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(Connection, "seconds", 0.5)
    with serve() as running, socket.create_connection(("127.0.0.1", running.port), timeout=10) as line:
        line.sendall(begun)
        started, more = time.monotonic(), b""
        while data := read(line):  # a byte now and then changes nothing
            more += data
        assert time.monotonic() - started < 8
        assert more.count(b" 200 OK") == begun.count(b"\r\n\r\n")


def read(line: socket.socket) -> bytes:
    """What comes, while another byte is sent; b"" once the server has hung up."""
    line.settimeout(0.2)
    while True:
        try:
            return line.recv(4096)
        except TimeoutError:
            try:
                line.sendall(b"a")
            except OSError:
                return b""
        except OSError:
            return b""


def test_who_speaks_in_time_is_served(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers may come in parts, and an answer may take longer than they may."""
    monkeypatch.setattr(Connection, "seconds", 1.0)
    with serve(seconds=2) as running, socket.create_connection(("127.0.0.1", running.port)) as line:
        line.settimeout(10)
        for _ in range(2):
            for part in (REQUEST[:9], REQUEST[9:30], REQUEST[30:]):
                line.sendall(part)
                time.sleep(0.1)
            assert b" 200 OK" in line.recv(4096)
        line.sendall(REQUEST[:-2].replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n")
        assert b" 408 " in line.recv(4096)  # by the time that a body may take, two seconds
