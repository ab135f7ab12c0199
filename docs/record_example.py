"""Writes the first example of a model's examples.json beforehand, so that the page can play it when it opens.

python docs/record_example.py src/insertlm/assets/english
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi.testclient import TestClient

import insertlm
from insertlm.core.errors import InsertlmError
from insertlm.server.app import create_app
from insertlm.server.examples import FILE, Written, read_examples
from insertlm.server.limits import Limits

AN_HOUR = 3600  # seconds for the text: the machine may be busy


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, help="of a model of text, with an examples.json")
    try:
        record(arguments.parse_args().folder)
    except InsertlmError as error:
        raise SystemExit(str(error)) from error


def record(folder: Path) -> None:
    told = json.loads((folder / FILE).read_text(encoding="utf-8"))
    first = told["examples"][0]
    first["written"] = written(insertlm.load(folder), first["request"])
    (folder / FILE).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    read_examples(folder)  # as the server will


def written(model: insertlm.Model, request: Mapping[str, Any]) -> dict[str, Any]:
    """The texts that a server gives to the request."""
    # The model is served from an empty folder: its own may hold an example of a version that cannot be read any more.
    with TemporaryDirectory() as empty:
        app = create_app([replace(model, folder=Path(empty) / model.name)], Limits(seconds=AN_HOUR))
        with TestClient(app) as client:
            answer = client.post("/v1/infill", json=request)
            if not answer.is_success:
                raise InsertlmError(f"the first example: {answer.json()['error']['message']}")
            stream = client.post("/v1/infill", json={**request, "stream": True})
    start = next(line for line in stream.text.splitlines() if line.startswith("data: "))
    cells = [cell["text"] for cell in json.loads(start.removeprefix("data: "))["cells"]]
    texts = answer.json()["samples"] or [answer.json()]
    return Written.model_validate({"cells": cells, "texts": texts}).model_dump()


if __name__ == "__main__":
    main()
