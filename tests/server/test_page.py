"""The page in a real browser, against the real server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from lettering import Few, Letters, build, text_model
from pages import TEXT, Open, chips, fill_in, more_controls, percent, shown, sse
from playwright.sync_api import Locator, Route, expect

import insertlm
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.model import Model


@pytest.fixture(scope="module")
def url(serve: Callable[..., Any], models: list[Model]) -> Iterator[str]:
    """Of a server that writes a few letters, or any bytes, from left to right in every blank too, and solves graphs."""
    broken = text_model(build(IlmConfig(), Letters), "bytes")
    filler = text_model(build(FillConfig(), Few, max_length=600), "filler")
    with serve(models=[models[0], broken, filler, insertlm.load("star-hard-mini")]) as running:
        yield running.url


def test_an_infilling_is_the_servers_with_tokens_in_their_places(open_page: Open) -> None:
    page = open_page()
    answer = fill_in(page)
    assert shown(page) == answer["text"]
    written = [piece for piece in answer["pieces"] if piece["order"] is not None and piece["text"]]
    assert [chip.strip() for chip in chips(page).all_text_contents()] == [piece["text"].strip() for piece in written]
    tones = [float(chip.evaluate("chip => chip.style.getPropertyValue('--t')")) for chip in chips(page).all()]
    last = len(answer["events"]) - 1
    assert tones == pytest.approx([piece["order"] / last for piece in written])  # the earlier, the lighter
    expect(page.get_by_role("button", name="Fill in")).to_be_enabled()


def test_a_limit_is_named_with_its_remedy(open_page: Open) -> None:
    page = open_page()
    answer = fill_in(page, "the ___ was")
    assert answer["limit"] is not None
    expect(page.locator("#panel-text .notes")).to_have_text(f"Not complete: {answer['note']}.")


def test_letters_of_several_tokens_come_out_right(open_page: Open) -> None:
    """The model of bytes is not trained: what it writes is broken letters for the most part."""
    page = open_page()
    page.get_by_label("Model").select_option("bytes")
    for seed in ("1", "2", "3"):
        more_controls(page).get_by_label("Seed").fill(seed)
        answer = fill_in(page, "Zoë ___ café, “___”")
        assert answer["model"] == "bytes"
        assert shown(page) == answer["text"]


def test_blanks_that_are_filled_one_after_the_other_darken_in_reading_order(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("Model").select_option("filler")
    answer = fill_in(page)
    assert (answer["model"], shown(page)) == ("filler", answer["text"])
    assert [event["order"] for event in answer["events"]] == [
        piece["order"] for piece in answer["pieces"] if piece["order"] is not None
    ]
    tones = [float(chip.evaluate("chip => chip.style.getPropertyValue('--t')")) for chip in chips(page).all()]
    assert tones == sorted(tones)
    assert (tones[0], tones[-1]) == (0, 1)


def test_tokens_appear_one_after_the_other(open_page: Open) -> None:
    page = open_page(motion=True)
    seen = page.evaluate_handle(
        """() => { const seen = [], result = document.querySelector("#panel-text .result");
        new MutationObserver(([{target}]) => seen.push(Number(target.dataset.count)))
        .observe(result, {attributeFilter: ["data-count"], subtree: true});
        return seen; }"""
    )
    answer = fill_in(page)
    assert sorted(set(seen.json_value())) == list(range(len(answer["events"]) + 1))
    assert shown(page) == answer["text"]


def test_the_slider_goes_back_and_forth(open_page: Open) -> None:
    page = open_page()
    answer = fill_in(page)
    slider, total = page.get_by_role("slider", name="Replay"), len(answer["events"])
    expect(slider).to_have_value(str(total))
    expect(page.locator("#panel-text .status")).to_contain_text(" by ")  # before, the text may still be played
    slider.press("Home")
    expect(slider).to_have_value("0")
    assert shown(page).split() == TEXT.replace("___", "").split()
    assert page.locator("#panel-text .blank:visible").count() == 2
    for count in range(1, 4):
        slider.press("ArrowRight")
        expect(slider).to_have_attribute("aria-valuetext", f"after {count} of {total} insertions")
        there = [piece["text"] for piece in answer["pieces"] if piece["order"] is None or piece["order"] < count]
        assert shown(page).split() == "".join(there).split()
    slider.press("End")
    expect(slider).to_have_value(str(total))
    assert shown(page) == answer["text"]
    assert page.locator("#panel-text .blank:visible").count() == 0
    slider.press("Home")
    page.get_by_role("button", name="Play").click()
    expect(slider).to_have_value(str(total))
    chips(page).first.click()  # back to the moment of this token
    first = next(piece["order"] for piece in answer["pieces"] if piece["order"] is not None)
    expect(slider).to_have_value(str(first + 1))


def test_a_token_tells_how_likely_it_was(open_page: Open) -> None:
    page = open_page()
    answer = fill_in(page)
    tip, orders = page.get_by_role("tooltip"), [p["order"] for p in answer["pieces"] if p["order"] is not None]
    first, second = (answer["events"][order] for order in orders[:2])
    chips(page).nth(0).hover()
    expect(tip).to_contain_text(f"order {first['order'] + 1} of {len(orders)}")
    expect(tip).to_contain_text(f"probability {percent(first['probability'])}")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    chips(page).nth(0).focus()
    expect(tip).to_contain_text(f"probability {percent(first['probability'])}")
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text(f"probability {percent(second['probability'])}")
    expect(chips(page).nth(1)).to_be_focused()
    expect(chips(page).nth(1)).to_have_accessible_description(re.compile("probability"))
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_it_can_be_stopped(open_page: Open) -> None:
    page = open_page()
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/infill", hold)
    page.get_by_role("button", name="Fill in").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#panel-text .status")).to_have_text("Stopped after 0 tokens.")
    expect(page.get_by_role("alert")).to_be_empty()
    [route] = held
    route.abort()


def test_a_star_graph_is_solved_and_drawn(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("tab", name="Solve a graph").click()
    with page.expect_request("**/v1/solve"):
        page.get_by_role("button", name="Solve").click()
    expect(page.locator("#panel-graph .status")).to_contain_text("The path, found in")
    graph = page.request.get("v1/graphs/example?seed=7").json()
    path = graph["path"]
    assert page.locator(".node").count() == len({node for edge in graph["edges"] for node in edge})
    assert sorted(map(int, page.locator(".node.on").all_text_contents())) == sorted(path)
    assert page.locator(".edge").count() == len(graph["edges"])
    assert page.locator(".edge.on").count() == len(path) - 1
    assert [int(name) for name in page.locator("#panel-graph .token").all_text_contents()] == [
        node for edge in pairwise(path) for node in edge
    ]
    expect(page.get_by_role("img")).to_have_accessible_name(re.compile(f"Path: {', '.join(map(str, path))}"))
    page.get_by_role("slider", name="Replay").press("Home")
    assert page.locator(".node.on, .edge.on").count() == 0
    page.get_by_role("button", name="Another graph").click()
    expect(page.get_by_role("img")).to_have_accessible_name(re.compile("A graph of"))
    expect(page.get_by_label("Graph", exact=True)).to_have_value("8")
    expect(page.locator("#panel-graph .token")).to_have_count(0)


def test_graphs_of_two_paths_are_drawn_and_judged(
    open_page: Open, serve: Callable[..., Any], models: list[Model]
) -> None:
    """Their junction may have no more edges than other nodes. The model is not trained."""
    with serve(models=[models[2]]) as running:
        page = open_page(running.url)
        expect(page.locator("#panel-graph .node")).to_have_count(5)
        page.get_by_role("button", name="Solve").click()
        expect(page.locator("#panel-graph .status")).to_have_text("This is not the path.")


def test_a_wrong_path_is_drawn_as_wrong(open_page: Open) -> None:
    page = open_page("/#graph")
    ends = [page.request.get("v1/graphs/example?seed=7").json()[end] for end in ("source", "goal")]
    events = [
        ("insertion", {"order": k, "step": k, "at": k, "token": node, "text": str(node), "probability": 0.5})
        for k, node in enumerate(ends)
    ]
    pieces = [{"text": str(node), "order": k} for k, node in enumerate(ends)]
    done = {"model": "m", "nodes": ends, "complete": True, "pieces": pieces}
    body = sse(("start", {"cells": []}), *events, ("done", done))
    page.route("**/v1/solve", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Solve").click()
    expect(page.locator("#panel-graph .status")).to_have_text("This is not the path.")
    assert page.locator(".wrong").count() == 1
    assert page.locator(".edge.on").count() == 0


def test_the_keyboard_is_enough(open_page: Open) -> None:
    page = open_page()
    keys = page.keyboard

    def tab_to(target: Locator, most: int = 20) -> None:
        for _ in range(most):
            keys.press("Tab")
            if target.evaluate("element => element === document.activeElement"):
                return
        pytest.fail(f"the tab key does not lead to {target}")

    tab_to(page.get_by_role("tab", name="Fill in text"))
    tab_to(page.get_by_label("Your text"))
    keys.press("Control+a")
    keys.type(TEXT)
    keys.press("Control+Enter")
    expect(page.locator("#panel-text .status")).to_contain_text("token")
    tab_to(chips(page).first)
    keys.press("End")
    expect(chips(page).last).to_be_focused()
    tab_to(page.get_by_role("button", name="Play"), most=1)
    tab_to(page.get_by_role("slider", name="Replay"), most=1)
    keys.press("Home")
    assert chips(page).count() == 0
    page.get_by_role("tab", name="Fill in text").focus()
    keys.press("ArrowRight")
    expect(page.get_by_role("tab", name="Solve a graph")).to_be_focused()
    expect(page.locator("#panel-graph svg").first).to_be_visible()
    tab_to(page.get_by_role("button", name="Solve"), most=2)  # behind the link to the API
    keys.press("Enter")
    expect(page.locator("#panel-graph .status")).to_contain_text("The path")


@pytest.mark.parametrize(
    ("text", "direction"), [("שלום ___ עולם", "rtl"), ("مرحبا ___", "rtl"), ("👩‍👩‍👧‍👦 a ___ 🎉", "ltr")]
)
def test_texts_of_all_scripts_read_in_their_direction(open_page: Open, text: str, direction: str) -> None:
    page = open_page()
    answer = fill_in(page, text)
    assert shown(page) == answer["text"]
    for place in ("#text", "#panel-text .tokens"):
        expect(page.locator(place)).to_have_css("direction", direction)  # the text may still be played


def test_errors_are_shown_in_one_line(open_page: Open) -> None:
    page = open_page()
    problem = page.locator("#panel-text .problem")
    page.get_by_label("Your text").fill("nothing is missing here")
    page.get_by_role("button", name="Fill in").click()
    expect(problem).to_contain_text("the text has no blank")
    page.route("**/v1/infill", lambda route: route.fulfill(status=503, body="<html>\nno"))
    page.get_by_role("button", name="Fill in").click()
    expect(problem).to_have_text("The server answered 503.")
    page.unroute("**/v1/infill")
    fill_in(page)
    expect(problem).to_be_empty()


def test_a_connection_that_drops_is_said_to_have(open_page: Open) -> None:
    page = open_page()
    problem, fill = page.locator("#panel-text .problem"), page.get_by_role("button", name="Fill in")
    begun: list[tuple[str, dict[str, Any]]] = [
        ("start", {"id": "x", "model": "m", "cells": [{"text": "Once"}, {"text": "."}]}),
        ("insertion", {"order": 0, "step": 0, "at": 1, "token": 1, "text": " upon", "probability": 0.5}),
    ]

    def answers(body: str) -> None:
        page.unroute_all()
        page.route("**/v1/infill", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        fill.click()

    answers(sse(*begun))
    expect(problem).to_have_text("The connection to the server was lost.")
    assert shown(page) == "Once upon."  # what came before stays
    answers(sse(*begun, ("error", {"error": {"message": "it took\ntoo long"}})))
    expect(problem).to_have_text("it took too long")
    page.unroute_all()
    page.route("**/v1/infill", lambda route: route.abort())
    fill.click()
    expect(problem).to_have_text("The server cannot be reached.")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("light", 320), ("dark", 320)])
def test_it_is_accessible_on_narrow_and_wide_screens(open_page: Open, scheme: str, width: int) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    page.get_by_label("Model").select_option("filler")  # which has all controls
    fill_in(page)
    chips(page).first.focus()
    assert Axe().run(page).generate_report().startswith("Found 0 ")
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    page.get_by_role("tab", name="Solve a graph").click()
    page.get_by_role("button", name="Solve").click()
    expect(page.locator("#panel-graph .status")).to_contain_text("The path")
    assert Axe().run(page).generate_report().startswith("Found 0 ")
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
