"""Makes the pictures of the page: docs/images/page*.png and the animated docs/images/page.gif.

    python docs/make_page_images.py                     # starts `insertlm serve` by itself
    python docs/make_page_images.py --url http://127.0.0.1:8000/

Needs Chromium, and for the intended look the fonts Inter and Caladea (Debian: chromium fonts-inter
fonts-crosextra-caladea).
"""

from __future__ import annotations

import argparse
import io
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
TEXT = (Path(__file__).parent / "examples" / "red-ball.txt").read_text().strip()
SETTINGS = {"Seed": "10"}
GRAPH = 7
FIRST, STEP, LAST = 1200, 220, 3500  # ms that a frame of the animation stays
COLOURS = 128


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url", help="of a server that runs")
    arguments.add_argument("--browser", default=shutil.which("chromium"), help="Chromium's command")
    chosen = arguments.parse_args()
    with served(chosen.url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            picture(browser, url, scheme)
        graph_picture(browser, url)
        animation(browser, url)
        browser.close()


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """A server's address; without one, of a new server."""
    if url:
        yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "insertlm", "serve", "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}/"
        wait_for(f"{url}health")
        yield url
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def opened(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    view: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page = browser.new_page(base_url=url, reduced_motion="reduce", device_scale_factor=1.5, **view)
    page.goto("/")
    return page


def filled(page: Page) -> None:
    page.get_by_label("Your text").fill(TEXT)
    for label, value in SETTINGS.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Fill in").click()
    page.locator("#panel-text .status", has_text="token").wait_for()


def picture(browser: Browser, url: str, scheme: str) -> None:
    page = opened(browser, url, scheme, 1120, 860)
    filled(page)
    tokens = page.locator("#panel-text .token")
    tokens.nth(tokens.count() // 2).hover()
    page.screenshot(path=IMAGES / ("page.png" if scheme == "light" else "page-dark.png"))


def graph_picture(browser: Browser, url: str) -> None:
    page = opened(browser, url, "light", 1120, 720)
    page.get_by_role("tab", name="Solve a graph").click()
    page.get_by_label("Graph", exact=True).fill(str(GRAPH))
    page.get_by_role("button", name="Solve").click()
    page.locator("#panel-graph .status", has_text="path").wait_for()
    page.screenshot(path=IMAGES / "page-graph.png")


def animation(browser: Browser, url: str) -> None:
    """The result, insertion by insertion."""
    page = opened(browser, url, "light", 860, 1200)
    filled(page)
    slider = page.get_by_role("slider", name="Replay")
    total = int(slider.input_value())
    frames = []
    for count in range(total + 1):
        slider.fill(str(count))
        frames.append(Image.open(io.BytesIO(page.locator("#panel-text .result").screenshot())).convert("RGB"))
    palette = frames[-1].quantize(COLOURS)  # one for all frames: it has every colour, and nothing flickers
    still = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [FIRST, *([STEP] * (total - 1)), LAST]
    still[0].save(IMAGES / "page.gif", save_all=True, append_images=still[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main()
