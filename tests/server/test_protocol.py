"""What is asked in the wrong way is answered with the right code, and a line that says what to do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from insertlm.model import Model
from insertlm.server.schemas import CompletionBody, InfillBody

JSON = {"content-type": "application/json"}
POSTS = ["/v1/infill", "/v1/solve", "/v1/completions", "/infill"]
GETS = ["/", "/app.js", "/docs", "/openapi.json", "/health", "/metrics", "/v1/models", "/v1/models/letters"]


def message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    return str(error["message"])


# --- Methods and paths


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_an_endpoint_that_takes_posts_says_so(client: httpx.Client, path: str, method: str) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert message(answer) == "expected the method POST"


@pytest.mark.parametrize("path", GETS)
def test_a_head_is_all_but_the_body(client: httpx.Client, path: str) -> None:
    head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    answer = client.post(path, json={})
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize("method", ["HEAD", "GET", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/chat/completions", "/page/app.js", "/docs/", "/v1/infill/"])
def test_where_nothing_is_nothing_is_found(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 404
    assert method == "HEAD" or message(answer) == "nothing is here; see /docs"


def test_what_a_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    for path in ("/", "/app.js", "/swagger/swagger-ui-bundle.js"):
        tag = client.get(path).headers["etag"]
        again = client.get(path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")


# --- Bodies


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "application/xml", "json", ""])
def test_a_body_of_another_type_is_refused(client: httpx.Client, path: str, kind: str) -> None:
    answer = client.post(path, content=b'{"text": "a ___"}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert message(answer) == "expected the header Content-Type: application/json"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/ld+json"])
def test_json_has_several_names(client: httpx.Client, kind: str) -> None:
    answer = client.post("/v1/infill", content=b'{"text": "a ___", "max_length": 1}', headers={"content-type": kind})
    assert answer.status_code == 200


TEXT = b'{"text": "a ___", "seed": '
UNREAD = "the body cannot be read as JSON"
OBJECT = "expected a JSON object as the body; see /docs"


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "the body is not JSON, character 1: Expecting property name enclosed in double"),
        (b"{'text': 1}", 400, "the body is not JSON, character 1: Expecting property name enclosed in double"),
        (b'{"text": "a\x00 ___"}', 400, "the body is not JSON, character 11: Invalid control character"),
        (b'{"text": "a ___"} x', 400, "the body is not JSON, character 18: Extra data"),
        (b'{"text": "\xff ___"}', 400, UNREAD),
        (b"[" * 100_000, 400, UNREAD),
        (b'{"text": "a ___", "blanks": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, UNREAD),
        (TEXT + b"9" * 5_000 + b"}", 400, UNREAD),
        (b"", 422, OBJECT),
        (b"null", 422, OBJECT),
        (b"[]", 422, OBJECT),
        (b'"a ___"', 422, OBJECT),
        (TEXT + b"NaN}", 422, "seed: Input should be a finite number"),
        (TEXT + b"1e999}", 422, "seed: Input should be a finite number"),
        (b'{"text": "a ___", "temperature": -Infinity}', 422, "temperature: Input should be a finite number"),
        (b'{"text": "a\\u0000 ___"}', 422, "the text has the control character U+0000 at character 1"),
        (b'{"text": "___", "banned": ["' + b"a" * 201 + b'"]}', 422, "banned.0: String should have at most 200 char"),
    ],
)
def test_what_cannot_be_read_is_told(client: httpx.Client, body: bytes, status: int, told: str) -> None:
    answer = client.post("/v1/infill", content=body, headers=JSON)
    assert answer.status_code == status
    assert message(answer).startswith(told)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("stop", ["a"] * 17, "stop: List should have at most 16 items"),
        ("prompt", [1, 2], "prompt.0: Input should be a valid string"),
        ("prompt", ["a", None], "prompt.1: Input should be a valid string"),
        ("prompt", 5, "prompt: Input should be a valid string"),
        ("stream_options", 5, "stream_options: Input should be"),
    ],
)
def test_of_several_types_the_one_meant_is_spoken_of(client: httpx.Client, field: str, value: Any, told: str) -> None:
    answer = client.post("/v1/completions", json={field: value})
    assert answer.status_code == 422
    assert message(answer).startswith(told)


@pytest.mark.parametrize("field", ["blanks", "min_length", "max_length", "banned", "required", "prompt", "stop"])
def test_a_long_list_of_mistakes_is_not_read_to_its_end(field: str) -> None:
    """A megabyte of them would take seconds and hundreds of megabytes, and all others would wait."""
    body = CompletionBody if field in ("prompt", "stop") else InfillBody
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"text": "a ___", field: [{}] * 1000})
    assert caught.value.error_count() <= 3


def test_of_a_field_that_is_there_twice_the_last_counts(client: httpx.Client) -> None:
    answer = client.post("/v1/infill", content=b'{"text": "b ___", "text": "a ___", "max_length": 1}', headers=JSON)
    assert answer.json()["text"].startswith("a ")


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 ___ 🎉.", "שלום ___ עולם", "\u202eabc ___", "e\u0301 ___ \ufeff", "日本___語"]
)
def test_all_of_unicode_is_given_back_as_it_came(client: httpx.Client, models: list[Model], text: str) -> None:
    body: dict[str, Any] = {"text": text, "max_length": 3, "seed": 2}
    before, behind = text.split("___")
    for data in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode()):
        answer = client.post("/v1/infill", content=data, headers=JSON).json()
        assert answer["text"].startswith(before) and answer["text"].endswith(behind)
        assert answer["text"] == models[0].infill(text, max_length=3, seed=2)[0].text


@pytest.mark.parametrize("count", [100, 4_900])
def test_thousands_of_blanks_are_refused_at_once(client: httpx.Client, count: int) -> None:
    answer = client.post("/v1/infill", json={"text": "a___" * count})
    assert answer.elapsed.total_seconds() < 2
    assert (answer.status_code, message(answer)) == (422, f"expected at most 64 blanks, got {count}")
    answer = client.post("/v1/infill", json={"text": "a" * (count + 1), "blanks": [[k, k] for k in range(count)]})
    assert (answer.status_code, message(answer)) == (422, f"expected at most 64 blanks, got {count}")


# --- Types


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        ("/v1/infill", "seed", True, "a number, not true or false"),
        ("/v1/infill", "seed", "7", "a number, not a string"),
        ("/v1/infill", "seed", 7.5, "a valid integer"),
        ("/v1/infill", "temperature", "0.5", "a number, not a string"),
        ("/v1/infill", "temperature", False, "a number, not true or false"),
        ("/v1/infill", "stream", "yes", "a valid boolean"),
        ("/v1/infill", "stream", 1, "a valid boolean"),
        ("/v1/infill", "anywhere", "true", "a valid boolean"),
        ("/v1/infill", "max_length", "3", "a number, not a string"),
        ("/v1/infill", "max_tokens", "3", "a number, not a string"),
        ("/v1/infill", "text", 3, "a valid string"),
        ("/v1/solve", "seed", "7", "a number, not a string"),
        ("/v1/solve", "stream", "no", "a valid boolean"),
        ("/v1/completions", "n", "2", "a number, not a string"),
        ("/v1/completions", "top_p", "1", "a number, not a string"),
        ("/v1/completions", "echo", "on", "a valid boolean"),
        ("/infill", "n_predict", "5", "a number, not a string"),
        ("/infill", "stream", 0, "a valid boolean"),
    ],
)
def test_a_value_of_another_type_is_refused(client: httpx.Client, path: str, field: str, value: Any, told: str) -> None:
    needed = {"/v1/infill": {"text": "a ___"}, "/v1/solve": {"prompt": "1>2 : 1 2"}}.get(path, {})
    answer = client.post(path, json={**needed, field: value})
    assert answer.status_code == 422
    assert message(answer) == f"{field}: Input should be {told}" or message(answer).startswith(
        f"{field}: Input should be {told},"
    )


def test_ranges_are_of_numbers(client: httpx.Client) -> None:
    for wrong in ("4", True):
        answer = client.post("/v1/infill", json={"text": "the cat", "blanks": [[wrong, 7]]})
        assert (answer.status_code, message(answer)[:38]) == (422, "blanks.0.0: Input should be a number, ")


def test_a_whole_number_may_be_written_with_a_point(client: httpx.Client) -> None:
    whole, pointed = (
        client.post("/v1/infill", content=b'{"text": "a ___", "max_length": 2, "seed": %b}' % seed, headers=JSON).json()
        for seed in (b"7", b"7.0")
    )
    assert whole["text"] == pointed["text"]


@pytest.mark.parametrize("field", ["banned", "required"])
def test_words_have_no_control_characters(client: httpx.Client, field: str) -> None:
    answer = client.post("/v1/infill", json={"text": "a ___", field: ["dog", "a\0"]})
    assert answer.status_code == 422
    line = f"{field}: a word has the control character U+0000 at character 1; expected none but tabs and line ends"
    assert message(answer) == line
