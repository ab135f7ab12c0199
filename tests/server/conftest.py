"""A real server on a free port, with models that are not trained: what is tested goes through sockets."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
import uvicorn
from lettering import Few, build, text_model

from insertlm.families.arm import ArmConfig
from insertlm.families.ilm import IlmConfig
from insertlm.model import Model
from insertlm.recipe import build_family, parse_recipe
from insertlm.server.app import create_app
from insertlm.server.connections import Connection
from insertlm.server.hosts import Hosts
from insertlm.server.limits import Limits

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RECIPE = parse_recipe(
    {
        "task": {"name": "star", "degree": 2, "min_nodes": 3, "max_nodes": 3, "min_plan": 2, "nodes": 8},
        "model": {"layers": 1, "width": 16, "heads": 2, "hidden": 32},
        "train": {"steps": 1},
        "decode": {"max_steps": 6, "stop_threshold": 1.0},
    },
    "test",
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FAILED = "Failed to load resource"  # the browser's own note on every answer that is an error


LOCAL = Hosts("127.0.0.1")


class Running:
    """A server at work. url: where   app: what"""

    def __init__(self, server: uvicorn.Server, app: Any) -> None:
        self.server, self.app = server, app
        [self.port] = [s.getsockname()[1] for each in server.servers for s in each.sockets]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **more)

    def workers(self) -> list[Any]:
        return [one.worker for one in self.app.state.registry.served.values()]

    def idle(self, seconds: float = 10) -> bool:
        """Whether nothing is under way, soon."""
        end = time.monotonic() + seconds
        while any(worker.running or worker.waiting for worker in self.workers()) and time.monotonic() < end:
            time.sleep(0.01)
        return not any(worker.running or worker.waiting for worker in self.workers())


@contextmanager
def run(app: Any) -> Iterator[Running]:
    options: Any = {"http": Connection, "log_level": "critical", "timeout_graceful_shutdown": 20}
    server = uvicorn.Server(uvicorn.Config(app, port=0, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield Running(server, app)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def star_model() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(build_family(RECIPE).double().eval().requires_grad_(False), RECIPE, Path("graphs"))


@pytest.fixture(scope="session")
def models() -> list[Model]:
    letters, arm = build(IlmConfig(), Few), build(ArmConfig(), Few)
    return [text_model(letters, "letters"), text_model(arm, "leftward"), star_model()]


@pytest.fixture(scope="session")
def start() -> Callable[[Any], Any]:
    """An app as a server, for as long as a `with` lasts."""
    return run


@pytest.fixture(scope="session")
def serve(models: list[Model]) -> Callable[..., Any]:
    """A server with limits and a key of its own, for as long as a `with` lasts."""

    def begin(key: str | None = None, models: list[Model] = models, hosts: Hosts = LOCAL, **limits: int) -> Any:
        return run(create_app(models, Limits(**limits), key, hosts))

    return begin


@pytest.fixture(scope="session")
def server(serve: Callable[..., Any]) -> Iterator[Running]:
    with serve() as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


# --- Pages in a real browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium here: the page is not tested (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=15_000)
    with sync_playwright() as playwright:
        # Root, as in a container, cannot have the sandbox. Nothing but our own page is opened.
        browser = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Callable[..., Page]]:
    """Opens a page of the server at `url`. In the end: nothing in the console, and no request to anywhere else."""
    told: list[str] = []
    contexts = []

    def build(path: str = "/", *, motion: bool = False, **options: Any) -> Page:
        context = browser.new_context(base_url=url, reduced_motion="no-preference" if motion else "reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: told.append(request.url) if elsewhere(request.url) else None)
        page.goto(path)
        return page

    def elsewhere(address: str) -> bool:
        return address.startswith("http") and urlsplit(address).hostname != urlsplit(url).hostname

    yield build
    for context in contexts:
        context.close()
    assert [line for line in told if FAILED not in line] == []
