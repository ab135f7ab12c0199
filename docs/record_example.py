"""Writes the first example of a model's examples.json beforehand, so that the page can play it when it opens.

python docs/record_example.py src/insertlm/assets/english
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastapi.testclient import TestClient

import insertlm
from insertlm.server.app import create_app
from insertlm.server.examples import FILE


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, help="of a model of text, with an examples.json")
    folder = arguments.parse_args().folder
    told = json.loads((folder / FILE).read_text(encoding="utf-8"))
    first, *others = told["examples"]
    told["examples"] = [{**first, "written": written(folder, first["request"])}, *others]
    (folder / FILE).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def written(folder: Path, request: dict[str, object]) -> dict[str, object]:
    with TestClient(create_app([insertlm.load(folder)])) as client:
        answer = client.post("/v1/infill", json=request).json()
        events = client.post("/v1/infill", json={**request, "stream": True}).text
    start = next(line for line in events.splitlines() if line.startswith("data: "))
    cells = [cell["text"] for cell in json.loads(start.removeprefix("data: "))["cells"]]
    return {"cells": cells, "answer": answer}


if __name__ == "__main__":
    main()
