"""Our own endpoints: what is streamed adds up to what is answered, and both are what the Python API gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from insertlm.model import Model

TEXT = "the ___ was ___."


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Server-sent events with their names."""
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), json.loads(lines["data"]) if lines["data"] != "[DONE]" else "[DONE]"))
    return found


def test_the_answer_is_that_of_the_python_api(client: httpx.Client, models: list[Model]) -> None:
    body = {"text": TEXT, "seed": 3, "max_length": 4, "temperature": 0.7, "required": ["dog"], "banned": ["cat"]}
    answer = client.post("/v1/infill", json=body).json()
    [alone] = models[0].infill(TEXT, seed=3, max_length=4, temperature=0.7, required=["dog"], banned=["cat"])
    assert (answer["text"], answer["fills"], answer["complete"]) == (alone.text, alone.fills, alone.complete)
    assert (answer["object"], answer["model"]) == ("infill", "letters")
    assert [event["token"] for event in answer["events"]] == [event.token for event in alone.trajectory.events]
    given, new = len(alone.trajectory.start), len(alone.trajectory.events)
    assert answer["usage"] == {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
    assert "".join(piece["text"] for piece in answer["pieces"]) == answer["text"]


def test_a_stream_is_the_answer_in_parts(client: httpx.Client) -> None:
    body = {"text": TEXT, "seed": 5, "max_length": 3}
    whole = client.post("/v1/infill", json=body).json()
    response = client.post("/v1/infill", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    (first, start), *insertions, (last, done) = events(response)
    assert (first, last) == ("start", "done")
    assert {name for name, _ in insertions} == {"insertion"}
    assert [event for _, event in insertions] == whole["events"]
    cells = [cell["text"] for cell in start["cells"]]
    assert cells == ["the", " was", "."]
    for _, event in insertions:
        cells.insert(event["at"], event["text"])
    assert "".join(cells) == done["text"] == whole["text"]
    assert start["id"] == done["id"]
    assert {*done} == {*whole} - {"events"}


def test_a_line_of_a_stream_ends_where_its_event_does(client: httpx.Client) -> None:
    body = {"text": "the\u2028cat ___.", "stream": True, "max_length": 3}
    with client.stream("POST", "/v1/infill", json=body) as response:
        told = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]
    assert told[-1]["text"].startswith("the\u2028cat")


def test_ranges_instead_of_underscores_and_insertions_anywhere(client: httpx.Client) -> None:
    answer = client.post("/v1/infill", json={"text": "the cat was", "blanks": [[4, 7]], "max_length": 2}).json()
    assert answer["text"] == f"the {answer['fills'][0]} was"
    free = client.post("/v1/infill", json={"text": "the cat", "anywhere": True, "stop_threshold": 1.0}).json()
    assert "".join(piece["text"] for piece in free["pieces"] if piece["order"] is None) == "the cat"
    assert len(free["events"]) > 0


def test_many_at_once_are_each_as_if_alone(client: httpx.Client, models: list[Model]) -> None:
    """With settings and limits of all kinds."""

    def ask(seed: int) -> str:
        body = {"text": TEXT, "seed": seed, "max_length": 1 + seed % 4, "temperature": [None, 0.5][seed % 2]}
        return str(client.post("/v1/infill", json={**body, "max_tokens": 4 + seed % 5}).json()["text"])

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(36)))
    for seed, answer in enumerate(answers):
        changes: dict[str, Any] = {"temperature": 0.5} if seed % 2 else {}
        [alone] = models[0].infill(TEXT, seed=seed, max_length=1 + seed % 4, max_steps=4 + seed % 5, **changes)
        assert answer == alone.text


@pytest.mark.parametrize("changes", [{"top_p": 0.3}, {"top_k": 1}, {"temperature": 0.1}])
def test_every_way_of_drawing_is_the_one_asked_for(
    client: httpx.Client, models: list[Model], changes: dict[str, Any]
) -> None:
    def alone(**changes: Any) -> list[str]:
        return [models[0].infill(TEXT, seed=seed, max_length=4, **changes)[0].text for seed in range(6)]

    bodies = [{"text": TEXT, "seed": seed, "max_length": 4, **changes} for seed in range(6)]
    assert [client.post("/v1/infill", json=body).json()["text"] for body in bodies] == alone(**changes) != alone()


# --- Star graphs


