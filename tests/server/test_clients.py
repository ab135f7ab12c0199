"""Clients that know other servers: OpenAI's own, and what speaks to llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from insertlm.model import Model


@pytest.fixture
def theirs(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_with_a_suffix_is_an_infilling(theirs: openai.OpenAI, models: list[Model]) -> None:
    answer = theirs.completions.create(model="letters", prompt="the ", suffix=" was", max_tokens=5, seed=3)
    [alone] = models[0].infill("the ___ was", seed=3, max_steps=5)
    [choice] = answer.choices
    assert choice.text == alone.fills[0]
    assert choice.finish_reason == ("stop" if alone.complete else "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(alone.trajectory.events)
    assert (answer.object, answer.model) == ("text_completion", "letters")


def test_several_prompts_and_samples_come_in_order(theirs: openai.OpenAI, models: list[Model]) -> None:
    answer = theirs.completions.create(model="letters", prompt=["a ", "the "], n=2, max_tokens=4, seed=5, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for seed, (choice, prompt) in enumerate(zip(answer.choices, ["a ", "a ", "the ", "the "], strict=True), start=5):
        assert choice.text == models[0].infill(f"{prompt}___", seed=seed, max_steps=4)[0].text


@pytest.mark.parametrize("changes", [{"top_p": 0.3}, {"temperature": 0.1}])
def test_every_way_of_drawing_is_the_one_asked_for(
    theirs: openai.OpenAI, models: list[Model], changes: dict[str, Any]
) -> None:
    def alone(**changes: Any) -> list[str]:
        return [models[0].infill("a ___", seed=seed, max_steps=6, **changes)[0].fills[0] for seed in range(6)]

    asked = [{"model": "letters", "prompt": "a ", "max_tokens": 6, "seed": seed, **changes} for seed in range(6)]
    assert [theirs.completions.create(**each).choices[0].text for each in asked] == alone(**changes) != alone()


def test_nothing_given_is_free_writing(theirs: openai.OpenAI, models: list[Model]) -> None:
    answer = theirs.completions.create(model="letters", prompt="", max_tokens=6)
    assert answer.choices[0].text == models[0].infill("___", max_steps=6)[0].text


def test_a_streamed_fill_comes_when_it_is_done(theirs: openai.OpenAI, models: list[Model]) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        theirs.completions.create(
            model="letters", prompt="the ", suffix=" was", max_tokens=6, stream=True, stream_options=options
        )
    )
    [alone] = models[0].infill("the ___ was", max_steps=6)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == [alone.fills[0]]
    assert chunks[0].choices[0].finish_reason is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_family_that_writes_from_left_to_right_streams_tokens(theirs: openai.OpenAI, models: list[Model]) -> None:
    most = 0
    for seed in range(5):
        asked: dict[str, Any] = {"model": "leftward", "prompt": "the ", "max_tokens": 12, "seed": seed}
        parts = [chunk.choices[0].text for chunk in theirs.completions.create(**asked, echo=True, stream=True)]
        assert parts[0].startswith("the ")
        assert "".join(parts) == models[1].infill("the ___", seed=seed, max_steps=12)[0].text
        most = max(most, len(parts))
    assert most > 3


def test_a_text_ends_before_a_stop_word(theirs: openai.OpenAI, models: list[Model]) -> None:
    """Streamed, nothing that may yet begin a stop word is sent too early."""
    cut = 0
    for seed in range(8):
        for name, model in (("letters", models[0]), ("leftward", models[1])):
            whole = model.infill("a ___", seed=seed, max_steps=12)[0].fills[0]
            expected = min((whole.partition(stop)[0] for stop in ("o ", "dog")), key=len)
            asked: dict[str, Any] = {
                "model": name, "prompt": "a ", "max_tokens": 12, "seed": seed, "stop": ["o ", "dog"]
            }  # fmt: skip
            assert theirs.completions.create(**asked).choices[0].text == expected
            chunks = list(theirs.completions.create(**asked, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected
            if expected != whole:
                cut += 1
                assert chunks[-1].choices[0].finish_reason == "stop"
    assert cut > 2


def test_only_a_stop_word_stops_a_text_that_was_given_all_its_tokens(theirs: openai.OpenAI) -> None:
    seen = 0
    for seed in range(12):
        asked: dict[str, Any] = {"model": "leftward", "prompt": "a ", "max_tokens": 2, "seed": seed}
        whole = theirs.completions.create(**asked).choices[0]
        if whole.finish_reason != "length" or len(whole.text) < 2:
            continue
        seen += 1
        for stop, reason in (("never", "length"), ("", "length"), (whole.text[1:2], "stop")):
            assert theirs.completions.create(**asked, stop=stop).choices[0].finish_reason == reason
            *_, last = theirs.completions.create(**asked, stop=stop, stream=True)
            assert last.choices[0].finish_reason == reason
    assert seen


# --- Log-probabilities


def told(choices: Sequence[Any]) -> list[tuple[str, float, int]]:
    """Tokens of an answer or of all chunks of a stream, with log-probabilities and places."""
    found: list[tuple[str, float, int]] = []
    for choice in choices:
        assert choice.logprobs.top_logprobs is None
        columns = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset
        found += zip(*columns, strict=True)
    return found


@pytest.mark.parametrize("name", ["letters", "leftward"])
@pytest.mark.parametrize("more", [{}, {"stop": ["o ", "dog", "gt"]}, {"echo": True, "suffix": ""}])
def test_every_token_has_its_log_probability(
    theirs: openai.OpenAI, models: list[Model], name: str, more: dict[str, Any]
) -> None:
    model = next(model for model in models if model.name == name)
    cut = 0
    for seed in range(6):
        asked: dict[str, Any] = {"model": name, "prompt": "a ", "max_tokens": 12, "seed": seed, "logprobs": 0, **more}
        path = model.infill("a ___", seed=seed, max_steps=12)[0].trajectory
        written = [path.events[number] for number in path.order if number >= 0]
        answer = theirs.completions.create(**asked).choices[0]
        tokens = told([answer])
        begun = len("a ") if "echo" in more else 0
        assert "".join(token for token, *_ in tokens) == answer.text[begun:]
        assert all(answer.text[place : place + len(token)] == token for token, _, place in tokens)
        shown = [event.log_probability for event in written][: len(tokens)]
        assert [likely for _, likely, _ in tokens] == pytest.approx(shown)
        assert len(tokens) == len(written) or "stop" in more
        cut += len(tokens) < len(written)
        streamed = told([chunk.choices[0] for chunk in theirs.completions.create(**asked, stream=True)])
        assert [(token, place) for token, _, place in streamed] == [(token, place) for token, _, place in tokens]
        assert [likely for _, likely, _ in streamed] == pytest.approx(shown)
    assert cut > 0 or "stop" not in more


def test_log_probabilities_come_with_every_text_that_asks_for_them(theirs: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "letters", "prompt": ["a ", "the "], "n": 2, "max_tokens": 4, "seed": 5}
    answer = theirs.completions.create(**asked, logprobs=1)
    for choice in answer.choices:
        assert "".join(token for token, *_ in told([choice])) == choice.text
    assert all(choice.logprobs is None for choice in theirs.completions.create(**asked).choices)


def test_models_are_listed(theirs: openai.OpenAI) -> None:
    assert [model.id for model in theirs.models.list()] == ["letters", "leftward", "graphs"]
    assert theirs.models.retrieve("letters").owned_by == "insertlm"


def test_their_errors_are_understood(theirs: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no such model is served here"):
        theirs.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="expected 0 or 1: the tokens that were written have"):
        theirs.completions.create(model="letters", prompt="a", logprobs=3)
    with pytest.raises(openai.UnprocessableEntityError, match="expected 1 to 16 texts of one request, got 17"):
        theirs.completions.create(model="letters", prompt="a", n=17)
    with pytest.raises(openai.UnprocessableEntityError, match="prompt"):
        theirs.completions.create(model="letters", prompt=[1, 2])
    with pytest.raises(openai.NotFoundError):
        theirs.models.retrieve("gpt-4")


def test_the_key_is_theirs_to_send(serve: Callable[..., Any]) -> None:
    with serve(key="open sesame") as running:
        for key, works in (("open sesame", True), ("close sesame", False), ("é", False)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            with running.client(headers=headers) as client:
                assert (client.get("/v1/models").status_code == 200) is works
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="open sesame") as client:
            assert client.completions.create(model="letters", prompt="a ").choices[0].text
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with running.client() as client:
            for path in ("/v1/models", "/metrics", "/v1/graphs/example"):
                answer = client.get(path)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["type"] == "unauthorized"
            for path in ("/v1/infill", "/infill", "/v1/solve", "/v1/completions"):
                assert client.post(path, json={}).status_code == 401
            for path in ("/", "/health", "/docs", "/openapi.json"):
                assert client.get(path).status_code == 200


# --- llama.cpp


def test_their_fields_fill_in(client: httpx.Client, models: list[Model]) -> None:
    body = {"input_prefix": "the", "input_suffix": " was", "prompt": " ", "n_predict": 5, "seed": 3, "unknown": 1}
    answer = client.post("/infill", json=body).json()
    [alone] = models[0].infill("the ___ was", seed=3, max_steps=5)
    assert answer["content"] == alone.fills[0]
    assert answer["stop"] is True
    assert answer["stop_type"] == ("eos" if alone.complete else "limit")
    assert answer["tokens_predicted"] == len(alone.trajectory.events)


def test_their_stream(client: httpx.Client, models: list[Model]) -> None:
    for name, model in (("letters", models[0]), ("leftward", models[1])):
        body = {"model": name, "input_prefix": "the ", "n_predict": 8, "stream": True}
        blocks = client.post("/infill", json=body).text.strip().split("\n\n")
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert "".join(chunk["content"] for chunk in chunks) == model.infill("the ___", max_steps=8)[0].fills[0]
        assert (len(chunks) > 1) == (name == "leftward")


def test_nothing_is_written_if_no_token_is_asked_for(client: httpx.Client) -> None:
    body = {"input_prefix": "the ", "n_predict": 0}
    answer = client.post("/infill", json=body).json()
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    streamed = client.post("/infill", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert json.loads(streamed.text.strip().removeprefix("data: ")) == answer


def test_a_seed_of_minus_one_is_a_random_one(client: httpx.Client) -> None:
    body = {"input_prefix": "the ", "n_predict": 8, "seed": -1, "temperature": 5}
    assert len({client.post("/infill", json=body).json()["content"] for _ in range(40)}) > 1


@pytest.mark.parametrize("changes", [{"top_p": 0.3}, {"top_k": 1}, {"temperature": 0.1}])
def test_every_way_of_drawing_is_the_one_they_ask_for(
    client: httpx.Client, models: list[Model], changes: dict[str, Any]
) -> None:
    def alone(**changes: Any) -> list[str]:
        return [models[0].infill("a ___", seed=seed, max_steps=6, **changes)[0].fills[0] for seed in range(6)]

    bodies = [{"input_prefix": "a ", "n_predict": 6, "seed": seed, **changes} for seed in range(6)]
    assert [client.post("/infill", json=body).json()["content"] for body in bodies] == alone(**changes) != alone()


def test_their_text_ends_before_a_stop_word(client: httpx.Client, models: list[Model]) -> None:
    wholes = [models[0].infill("a ___", seed=seed, max_steps=12)[0].fills[0] for seed in range(8)]
    for seed, whole in enumerate(wholes):
        body = {"input_prefix": "a ", "n_predict": 12, "seed": seed, "stop": ["o"]}
        answer = client.post("/infill", json=body).json()
        assert answer["content"] == whole.partition("o")[0]
        assert (answer["stop_type"] == "word") is ("o" in whole)
    assert any("o" in whole for whole in wholes)
