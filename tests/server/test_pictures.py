"""docs/make_page_images.py makes all pictures of the page, whatever the models are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lettering import Few, build, text_model
from PIL import Image

import insertlm
from insertlm.families.fill import FillConfig

SCRIPT = Path(__file__).parents[2] / "docs" / "make_page_images.py"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_they_show_the_first_example(tmp_path: Path, serve: Callable[..., Any]) -> None:
    request = {"text": "a {name:3 words} b ___", "seed": 1, "max_tokens": 8}
    told = {"examples": [{"name": "First", "request": request}, {"name": "Long", "request": {"text": "no blank"}}]}
    (tmp_path / "examples.json").write_text(json.dumps(told), encoding="utf-8")
    text = text_model(build(FillConfig(), Few, max_length=600), str(tmp_path))
    with serve(models=[text, insertlm.load("star-hard-mini", "cpu")]) as running, running.client() as client:
        command = [sys.executable, str(SCRIPT), "--url", running.url, "--out", str(tmp_path)]
        subprocess.run(command, check=True, timeout=120)
        written = client.post("/v1/infill", json=request).json()["usage"]["completion_tokens"]
    sizes = {name: Image.open(tmp_path / name).size for name in ("page.png", "page-dark.png", "page-graph.png")}
    assert sizes["page.png"] == sizes["page-dark.png"]
    assert sizes["page-graph.png"] == (1680, 1080)
    with Image.open(tmp_path / "page.gif") as picture:
        assert getattr(picture, "n_frames", 1) == written + 1
