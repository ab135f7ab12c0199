"""The tour in CONTRIBUTING.md shows the package as it is; CHANGELOG.md and CITATION.cff can be read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TOUR = [
    line
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| `\w+(\.py)?`[,` ]", line)
]


def test_the_tour_names_the_layers_in_their_order() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [name.strip() for layer in contract["layers"] for name in layer.split("|")]
    named = [name.removesuffix(".py") for line in TOUR for name in re.findall(r"`(.*?)`", line.split("|")[1])]
    together = [{"training", "release", "server", "plots"}, {"data", "text"}]  # neighbours that share a line
    assert sorted(named) == sorted(layers)
    ranks = {name: index for index, names in enumerate(together) for name in names}
    for one, other in zip(named, layers, strict=True):
        assert one == other or ranks.get(one) == ranks.get(other)


def test_what_the_tour_points_at_is_there() -> None:
    for line in TOUR:
        for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", line):
            folders = [ROOT / "src" / "insertlm" / each for each in ("", "families")]
            assert any((folder / name).exists() for folder in folders), name


def test_the_citation_is_whole() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["title"] and citation["authors"] and citation["license"] == "Apache-2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [newest, *_] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert project["version"] == citation["version"] == newest