def test_graphs_are_drawn_and_solved(client: httpx.Client, models: list[Model]) -> None:
    graph = client.get("/v1/graphs/example", params={"seed": 7}).json()
    assert graph == client.get("/v1/graphs/example", params={"seed": 7, "model": "graphs"}).json()
    assert graph != client.get("/v1/graphs/example", params={"seed": 8}).json()
    assert (graph["path"][0], graph["path"][-1]) == (graph["source"], graph["goal"])
    assert all(list(edge) in graph["edges"] for edge in zip(graph["path"], graph["path"][1:], strict=False))
    answer = client.post("/v1/solve", json={"prompt": graph["prompt"]}).json()
    [alone] = models[2].generate([graph["prompt"]])
    assert answer["text"] == models[2].decode(alone.ids)
    assert "".join(piece["text"] for piece in answer["pieces"]) == answer["text"]
    (_, start), *insertions, (_, done) = events(
        client.post("/v1/solve", json={"prompt": graph["prompt"], "stream": True})
    )
    assert start["cells"] == []
    nodes: list[str] = []
    for _, event in insertions:
        nodes.insert(event["at"], event["text"])
    assert " ".join(nodes) == done["text"] == answer["text"]
    assert done["object"] == "solution"


# --- The rest


def test_models_health_page_and_docs(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["task"]) for model in listed] == [
        ("letters", "text"),
        ("leftward", "text"),
        ("graphs", "star"),
    ]
    assert client.get("/v1/models/graphs").json() == listed[2]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert "/v1/infill" in client.get("/openapi.json").json()["paths"]
    assert client.get("/docs").status_code == 200


def test_numbers_for_prometheus(client: httpx.Client) -> None:
    client.post("/v1/infill", json={"text": TEXT})
    text = client.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert values['insertlm_requests_total{path="/v1/infill",status="200"}'] >= 1
    assert values['insertlm_tokens_total{model="letters"}'] >= 1
    assert values['insertlm_texts_running{model="letters"}'] == 0
    assert values['insertlm_request_seconds_bucket{le="+Inf",path="/v1/infill"}'] >= 1
    for kind in ("counter", "gauge", "histogram"):
        assert f" {kind}\n" in text


def test_two_servers_in_one_process_count_for_themselves(client: httpx.Client, serve: Callable[..., Any]) -> None:
    client.get("/health")
    with serve() as other, other.client() as lone:
        assert '{path="/health"' not in lone.get("/metrics").text
    assert 'insertlm_requests_total{path="/health",status="200"}' in client.get("/metrics").text


# --- Mistakes


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/infill", {"text": "no blank"}, 422, "the text has no blank; expected ___"),
        ("/v1/infill", {"text": ""}, 422, "the text is empty; expected text with ___"),
        ("/v1/infill", {}, 422, "text: Field required"),
        ("/v1/infill", {"text": "___", "tmp": 1}, 422, "tmp: unknown field; see /docs"),
        ("/v1/infill", {"text": "___", "/etc/x": 1}, 422, "unknown field; see /docs"),
        ("/v1/infill", {"text": "___", "seed": -1}, 422, "seed: Input should be greater than or equal to 0"),
        ("/v1/infill", {"text": "___", "top_p": 0}, 422, "top_p: Input should be greater than 0"),
        ("/v1/infill", {"text": "___", "model": "/etc"}, 404, "no such model is served here; see /v1/models"),
        ("/v1/infill", {"text": "___", "model": "graphs"}, 422, "this is a model of the kind star; expected one of"),
        ("/v1/infill", {"text": "___", "min_length": [1, 2]}, 422, "min_length: expected a number, or one for each"),
        ("/v1/infill", {"text": "___", "min_length": 9, "max_tokens": 5}, 422, "max_tokens: expected at least 9"),
        ("/v1/infill", {"text": "___", "model": "leftward", "max_length": 3}, 422, "this family cannot keep to bounds"),
        ("/v1/infill", {"text": "___ a", "model": "leftward", "stream": True}, 422, "this model writes at the end"),
        ("/v1/infill", {"text": "a\ud800 ___"}, 422, "text: expected Unicode text"),
        ("/v1/infill", {"text": "___", "banned": ["\udfff"]}, 422, "banned.0: Input should be a valid string"),
        ("/v1/solve", {"prompt": "1>9 : 1 9"}, 422, "unknown node '9' at word 2; expected 0 … 7"),
        ("/v1/solve", {"prompt": "", "model": "letters"}, 422, "this is a model of the kind text; expected one of"),
        ("/v1/nothing", {}, 404, "nothing is here; see /docs"),
    ],
)
def test_mistakes_are_told_in_one_shape(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert {*error} == {"message", "type", "param", "code"}
