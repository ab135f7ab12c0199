"""An export needs torch and transformers and nothing else: it is used where there is nothing else.

Two ways: a folder of links to what torch and transformers need, as the only place to import from (quick, offline); and
a virtual environment that pip fills with these two (slow: `-m slow`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from insertlm.model import load

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TEXT = "The ___ sat on ___ mat."
PROGRAM = """
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained("exported", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
print(model.infill("{text}", tokenizer).text)

import importlib.util, sys
assert importlib.util.find_spec("insertlm") is None and not any(name.startswith("insertlm") for name in sys.modules)
"""


def needs(*names: str) -> set[str]:
    """These distributions and all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # for other systems or versions of Python
            continue
        found.add(name)
        plain = (line for line in required if not re.search(r";.*\bextra\b", line))
        waiting += [match[0] for line in plain if (match := re.match(r"[\w.-]+", line))]
    return found


def link(site: Path, name: str) -> None:
    """All that a distribution installed, without what others did."""
    installed = distribution(name)
    tops = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        place = Path(str(installed.locate_file(top)))
        if place.exists() and not (site / top).exists():
            (site / top).symlink_to(place)


def used(python: Path, flags: list[str], exported: Path, home: Path, program: str) -> str:
    """What the program prints, run beside the export with a home of its own."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, *flags, "-c", program],
        check=False,
        cwd=exported.parent,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_four_lines_infill_with_torch_and_transformers_alone(exported: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in needs("torch", "transformers"):
        link(site, name)
    program = f"import sys\nsys.path.append({str(site)!r}){PROGRAM.format(text=TEXT)}"
    [expected] = load(exported, "cpu").infill(TEXT)
    assert used(Path(sys.executable), ["-I", "-S"], exported, tmp_path, program) == expected.text


@pytest.mark.slow
def test_four_lines_infill_in_a_clean_environment(exported: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "torch", "transformers"], check=True, timeout=500)
    [expected] = load(exported, "cpu").infill(TEXT)
    assert used(python, ["-I"], exported, tmp_path, PROGRAM.format(text=TEXT)) == expected.text
