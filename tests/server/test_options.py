"""What whoever runs a server sets holds: limits, to the last that they allow, and the key; and it tells how it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
import uvicorn
from fastapi.testclient import TestClient
from lettering import Few, build, text_model

from insertlm.cli.main import main
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig
from insertlm.infill.drafts import Draft
from insertlm.model import Model
from insertlm.server.limits import Limits

Serve = Callable[..., Any]
ENDLESS = {"text": "the ___.", "stop_threshold": 1.0}

# --- Limits


@pytest.fixture(scope="module")
def small(serve: Serve) -> Iterator[Any]:
    with serve(bytes=2000, characters=300, blanks=4, tokens=5, samples=3, words=2) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/infill", {"text": " the" * 74 + "a___"}),
        ("/v1/infill", {"text": "___a" * 4}),
        ("/v1/infill", {"text": "___", "max_tokens": 5}),
        ("/v1/infill", {"text": "___", "banned": ["x", "y"], "required": ["a", "o"]}),
        ("/v1/completions", {"prompt": "a", "n": 3}),
    ],
)
def test_what_is_just_allowed_is_done(small: Any, path: str, body: dict[str, Any]) -> None:
    with small.client() as client:
        data = json.dumps(body).encode().ljust(2000)
        assert client.post(path, content=data, headers={"content-type": "application/json"}).status_code == 200


def test_who_asks_for_no_number_of_tokens_is_limited_too(small: Any) -> None:
    with small.client() as client:
        assert client.post("/v1/infill", json=ENDLESS).json()["usage"]["completion_tokens"] == 5
        assert client.post("/infill", json={"input_prefix": "a", "n_predict": -1}).json()["tokens_predicted"] <= 5


def test_more_texts_than_are_written_at_once_are_written_alone(serve: Serve) -> None:
    with serve(concurrent=2, queue=3, seconds=5) as running, running.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a ", "n": 3, "max_tokens": 4})
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 3)


def test_max_tokens_counts_tokens(serve: Serve) -> None:
    """Also in a family that writes several in a step, and where the number of steps is a schedule."""
    it = build(ItConfig(), Few)
    several = text_model(it, "several")
    recipe = cast(Any, SimpleNamespace(task=several.recipe.task, decode=several.settings(parallel=0, max_steps=9)))
    mdm = text_model(build(MdmConfig(block=20), Few), "masked")
    body = {"text": "a ___", "min_length": None, "max_tokens": 5, "stop_threshold": 1.0}
    with serve(models=[replace(several, recipe=recipe), mdm]) as running, running.client() as client:
        answer = client.post("/v1/infill", json=body).json()
        assert (answer["usage"]["completion_tokens"], answer["limit"]) == (5, "max_tokens")
        assert len({event["step"] for event in answer["events"]}) < 5
        assert answer["note"] == "it reached max_tokens after 5 tokens; raise it for a longer text"
        asked = {"model": "masked", "text": "a ___", "min_length": 8, "max_length": 8}
        whole, cut = (client.post("/v1/infill", json=asked | more).json() for more in ({}, {"max_tokens": 3}))
        assert (whole["limit"], whole["note"], cut["limit"]) == (None, None, "max_tokens")
        assert [(e["step"], e["token"]) for e in cut["events"]] == [
            (e["step"], e["token"]) for e in whole["events"][:3]
        ]


# --- The command


@pytest.mark.parametrize(
    ("arguments", "variable"), [(["--api-key", "sesame"], ""), (["--api-key", "sesame"], "other"), ([], " sesame ")]
)
def test_the_command_passes_on_its_limits_and_its_key(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str
) -> None:
    apps: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **_: apps.append(app))
    monkeypatch.setenv("INSERTLM_API_KEY", variable)
    limits = ["--max-tokens", "7", "--max-queue", "3"]
    assert main(["serve", "star-hard-mini", "--device", "cpu", "--port", "0", *limits, *arguments]) == 0
    [app] = apps
    assert app.state.registry.limits == Limits(tokens=7, queue=3)
    client = TestClient(app, base_url="http://localhost")
    codes = [
        client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in ("no", "sesame")
    ]
    assert codes == [401, 200]


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("", "INSERTLM_API_KEY: expected a key, got an empty one; leave it out to serve everyone"),
        (" ", "INSERTLM_API_KEY: expected a key, got an empty one; leave it out to serve everyone"),
        ("sesame\n", "INSERTLM_API_KEY: expected a key of ASCII characters alone, without line ends"),
        ("ses\ame", "INSERTLM_API_KEY: expected a key of ASCII characters alone, without line ends"),
        ("sésame", "INSERTLM_API_KEY: expected a key of ASCII characters alone, without line ends"),
    ],
)
def test_a_key_that_is_none_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, line: str
) -> None:
    monkeypatch.setattr(uvicorn, "run", None)
    monkeypatch.setenv("INSERTLM_API_KEY", key)
    assert main(["serve", "star-hard-mini", "--device", "cpu", "--port", "0"]) == 2
    assert capsys.readouterr().err == f"insertlm: {line}\n"


def test_a_key_is_a_bearer(serve: Serve) -> None:
    with serve(key="sesame") as running, running.client() as client:
        kinds = ("Basic sesame", "sesame", "bearer sesame")
        codes = [client.get("/v1/models", headers={"Authorization": kind}).status_code for kind in kinds]
        assert codes == [401, 401, 200]


# --- How it is


def test_a_server_that_takes_nothing_says_so(serve: Serve) -> None:
    with serve() as running, running.client() as client:
        running.app.state.registry.close()
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})


def test_texts_of_one_request_fail_together(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a ", "n": 3, "max_tokens": 4}
    with serve() as running:
        with monkeypatch.context() as patch:
            patch.setattr(Draft, "see", lambda *_: 1 / 0)
            assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 500
        assert running.idle()
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200


def test_a_step_of_several_texts_is_one(serve: Serve) -> None:
    with serve() as running, running.client() as client:
        usage = client.post("/v1/completions", json={"prompt": "a ", "n": 8, "max_tokens": 3}).json()["usage"]
        [letters, *_] = running.workers()
        assert letters.steps <= 4
        assert letters.tokens == usage["completion_tokens"]


# --- Seeds of graphs


def test_a_solution_is_that_of_its_seed(serve: Serve, models: list[Model]) -> None:
    decode = models[2].settings(temperature=3.0, position_top_k=0)
    model = replace(models[2], recipe=msgspec.structs.replace(models[2].recipe, decode=decode))
    with serve(models=[model]) as running, running.client() as client:
        graph = client.get("/v1/graphs/example", params={"seed": 7}).json()
        task: Any = model.recipe.task
        assert graph["path"] == task.path(task.examples("test", 1, 7)[0].target)
        answers = [
            client.post("/v1/solve", json={"prompt": graph["prompt"], "seed": k}).json()["text"] for k in range(4)
        ]
    assert answers == [model.decode(model.generate([graph["prompt"]], seed=k)[0].ids) for k in range(4)]
    assert len(set(answers)) > 1
