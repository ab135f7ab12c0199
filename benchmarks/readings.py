"""How does a model read? It fills in the texts of docs/examples/english.yaml, one sample each, for somebody to judge.

python benchmarks/readings.py --model english --out docs/results/readings-english.json    # also prints Markdown

Nothing is chosen: the settings are the model's own, and text number i has seed i.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from insertlm.core.files import write_atomically
from insertlm.evaluation.provenance import provenance
from insertlm.model import Model, load

TEXTS = Path(__file__).parent.parent / "docs/examples/english.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name or folder, as `insertlm infill` takes it")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="lists of texts with ___, by kind")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--out", type=Path, help="JSON of what was written")
    arguments = parser.parse_args()
    model = load(arguments.model, arguments.device)
    texts = yaml.safe_load(arguments.texts.read_text(encoding="utf-8"))
    readings = [
        {"kind": kind, "seed": seed, **_filled(model, text, seed)}
        for seed, (kind, text) in enumerate((kind, text) for kind, texts in texts.items() for text in texts)
    ]
    if arguments.out:
        record = {"model": model.name, "readings": readings, **provenance(model.family.device)}
        write_atomically(arguments.out, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    for reading in readings:
        print(_shown(reading))
    ended = sum(reading["complete"] for reading in readings)
    print(f"\n{ended} of {len(readings)} texts ended without a limit")


def _filled(model: Model, text: str, seed: int) -> dict[str, Any]:
    [filled] = model.infill(text, seed=seed)
    return {"text": text, "fills": list(filled.fills), "complete": filled.complete}


def _shown(reading: dict[str, Any]) -> str:
    """A line of a Markdown list: the text with what was written in bold."""
    pieces = reading["text"].split("___")
    fills = [f"**{fill.strip()}**" if fill.strip() else "**∅**" for fill in reading["fills"]]
    text = "".join(part for pair in zip(pieces, [*fills, ""], strict=True) for part in pair)
    return f"- {' / '.join(line for line in text.splitlines() if line)}{'' if reading['complete'] else ' (a limit)'}"


if __name__ == "__main__":
    main()
