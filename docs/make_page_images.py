"""Makes the pictures of the page: docs/images/page*.png and the animated docs/images/page.gif.

    python docs/make_page_images.py                     # of the bundled models; starts `insertlm serve` by itself
    python docs/make_page_images.py english star-hard-mini
    python docs/make_page_images.py --url http://127.0.0.1:8000/

They show what the page opens with: the first example of the first model of text.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
GRAPH = 7
LONGEST = 60_000  # ms for a text, and for the server to start: the machine may be busy
FIRST, STEP, LAST = 1200, 220, 3500  # ms that a frame of the animation stays
COLOURS = 128


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("models", nargs="*", help="as for insertlm serve")
    arguments.add_argument("--url", help="of a server that runs")
    arguments.add_argument("--out", type=Path, default=IMAGES, help="a folder")
    arguments.add_argument("--browser", default=shutil.which("chromium"), help="Chromium's command")
    chosen = arguments.parse_args()
    with served(chosen.url, chosen.models) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=["--no-sandbox"])
        for scheme, name in (("light", "page.png"), ("dark", "page-dark.png")):
            picture(browser, url, scheme, chosen.out / name)
        graph_picture(browser, url, chosen.out / "page-graph.png")
        animation(browser, url, chosen.out / "page.gif")
        browser.close()


@contextmanager
def served(url: str | None, models: Sequence[str]) -> Iterator[str]:
    """A server's address; without one, of a new server of these models."""
    if url:
        yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "insertlm", "serve", *models, "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}/"
        wait_for(f"{url}health", server)
        yield url
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LONGEST / 1000
    while True:
        try:
            urllib.request.urlopen(url)
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def opened(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    view: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page = browser.new_page(base_url=url, reduced_motion="reduce", device_scale_factor=1.5, **view)
    page.set_default_timeout(LONGEST)
    page.goto("/")
    return page


def filled(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """The page once it has filled in the example that it opens with, which has another caption until then."""
    page = opened(browser, url, scheme, width, height)
    page.locator(".examples button").first.click()
    page.locator("#panel-text .status", has_text=" by ").wait_for()
    return page


def picture(browser: Browser, url: str, scheme: str, file: Path) -> None:
    page = filled(browser, url, scheme, 1120, 860)
    tokens = page.locator("#panel-text .token:visible")
    tokens.nth(tokens.count() // 2).hover()
    page.screenshot(path=file, full_page=True)


def graph_picture(browser: Browser, url: str, file: Path) -> None:
    page = opened(browser, url, "light", 1120, 720)
    page.get_by_role("tab", name="Solve a graph").click()
    page.get_by_label("Graph", exact=True).fill(str(GRAPH))
    page.get_by_role("button", name="Solve").click()
    page.locator("#panel-graph .status", has_text="path").wait_for()
    page.screenshot(path=file)


def animation(browser: Browser, url: str, file: Path) -> None:
    """The result, insertion by insertion."""
    page = filled(browser, url, "light", 860, 1200)
    page.locator("#panel-text .share").evaluate("share => share.hidden = true")
    slider = page.get_by_role("slider", name="Replay")
    total = int(slider.input_value())
    frames = []
    for count in range(total + 1):
        slider.fill(str(count))
        frames.append(Image.open(io.BytesIO(page.locator("#panel-text .result").screenshot())).convert("RGB"))
    palette = frames[-1].quantize(COLOURS)  # one for all frames: it has every colour, and nothing flickers
    still = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [FIRST, *([STEP] * (total - 1)), LAST]
    still[0].save(file, save_all=True, append_images=still[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main()
