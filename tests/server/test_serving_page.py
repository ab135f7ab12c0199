"""What docs/serving.md shows works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from lettering import text_model

from insertlm.cli.arguments import parser
from insertlm.model import Model
from insertlm.server.app import create_app
from insertlm.server.limits import Limits

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def running(models: list[Model], start: Callable[[Any], Any]) -> Iterator[Any]:
    with start(create_app([text_model(models[0].family, "english"), models[2]])) as running:
        yield running


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_examples_run(running: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks("python")) == 2
    for block in blocks("python"):
        exec(block.replace("http://127.0.0.1:8000", running.url), {})
        assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_run(running: Any) -> None:
    commands = [block for block in blocks("bash") if block.startswith("curl")]
    assert len(commands) == 4
    for command in commands:
        line = command.replace("http://127.0.0.1:8000", running.url)
        out = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True, timeout=60).stdout
        assert "error" not in out
        assert out.startswith("event: start") or json.loads(out)


def test_the_server_is_started_as_the_page_says() -> None:
    for line in re.findall(r"^insertlm (serve[^#\n]*)", PAGE, re.MULTILINE):
        assert parser().parse_args(line.split()).function == "serve"


def test_limits_metrics_and_paths_are_those_of_the_server(running: Any) -> None:
    for limit in fields(Limits):
        assert re.search(rf"`--max-{limit.name}`.*\b{limit.default}\b", PAGE)
    with running.client() as client:
        client.get("/health")
        shown = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.MULTILINE))
        paths = client.get("/openapi.json").json()["paths"]
    assert {*re.findall(r"`(insertlm_\w+)\{", PAGE)} == shown
    assert {path for path in paths if "{" not in path} == {*re.findall(r"`(?:POST|GET) (/[\w/]+)`", PAGE)}
