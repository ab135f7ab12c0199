"""Helpers for the tests of the page in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Locator, Page, expect

__all__ = [
    "TEXT",
    "Open",
    "ask",
    "chips",
    "fill_in",
    "more_controls",
    "percent",
    "press_fill",
    "shown",
    "sse",
    "status",
]

TEXT = "Once ___ there was a girl. She ___ home."

Open = Callable[..., Page]


def fill_in(page: Page, text: str = TEXT) -> dict[str, Any]:
    """Asks for a text on the page, and returns what the server answers to the same question without streaming."""
    page.get_by_label("Your text").fill(text)
    more_controls(page).get_by_label("Sure that it is done").fill("1")  # it writes as much as it may
    return ask(page, press_fill(page))


def press_fill(page: Page, button: str = "Fill in") -> Any:
    """What the page then asks for, once it is there."""
    with page.expect_request("**/v1/infill") as asked:
        page.get_by_role("button", name=button).click()
    expect(status(page)).to_contain_text("token")
    return asked.value.post_data_json


def ask(page: Page, question: Any) -> dict[str, Any]:
    answer = page.request.post("v1/infill", data={**question, "stream": False})
    assert answer.ok
    return dict(answer.json())


def more_controls(page: Page) -> Locator:
    folded = page.locator("#more")
    folded.evaluate("element => element.open = true")
    return folded


def status(page: Page) -> Locator:
    return page.locator("#panel-text .status")


def shown(page: Page, number: int = 0) -> str:
    """A text of the result as it stands, without the marks of blanks."""
    tokens = page.locator("#panel-text .tokens").nth(number)
    return "".join(tokens.locator("> :not([hidden]):not(.blank)").all_text_contents())


def chips(page: Page) -> Locator:
    return page.locator("#panel-text .token:visible")


def percent(share: float) -> str:
    return f"{100 * share:.{0 if 0.0995 < share < 0.9995 else 1}f} %"


def sse(*events: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
