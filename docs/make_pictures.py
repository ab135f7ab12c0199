"""Makes the pictures of results in docs/images from docs/results and models/.

    python docs/make_pictures.py [NAME …]

The pictures of the page have a script of their own, make_page_images.py. star-hard-trajectories.png needs the trained
rivals, which are not in the repository; the command stands below it in docs/results.md.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from insertlm.cli.main import main
from insertlm.plots import Curve, Stage, save, training_figure

DOCS = Path(__file__).resolve().parent
IMAGES, RESULTS = DOCS / "images", DOCS / "results"
COLOURS = 256  # of a picture: enough for flat areas and smooth letters, in a third of the bytes
ZEBRA = (
    *(f"zebra_ilm-19m-{order}" for order in ("margin", "certainty", "joint", "mass")),
    *(f"zebra_mdm-19m-{order}" for order in ("certainty", "random")),
    *("zebra_armo-19m", "zebra_arm-19m"),
)
# The runs of each line, the first one first. The MDM began with zebra-ilm60 as it stood after 40,401 steps.
CHAINS = {
    "ILM": ("zebra-armo13", "zebra-ilm-solver", "zebra-ilm60", "zebra-words"),
    "MDM": ("zebra-armo13", "zebra-ilm-solver", "zebra-ilm60", "zebra-mdm"),
    "ARM, solver's order": ("zebra-arm-first", "zebra-armo"),
    "ARM": ("zebra-arm-first", "zebra-arm"),
}
MDM_BEGAN = 40_401


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def plot(name: str, *arguments: str) -> None:
    if main(["plot", *arguments, "--out", str(IMAGES / name)]):
        raise SystemExit(f"{name} could not be drawn")


def zebra_accuracy() -> None:
    plot("zebra-accuracy.png", "accuracy", *(str(RESULTS / f"{name}.json") for name in ZEBRA))


def stories() -> None:
    """The file of all sweeps has a list of what `insertlm evaluate frontier` wrote into a file each."""
    [data] = [each["data"] for each in read("stories-nll") if each["label"] == "stories-mini"]
    sweeps = [{**each, "data": data} for each in read("stories-frontier")]
    varied = [(each["label"], next(iter(each["points"][0]["settings"]))) for each in sweeps]
    shown = {
        "frontier": lambda label, key: key != "max_steps" and (label, key) != ("ARM", "temperature"),
        "time": lambda label, key: key == ("max_steps" if label == "MDM" else "top_p"),
    }
    with TemporaryDirectory() as folder:
        for kind, chosen in shown.items():
            files = []
            for names, sweep in zip(varied, sweeps, strict=True):
                if chosen(*names):
                    files.append(Path(folder, f"{'-'.join(names)}.json"))
                    files[-1].write_text(json.dumps(sweep), encoding="utf-8")
            plot(f"stories-{kind}.png", kind, *map(str, files))


def zebra_training() -> None:
    """Time is spread evenly over the steps of a run: the file has its minutes, not those of each step."""
    runs = read("zebra-stages-h200")["runs"]
    first = read("zebra-muon-h200")["runs"]["arm-2e-3"]
    speed = first["steps_per_second"]
    runs["zebra-arm-first"] = {**first, "steps": 4436, "minutes_of_steps": 4436 / speed / 60}
    curves = []
    for label, names in CHAINS.items():
        stages, begun = [], 0.0
        for name, after in pairwise([*names, ""]):
            run = runs[name]
            steps = MDM_BEGAN if after == "zebra-mdm" else run["steps"]
            seconds = 60 * run["minutes_of_steps"] / run["steps"]
            found = [(begun + seconds * step, share) for step, share, _ in run["validation"] if step <= steps]
            stages.append(Stage(name.removeprefix("zebra-"), *zip(*found, strict=True)))
            begun += seconds * steps
        curves.append(Curve(label, stages))
    save(
        training_figure(curves, "zebra: 500 to 1,000 validation puzzles", over_steps=False),
        IMAGES / "zebra-training.png",
    )


def star_training() -> None:
    """The runs of docs/results.md with seeds 2 and 3. Each stands in the file once for every way of decoding."""
    runs = {(each["family"], each["seed"]): each for each in read("star-table-mini") if each["task"] == "star-hard"}
    curves = []
    for family in ("ilm", "it", "arm", "mdm"):
        for seed in (2, 3):
            steps, shares = zip(*runs[family, seed]["validation"].items(), strict=True)
            curves.append(Curve(family.upper(), [Stage(f"seed {seed}", [*map(int, steps)], shares)]))
    title = "star-hard: 500 validation graphs, two seeds"
    save(training_figure(curves, title, over_steps=True), IMAGES / "star-hard-training.png")


def make_small(path: Path) -> None:
    """Fewer colours, none of which is mixed from dots."""
    with Image.open(path) as picture:
        flat = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small = io.BytesIO()
    flat.save(small, "PNG", optimize=True)
    path.write_bytes(small.getvalue())


def puzzle() -> None:
    plot("zebra-puzzle.png", "puzzle", "models/zebra-19m-ilm", "--seed", "18")


PICTURES = {
    "zebra-accuracy": zebra_accuracy,
    "zebra-training": zebra_training,
    "stories-frontier": stories,
    "stories-time": stories,
    "star-hard-training": star_training,
    "zebra-puzzle": puzzle,
}


def make_all(names: Sequence[str]) -> None:
    os.chdir(DOCS.parent)
    for draw in dict.fromkeys(PICTURES[name] for name in names):
        draw()
    for name in names:
        make_small(IMAGES / f"{name}.png")


if __name__ == "__main__":
    make_all(sys.argv[1:] or list(PICTURES))
