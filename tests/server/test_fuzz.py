"""Whatever the schema allows, and much that it does not, is answered; nothing breaks the server.

The long form: INSERTLM_FUZZ=1000 pytest tests/server/test_fuzz.py
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

EXAMPLES = int(os.environ.get("INSERTLM_FUZZ", "25"))
BUSY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[*HealthCheck],
    database=None,
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not allowed"])
def test_the_schema_finds_no_server_error(server: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) >= 9
    for operation in operations:
        _ask(operation, mode, server.url)
    assert server.idle()


def _ask(operation: Any, mode: GenerationMode, url: str) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @BUSY
    def ask(case: Any) -> None:
        response = case.call(base_url=url, timeout=30)
        assert response.status_code < 500, (operation.label, case.body, response.text)
        if response.status_code >= 400:
            assert {*response.json()} == {"error"}

    with suppress(Unsatisfiable):  # nothing can be wrong with a request that takes nothing
        ask()


words = st.text(st.characters(codec=None), max_size=8)  # halves of characters too
numbers = st.integers(-5, 70) | st.sampled_from([1 << 40, 1 << 62, 1 << 70]) | st.floats()
bodies = st.fixed_dictionaries(
    {"text": st.lists(words | st.sampled_from(["___", "a ", " ", "\\___", "the "]), max_size=6).map("".join)},
    optional={
        "blanks": st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=4),
        "anywhere": st.booleans(),
        "min_length": numbers | st.lists(numbers | st.none(), max_size=3),
        "max_length": numbers | st.lists(numbers | st.none(), max_size=3),
        "words": numbers | st.lists(numbers | st.none(), max_size=3),
        "samples": st.sampled_from([1, 2, 3, 0, 1.5, True, "2"]),
        "banned": st.lists(words, max_size=3),
        "required": st.lists(words, max_size=3),
        "seed": numbers,
        "temperature": numbers | st.sampled_from([0, 1e-30, 1e-300, 0.5]),
        "top_p": numbers | st.sampled_from([1e-30, 0.5]),
        "top_k": numbers,
        "stop_threshold": st.sampled_from([0, 0.5, 1]),
        "max_tokens": st.integers(1, 30),
        "stream": st.booleans(),
        "model": st.sampled_from(["letters", "leftward", "graphs", "none"]),
    },
)


@given(body=bodies)
@settings(BUSY, max_examples=8 * EXAMPLES)
def test_odd_texts_and_numbers_find_none_either(server: Any, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    response = httpx.post(
        f"{server.url}/v1/infill", content=data, headers={"content-type": "application/json"}, timeout=30
    )
    assert response.status_code < 500, response.text
    assert "something went wrong" not in response.text
    if response.status_code == 200 and not body.get("stream"):
        answer = response.json()
        assert "".join(piece["text"] for piece in answer["pieces"]) == answer["text"]
