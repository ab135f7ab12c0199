"""The wheel that `make wheel` builds holds the package and its bundled models, and works away from the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("src", "tests", "models")
FILES = ("Makefile", "MANIFEST.in", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
MOST_BYTES = 100_000_000  # what PyPI takes
README = (ROOT / "README.md").read_text(encoding="utf-8")
STORY = ROOT / "docs" / "examples" / "red-ball.txt"


def run(command: list[str], folder: Path, **more: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by `make wheel` from a copy of the checkout, in the environment of the tests and without a network."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    stale = copy / "build" / "lib" / "insertlm" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    ready = f"{sys.prefix}/.ready"
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}  # pip reads 0 as: no isolation
    run(["make", "wheel", f"VENV={sys.prefix}", "-o", ready], copy, **offline)
    [built] = (copy / "dist").iterdir()
    return built


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"insertlm-{PROJECT['version']}-py3-none-any.whl"
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.endswith("/")}
    information = {name for name in packed if name.startswith(f"insertlm-{PROJECT['version']}.dist-info/")}
    assert any(name.endswith("/LICENSE") for name in information)
    paths = (path for path in (ROOT / "src" / "insertlm").rglob("*") if path.is_file())
    files = (path for path in paths if "__pycache__" not in path.parts)
    assert packed - information == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert any(re.fullmatch(r"insertlm/assets/[^/]+/model\.safetensors", name) for name in packed)


def test_it_is_small_enough_for_an_index(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the one file that the README's Python reads."""
    folder = tmp_path_factory.mktemp("away")
    place = folder / STORY.relative_to(ROOT)
    place.parent.mkdir(parents=True)
    shutil.copy(STORY, place)
    return folder


def use(bin_folder: Path, python: Path, away: Path, site: Path, **environment: str) -> None:
    """What a newcomer runs first: the version, the command of the README and its Python."""
    command = str(bin_folder / "insertlm")
    assert run([command, "--version"], away, **environment) == f"insertlm {PROJECT['version']}\n"
    story = STORY.read_text(encoding="utf-8").strip()
    filled = run([command, "infill", story, "--seed", "1"], away, **environment)
    given = [part.strip() for part in story.split("___")]
    assert "___" not in filled and all(part in filled for part in given)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = f"{code}\nprint(insertlm.__file__)"
    *printed, place = run([str(python), "-c", program], away, **environment).splitlines()
    assert Path(place).is_relative_to(site)
    assert printed == re.findall(r"^print\(.*?\)  # (.*)$", code, re.MULTILINE)


def test_it_runs_the_readme_away_from_the_checkout(wheel: Path, away: Path, tmp_path: Path) -> None:
    """With the dependencies of the tests' own environment, which comes later on the path."""
    site = tmp_path / "site"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], away)
    use(site / "bin", Path(sys.executable), away, site, PYTHONPATH=str(site))


@pytest.mark.slow
def test_it_runs_the_readme_in_a_clean_environment(wheel: Path, away: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, str(wheel)], check=True, timeout=500)
    use(binaries, binaries / "python", away, tmp_path / "venv", PYTHONPATH="")
