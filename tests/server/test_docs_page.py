"""/docs in a real browser: all endpoints, ready to be tried, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

import insertlm
from insertlm.model import Model

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def running(serve: Callable[..., Any], models: list[Model]) -> Iterator[Any]:
    with serve(models=[models[0], insertlm.load("star-hard-mini")], key="open sesame") as running:
        yield running


@pytest.fixture(scope="module")
def url(running: Any) -> str:
    return str(running.url)


def schema(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/openapi.json").json())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_endpoints_are_shown(open_page: Open, url: str, scheme: str) -> None:
    page = open_page("/docs", color_scheme=scheme)
    expect(page.get_by_role("heading", name="insertlm", exact=False).first).to_be_visible()
    paths = page.locator(".opblock-summary-path")
    expect(paths).to_have_count(len(schema(url)["paths"]))
    shown = {text.replace("\u200b", "") for text in paths.all_text_contents()}
    assert shown == {*schema(url)["paths"]}
    background = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
    assert (background in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")) == (scheme == "light")


def test_an_endpoint_is_tried_with_the_key(open_page: Open) -> None:
    page = open_page("/docs")
    page.get_by_role("button", name="Authorize").first.click()
    page.get_by_label("Value").fill("open sesame")
    page.get_by_label("Apply credentials").click()
    page.get_by_role("button", name="Close").first.click()
    page.locator("#operations-insertlm-solve_v1_solve_post .opblock-summary-control").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    answer = page.locator(".live-responses-table tbody")
    expect(answer).to_contain_text("200")
    expect(answer).to_contain_text('"text": "52 42 42 3 3 8 8 28 28 32"')


def test_what_it_sends_if_nobody_changes_it_is_answered(url: str) -> None:
    described = schema(url)
    bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operations in described["paths"].items()
        if "post" in operations
    }
    assert len(bodies) == 4
    for path, name in bodies.items():
        [example] = described["components"]["schemas"][name]["examples"]
        answer = httpx.post(url + path, json=example, headers={"Authorization": "Bearer open sesame"}, timeout=60)
        assert answer.status_code == 200, (path, answer.text)


def test_the_schema_says_what_needs_a_key(url: str, server: Any) -> None:
    described = schema(url)
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path != "/health")
    assert "securitySchemes" not in schema(server.url)["components"]


@pytest.mark.parametrize("path", ["/swagger/__init__.py", "/swagger/", "/swagger/favicon-32x32.png", "/redoc"])
def test_nothing_else_of_the_package_is_given_away(server: Any, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 404
