"""The page's controls in a real browser: what they say, what they send, and what can be taken along."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lettering import Few, build, text_model
from pages import TEXT, Open, ask, fill_in, more_controls, press_fill, shown, status
from playwright.sync_api import Page, Route, expect

from insertlm.core.errors import InsertlmError
from insertlm.families.fill import FillConfig
from insertlm.model import Model
from insertlm.server import app as server_app
from insertlm.server.app import create_app

written = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "record_example.py"))["written"]

EXAMPLES: dict[str, Any] = {
    "about": "Knows nothing at all.",
    "examples": [
        {
            "name": "First",
            "request": {
                "text": "a {name:about 5 words} b {what:2-3 words} c ___ d ___",
                "seed": 3,
                "words": [None, None, 2, None],
                "samples": 2,
            },
        },
        {"name": "Hot", "request": {"text": "hot ___", "temperature": 1.25, "samples": 2}},
    ],
}


@pytest.fixture(scope="module")
def filler() -> Model:
    return text_model(build(FillConfig(), Few, max_length=600), "filler")


@pytest.fixture(scope="module")
def url(serve: Callable[..., Any], models: list[Model], filler: Model) -> Iterator[str]:
    with serve(models=[models[0], filler]) as running:
        yield running.url


@pytest.fixture
def own_examples(tmp_path: Path, serve: Callable[..., Any], filler: Model) -> Iterator[str]:
    """A server whose model brings examples, the first of them written beforehand."""
    model = text_model(filler.family, str(tmp_path))
    first, second = EXAMPLES["examples"]
    first = {**first, "written": written(model, first["request"])}
    (tmp_path / "examples.json").write_text(json.dumps({**EXAMPLES, "examples": [first, second]}))
    with serve(models=[model]) as running:
        yield running.url


def refused(page: Page) -> list[Any]:
    """What is asked from now on; the server says no."""
    questions: list[Any] = []

    def answer(route: Route) -> None:
        questions.append(route.request.post_data_json)
        route.fulfill(status=400, json={"error": {"message": "no"}})

    page.route("**/v1/infill", answer)
    return questions


# --- Controls


def test_controls_show_the_models_own_values_and_send_what_was_changed(open_page: Open, models: list[Model]) -> None:
    page = open_page()
    questions, more = refused(page), more_controls(page)
    page.get_by_role("button", name="Fill in").click()
    expect(page.locator("#panel-text > .problem")).to_have_text("no")
    own = models[0].recipe.decode
    for label, value in (("Daring", own.temperature), ("Words in play", own.top_p)):
        assert float(more.get_by_label(label).input_value()) == value
    daring = more.get_by_label("Daring")
    expect(daring).to_have_attribute("aria-valuetext", "1.00, the model's own")
    expect(page.get_by_role("button", name="Back to")).to_be_hidden()
    daring.fill("0.8")
    expect(daring).to_have_attribute("aria-valuetext", "0.80")
    more.get_by_label("Words in play").fill("0.9")
    more.get_by_label("Sure that it is done").fill("0.25")
    more.get_by_label("Where it writes next").select_option("where it is surest")
    page.get_by_role("button", name="Another").click()
    page.get_by_role("button", name="Back to").click()
    expect(daring).to_have_value("1")
    page.get_by_role("button", name="Fill in").click()
    page.wait_for_timeout(50)
    plain, chosen, again = questions
    always = {"model": "letters", "text": plain["text"], "stream": True}
    assert plain == {**always, "seed": 0}
    changed = {"temperature": 0.8, "top_p": 0.9, "stop_threshold": 0.25, "order": "certainty"}
    assert chosen == {**always, "seed": 1, **changed}
    assert again == {**always, "seed": 1}


def test_only_what_a_model_can_do_is_offered(open_page: Open) -> None:
    page = open_page()
    order, fields = more_controls(page).get_by_label("Where it writes next"), page.locator("#blanks input:visible")
    expect(order).to_be_visible()
    assert order.locator("option").all_text_contents() == [
        "the model decides",
        "where most is missing",
        "where it is surest",
        "where the choice is clearest",
    ]
    expect(fields).to_have_count(2)
    expect(fields.first).to_have_accessible_name("Blank 1: up to how many tokens")
    page.get_by_label("Model").select_option("filler")
    expect(order).to_be_hidden()
    expect(fields.first).to_have_accessible_name("Blank 1: about how many words")


@pytest.mark.parametrize(("model", "name"), [("letters", "max_length"), ("filler", "words")])
def test_every_blank_has_a_length(open_page: Open, model: str, name: str) -> None:
    page = open_page()
    page.get_by_label("Model").select_option(model)
    text, second = page.get_by_label("Your text"), page.get_by_label("Blank 2:").first
    text.fill(TEXT)
    assert name not in press_fill(page)
    second.fill("3")
    question = press_fill(page)
    assert question[name] == [None, 3]
    expect(page.locator("#blanks li").nth(1)).to_contain_text("there was a girl. She")
    text.fill(r"one \___ blank ___")
    expect(page.locator("#blanks li")).to_have_count(1)
    assert name not in press_fill(page)
    text.fill("none")
    expect(page.locator("#blanks")).to_be_hidden()
    expect(page.get_by_text("Nothing is missing yet")).to_be_visible()
    page.get_by_role("button", name="Add a blank").click()
    expect(text).to_have_value("none ___")
    expect(text).to_be_focused()


def test_several_versions_stand_side_by_side(open_page: Open) -> None:
    page = open_page(viewport={"width": 1200, "height": 900})
    page.get_by_role("radio", name="3").check()
    answer = fill_in(page)
    assert len(answer["samples"]) == 3
    assert [shown(page, number) for number in range(3)] == [each["text"] for each in answer["samples"]]
    boxes = [page.locator(".sample").nth(number).bounding_box() for number in range(3)]
    assert len({box["y"] for box in boxes if box}) == 1
    expect(status(page)).to_contain_text("Version 2: ")
    total = max(len(each["events"]) for each in ask(page, {**_last(page), "samples": 3})["samples"])
    slider = page.get_by_role("slider", name="Replay")
    expect(slider).to_have_value(str(total))
    slider.press("Home")
    assert shown(page, 2).split() == TEXT.replace("___", "").split()
    assert press_fill(page, "Another")["seed"] == 3  # those of 0 to 2 are there


def _last(page: Page) -> dict[str, Any]:
    return {"model": "letters", "text": TEXT, "seed": 0, "stop_threshold": 1}


def test_a_value_that_is_folded_away_is_shown_if_it_is_wrong(open_page: Open) -> None:
    page = open_page()
    more_controls(page).get_by_label("Seed").fill("-1")
    page.locator("#more").evaluate("element => element.open = false")
    page.get_by_role("button", name="Fill in").click()
    expect(page.get_by_label("Seed")).to_be_focused()


# --- What can be taken along


def test_the_request_can_be_taken_along(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    text = "It's “so” ___\nand ___."
    answer = fill_in(page, text)

    def copied(name: str) -> str:
        page.get_by_role("group", name="Copy").get_by_role("button", name=name, exact=True).click()
        expect(status(page)).to_have_text("Copied.")
        page.wait_for_timeout(1300)  # the button says "Copied" for a moment
        return str(page.evaluate("() => navigator.clipboard.readText()"))

    assert copied("Text") == answer["text"]
    out = subprocess.run(["bash", "-c", copied("curl")], check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(out)["text"] == answer["text"]
    out = subprocess.run(
        [sys.executable, "-c", copied("Python")], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert out.removesuffix("\n") == answer["text"]
    link = copied("Link")
    other = open_page(link)
    expect(status(other)).to_contain_text("token")
    expect(other.get_by_label("Your text")).to_have_value(text)
    assert shown(other) == answer["text"]


@pytest.mark.parametrize("hash", ["#text?", "#text?%7B", "#text?%", "#text?7", "#text?%7B%22text%22%3A1%7D", "#what"])
def test_an_address_that_was_cut_off_is_no_harm(open_page: Open, hash: str) -> None:
    page = open_page(f"/{hash}")
    fill_in(page)


# --- Examples and models


def test_the_example_that_was_written_beforehand_plays(open_page: Open, own_examples: str) -> None:
    page = open_page(own_examples, motion=True)
    expect(page.locator("#panel-text .model")).to_contain_text("Knows nothing at all.")
    expect(page.locator("#panel-text .model")).to_contain_text("5.2 thousand parameters, fills each blank")
    told = page.request.get(f"{own_examples}/v1/models").json()["data"][0]
    examples = page.request.get(f"{own_examples}/v1/models/{told['id']}/examples").json()
    assert told["about"] == EXAMPLES["about"]
    assert [each["request"] for each in examples["examples"]] == [each["request"] for each in EXAMPLES["examples"]]
    texts = examples["examples"][0]["written"]["texts"]
    slider = page.get_by_role("slider", name="Replay")
    expect(slider).to_have_value(str(max(len(text["events"]) for text in texts)))
    assert [shown(page, number) for number in range(2)] == [text["text"] for text in texts]
    expect(page.get_by_label("Your text")).to_have_value(EXAMPLES["examples"][0]["request"]["text"])
    expect(page.get_by_label("Blank 3: about")).to_have_value("2")
    expect(page.locator("#blanks li").first).to_contain_text("{name:about 5 words}")
    expect(page.get_by_role("radio", name="2")).to_be_checked()
    expect(page.get_by_text("An example, as")).to_be_visible()
    with page.expect_request("**/v1/infill") as asked:
        page.get_by_role("button", name="Hot").click()
    question: Any = asked.value.post_data_json
    assert (question["text"], question["temperature"], question["samples"]) == ("hot ___", 1.25, 2)
    assert "words" not in question
    expect(page.get_by_text("An example, as")).to_be_hidden()


def test_the_example_plays_once_the_reader_gets_there(open_page: Open, own_examples: str) -> None:
    page = open_page(own_examples, motion=True, viewport={"width": 360, "height": 400})
    expect(page.get_by_text("An example, as")).to_be_attached()
    slider = page.get_by_role("slider", name="Replay")
    total = str(slider.get_attribute("max"))
    expect(slider).to_have_value(total)
    slider.evaluate("slider => slider.scrollIntoView()")
    expect(slider).not_to_have_value(total)
    expect(slider).to_have_value(total)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{", "examples.json: the file: Invalid JSON"),
        (
            '{"examples": [{"name": "A", "request": {"text": 7}}]}',
            "examples.json: examples.0.request.text: Inp",
        ),
        ('{"abuot": "x"}', "examples.json: abuot: Extra inputs"),
    ],
)
def test_examples_that_cannot_be_read_are_refused(tmp_path: Path, filler: Model, told: str, message: str) -> None:
    (tmp_path / "examples.json").write_text(told)
    with pytest.raises(InsertlmError, match=message.replace(".", r"\.")):
        create_app([text_model(filler.family, str(tmp_path))])


def test_the_repository_is_linked_if_it_is_known(
    open_page: Open, start: Callable[[Any], Any], models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    links = open_page().get_by_role("navigation", name="Elsewhere").get_by_role("link")
    assert links.first.get_attribute("href") == "docs"
    monkeypatch.setattr(server_app, "_repository", lambda: 'https://example.org/"a"&b')
    with start(create_app([models[0]])) as running:
        link = open_page(running.url).get_by_role("link", name="Source")
        assert link.get_attribute("href") == 'https://example.org/"a"&b'


# --- The key


def test_a_key_is_asked_for_only_by_servers_that_want_one(open_page: Open, serve: Callable[..., Any]) -> None:
    expect(open_page().get_by_label("API key")).to_be_hidden()
    with serve(key="open sesame") as guarded:
        page = open_page(guarded.url)
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(page.locator("#key-problem")).to_be_empty()
        field.fill("wrong")
        field.press("Enter")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_accessible_description("This is not the key of this server.")
        expect(field).to_be_focused()
        field.fill("open sesame")
        expect(page.locator("#key-problem")).to_be_empty()
        field.press("Enter")
        expect(field).to_be_hidden()
        page.get_by_label("Your text").fill(TEXT)
        press_fill(page)


# --- On a phone, and how much it weighs


def test_the_button_stays_and_the_result_comes_into_view(open_page: Open) -> None:
    page = open_page(viewport={"width": 360, "height": 640})
    button, result = page.get_by_role("button", name="Fill in"), page.locator("#panel-text .result")
    expect(button).to_be_in_viewport(ratio=1)
    expect(result).not_to_be_in_viewport()
    fill_in(page)
    expect(result).to_be_in_viewport(ratio=0.5)
    expect(button).to_be_in_viewport(ratio=1)
    page.evaluate("scrollTo(0, 0)")
    expect(button).to_be_in_viewport(ratio=1)


def test_it_is_light_and_soon_there(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Two blanks").wait_for()
    loaded = page.evaluate(
        """() => performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
        .map(({name, decodedBodySize, startTime}) => [name, decodedBodySize, startTime])"""
    )
    assert len(loaded) > 10
    assert all(size for name, size, _ in loaded if name.endswith((".js", ".css")))
    assert sum(size for _, size, _ in loaded) < 150_000
    # Nothing waits for another file to name it, but for what the server is asked.
    modules = [name.rsplit("/", 1)[1] for name, *_ in loaded if name.endswith(".js")]
    listed = page.evaluate(
        "() => [...document.querySelectorAll('[rel=modulepreload]')].map(x => x.getAttribute('href'))"
    )
    assert sorted([*listed, "app.js"]) == sorted(modules)
