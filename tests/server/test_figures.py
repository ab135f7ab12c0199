"""What a server must hold out, in a quick form; benchmarks/server.py is the long one."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from insertlm.server.schemas import CompletionBody, InfillBody, LlamaBody, SolveBody

GRAPH = "1>2 2>3 4>2 2>5 : 1 3"
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/infill": (InfillBody, {"text": "the ___ was", "max_tokens": 3}),
    "/v1/completions": (CompletionBody, {"prompt": "a ", "max_tokens": 3}),
    "/infill": (LlamaBody, {"input_prefix": "a ", "n_predict": 3}),
    "/v1/solve": (SolveBody, {"prompt": GRAPH}),
}
ODD: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 10**30, "", "7", "x\0", "\ud800", "../../etc/passwd", "___" * 70, [], [None], [[]],
    [[0, 10**12]], ["a"] * 20, {}, {"a": ["\0"]}, {"__class__": 1},
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_every_field_with_every_odd_value_is_answered(client: httpx.Client, path: str) -> None:
    """More than a thousand requests in all."""
    kind, plain = BODIES[path]
    for field in (*kind.model_fields, "no_such_field"):
        for value in ODD:
            data = json.dumps({**plain, field: value})
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 404, 413, 422), (data[:200], answer.text)
            if answer.status_code == 200:
                continue
            error = answer.json()["error"]
            assert {*error} == {"message", "type", "param", "code"}
            assert len(error["message"]) < 300
            assert not any(word in answer.text for word in ("\\n", "Traceback", ".py", "site-packages"))


def test_memory_stays_as_it_is(serve: Callable[..., Any]) -> None:
    """Of everything that Python keeps, not an object more for every few requests."""

    def ask(client: httpx.Client, count: int) -> int:
        for number in range(count):
            path = [*BODIES][number % len(BODIES)]
            body = {**BODIES[path][1], "seed": number, "stream": number % 3 == 0, "no_such_field": number}
            if path in ("/v1/infill", "/v1/solve") and number % 5:  # else it is refused
                del body["no_such_field"]
            client.post(path, json=body)
        gc.collect()
        return len(gc.get_objects())

    with serve() as running, running.client() as client:
        ask(client, 60)
        before = ask(client, 60)
        after = ask(client, 240)
        assert running.idle()
    assert after - before < 60
