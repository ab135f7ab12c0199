"""Several texts of one request, and blanks of fillers: events say whose they are and come in their order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from lettering import Few, build, text_model

from insertlm.families.fill import FillConfig
from insertlm.model import Model

TEXT = "the ___ was ___."
Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def filler() -> Model:
    return text_model(build(FillConfig(), Few, max_length=600), "filler")


@pytest.fixture(scope="module")
def running(serve: Serve, models: list[Model], filler: Model) -> Iterator[Any]:
    with serve(models=[filler, *models]) as running:
        yield running


@pytest.fixture
def client(running: Any) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    blocks = client.post(path, json={**body, "stream": True}).text.strip().split("\n\n")
    pairs = [block.rpartition("data: ")[::2] for block in blocks]
    return [(name.removeprefix("event: ").strip(), json.loads(data)) for name, data in pairs if data != "[DONE]"]


# --- Samples


@pytest.mark.parametrize("name", ["letters", "filler"])
def test_samples_are_the_texts_of_single_requests(client: httpx.Client, name: str) -> None:
    body = {"model": name, "text": TEXT, "seed": 7, "max_tokens": 9}
    answer = client.post("/v1/infill", json={**body, "samples": 3}).json()
    alone = [client.post("/v1/infill", json={**body, "seed": seed}).json() for seed in (7, 8, 9)]
    keys = ("text", "fills", "complete", "limit", "note", "pieces")
    assert [[sample[key] for key in keys] for sample in answer["samples"]] == [
        [one[key] for key in keys] for one in alone
    ]
    assert [answer[key] for key in keys] == [alone[0][key] for key in keys]
    assert len({sample["text"] for sample in answer["samples"]}) > 1
    for number, (sample, one) in enumerate(zip(answer["samples"], alone, strict=True)):
        assert {event["sample"] for event in sample["events"]} == {number}
        places = [[event[key] for key in ("order", "step", "at", "token", "text")] for event in sample["events"]]
        assert places == [[event[key] for key in ("order", "step", "at", "token", "text")] for event in one["events"]]
        chances = [event["probability"] for event in sample["events"]]
        assert chances == pytest.approx([event["probability"] for event in one["events"]])
        assert one["samples"] is None
    assert answer["events"] == answer["samples"][0]["events"]
    for kind in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][kind] == sum(one["usage"][kind] for one in alone)


@pytest.mark.parametrize("banned", [[], ["cat"]])
def test_a_stream_of_samples_says_whose_each_insertion_is(client: httpx.Client, banned: list[str]) -> None:
    body = {"model": "letters", "text": TEXT, "samples": 4, "max_tokens": 6, "banned": banned}
    whole = client.post("/v1/infill", json=body).json()
    (first, start), *insertions, (last, done) = stream(client, "/v1/infill", body)
    assert (first, last) == ("start", "done")
    texts = [[cell["text"] for cell in start["cells"]] for _ in range(4)]
    for name, event in insertions:
        assert name == "insertion"
        texts[event["sample"]].insert(event["at"], event["text"])
    assert ["".join(text) for text in texts] == [sample["text"] for sample in whole["samples"]]
    assert [sample["text"] for sample in done["samples"]] == [sample["text"] for sample in whole["samples"]]
    assert "events" not in done
    assert not any("events" in sample for sample in done["samples"])
    if not banned:  # they are written together, step by step
        steps = [event["step"] for _, event in insertions]
        assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        (0, "samples: Input should be greater than or equal to 1"),
        (4, "expected at most 3 texts of one request, got 4"),
        (2.5, "samples: Input should be a valid integer"),
        (True, "samples: Input should be a number, not true or false"),
        (None, "samples: Input should be a valid integer"),
    ],
)
def test_samples_have_a_limit(serve: Serve, samples: Any, line: str) -> None:
    with serve(samples=3) as small, small.client() as client:
        answer = client.post("/v1/infill", json={"text": TEXT, "samples": samples})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "samples")
        assert answer.json()["error"]["message"].startswith(line)
        assert client.post("/v1/infill", json={"text": TEXT, "samples": 3, "max_tokens": 2}).status_code == 200


def test_samples_wait_their_turn_and_are_counted(serve: Serve) -> None:
    """More than are written at once; more than may wait are never written."""
    with serve(concurrent=2, queue=3) as small, small.client() as client:
        answer = client.post("/v1/infill", json={"text": TEXT, "samples": 5, "max_tokens": 3}).json()
        assert len(answer["samples"]) == 5
        [letters, *_] = small.workers()
        assert letters.tokens == answer["usage"]["completion_tokens"]
        assert f'insertlm_tokens_total{{model="letters"}} {float(letters.tokens)}' in client.get("/metrics").text
        refused = client.post("/v1/infill", json={"text": TEXT, "samples": 6})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            422,
            "expected at most 5 texts at once, got 6",
        )
        assert small.idle()


# --- Fillers


def test_a_filler_streams_every_blank_from_left_to_right(client: httpx.Client, filler: Model) -> None:
    text = "a ___ b ___ c ___."
    body = {"model": "filler", "text": text, "max_tokens": 10}
    for seed in range(4):
        (_, start), *insertions, (_, done) = stream(client, "/v1/infill", {**body, "seed": seed})
        assert [cell["text"] for cell in start["cells"]] == ["a", " b", " c", "."]
        places = [event["at"] for _, event in insertions]
        assert places == sorted(places)
        steps = [event["step"] for _, event in insertions]  # what might be cut back is shown when its blank is done
        assert steps == sorted(steps)
        [alone] = filler.infill(text, seed=seed, max_tokens=10)
        assert done["text"] == alone.text
        assert [event["order"] for _, event in insertions] == [*range(len(insertions))]


def test_a_filler_streams_completions_token_by_token(running: Any, filler: Model) -> None:
    most = 0
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as theirs:
        for seed in range(5):
            asked: dict[str, Any] = {
                "model": "filler", "prompt": "the ", "suffix": " was", "max_tokens": 12, "seed": seed
            }  # fmt: skip
            [alone] = filler.infill("the ___ was", seed=seed, max_tokens=12)
            [choice] = theirs.completions.create(**asked).choices
            assert choice.text == alone.fills[0]
            assert choice.finish_reason == ("stop" if alone.complete else "length")
            parts = [chunk.choices[0].text for chunk in theirs.completions.create(**asked, stream=True)]
            assert "".join(parts) == alone.fills[0]
            most = max(most, len(parts))
    assert most > 3


def test_a_filler_answers_clients_of_llama_cpp(client: httpx.Client, filler: Model) -> None:
    body = {"model": "filler", "input_prefix": "the ", "input_suffix": " was", "n_predict": 8, "seed": 2}
    [alone] = filler.infill("the ___ was", seed=2, max_tokens=8)
    assert client.post("/infill", json=body).json()["content"] == alone.fills[0]
    chunks = [chunk for _, chunk in stream(client, "/infill", body)]
    assert len(chunks) > 2
    assert "".join(chunk["content"] for chunk in chunks) == alone.fills[0]


# --- Lengths


@pytest.mark.parametrize("name", ["letters", "filler"])
def test_a_fill_is_empty_where_it_may_be(client: httpx.Client, name: str) -> None:
    """With a model that would always stop."""
    body = {"model": name, "text": TEXT, "stop_threshold": 0, "temperature": 0}
    assert client.post("/v1/infill", json={**body, "min_length": 0}).json()["fills"] == ["", ""]
    assert client.post("/v1/infill", json=body).json()["usage"]["completion_tokens"] == 2
    one = client.post("/v1/infill", json={**body, "min_length": [0, None]}).json()
    assert (one["fills"][0], one["usage"]["completion_tokens"], one["note"]) == ("", 1, None)


def test_a_completion_is_empty_where_it_may_be(client: httpx.Client) -> None:
    """This model would always stop."""
    asked: list[dict[str, Any]] = [{"min_tokens": 0}, {}, {"min_tokens": None}, {"min_tokens": 3}]
    for body in ({"prompt": "the ", "suffix": " was"}, {"prompt": ""}):
        answers = [client.post("/v1/completions", json={"model": "letters", **body, **more}).json() for more in asked]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [0, 1, 1, 3]


def test_hints_are_passed_on(client: httpx.Client, filler: Model) -> None:
    for words in (3, [0, None], [2, 7]):
        answer = client.post("/v1/infill", json={"model": "filler", "text": TEXT, "words": words, "max_tokens": 8})
        assert answer.json()["text"] == filler.infill(TEXT, words=words, max_tokens=8)[0].text
    listed = {model["id"]: model["takes_hints"] for model in client.get("/v1/models").json()["data"]}
    assert listed == {"filler": True, "letters": False, "leftward": False, "graphs": False}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"words": 3, "model": "letters"},
            "words: this model has not learnt what length hints mean; leave them out, or",
        ),
        ({"words": [3]}, "words: expected a number, or one for each of the 2 blanks, got 1"),
        ({"words": -1}, "words: Input should be greater than or equal to 0"),
        ({"words": [1, -1]}, "words.1: Input should be greater than or equal to 0"),
        ({"words": "3"}, "words: Input should be a number, not a string"),
        ({"words": [True, 1]}, "words.0: Input should be a number, not true or false"),
        ({"words": [1.5, 1]}, "words.0: Input should be a valid integer"),
        ({"words": {}}, "words: Input should be a valid"),
        ({"text": "___" + " a ___" * 6}, "a filler has learnt texts with up to 6 blanks; got 7"),
    ],
)
def test_hints_that_are_none(client: httpx.Client, more: dict[str, Any], line: str) -> None:
    answer = client.post("/v1/infill", json={"model": "filler", "text": TEXT, **more})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith(line)
