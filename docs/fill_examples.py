"""Write below every example that fills in, in README.md and docs/, what it prints today.

    python docs/fill_examples.py [MODEL]

Examples are blocks of ```console that hold one `$ insertlm infill …` (what follows in the block is its output), and
blocks of ```python with a block of ```text below. MODEL takes the place of the bundled model, to try another one.
tests/test_doc_commands.py runs the examples and compares.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COMMAND = re.compile(r"(?<=^```console\n)(\$ insertlm infill [^\n]*\n)((?:(?!\$ |```)[^\n]*\n)*)(?=```)", re.MULTILINE)
_PYTHON = re.compile(
    r"(?<=^```python\n)((?:(?!```)[^\n]*\n)*)(```\n\n```text\n)(?:(?!```)[^\n]*\n)*(?=```)", re.MULTILINE
)


def main(model: str | None = None) -> None:
    def with_output(block: re.Match[str]) -> str:
        arguments = shlex.split(block[1])[2:]  # behind `$ insertlm`
        if "runs/" in block[1]:  # a model that the reader trains
            return block[0]
        more = ["--model", model] if model and "--model" not in arguments else []
        return block[1] + _printed("-m", "insertlm", *arguments, *more)

    def with_printed(block: re.Match[str]) -> str:
        code = block[1].replace('load("english")', f"load({model!r})") if model else block[1]
        return block[1] + block[2] + _printed("-c", code)

    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = _COMMAND.sub(with_output, path.read_text(encoding="utf-8"))
        path.write_text(_PYTHON.sub(with_printed, text), encoding="utf-8")


def _printed(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
