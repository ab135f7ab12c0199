"""Commands are typed in a folder with a recipe, and a run of it made by the command itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from commanding import RECIPE

from insertlm.cli.main import main


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "star_tiny").mkdir()
    (folder / "star_tiny" / "ilm.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "star_tiny/ilm.yaml", "--device", "cpu"]) == 0
    return folder


@pytest.fixture(autouse=True)
def work_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
