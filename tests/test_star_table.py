"""benchmarks/star_table.py: the star-graph table shows its experiments, can be stopped, and is written as Markdown."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import side_by_side
import star_experiments
import star_table
import torch
from render_table import PAPER, PUBLISHED_WAYS, markdown
from side_by_side import Job
from star_experiments import WAYS, Experiment

from insertlm.core.errors import InsertlmError
from insertlm.storage import checkpoints

# --- Cells


def experiment_of(folder: Path, family: str = "ilm", **changes: Any) -> Experiment:
    parts = {"task": "easy", "preset": "mini", "seed": 2, "rate": None, "split": "test", "changes": (), "options": ()}
    return Experiment(folder=folder, family=family, **{**parts, **changes})


def test_a_experiment_is_a_training_and_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    experiment = experiment_of(tmp_path, rate="1e-3", changes=(("train.steps", "7"),), options=("--device", "cpu"))
    run = str(tmp_path / "easy-ilm-mini-seed2-rate1e-3")
    train = f"train recipes/star_easy/ilm.yaml --run {run} --model.preset mini --train.seed 2"
    train += " --optim.learning_rate 1e-3 --train.steps 7 --device cpu"
    evaluate = f"evaluate {run} --split test --out {run}/evaluation-test.json --device cpu"
    assert [" ".join(words) for words in experiment.missing()] == [train, evaluate]
    assert (experiment.recipe.optim.learning_rate, experiment.recipe.train.steps, experiment.recipe.model.width) == (
        1e-3,
        7,
        128,
    )
    assert experiment.records() == []


def test_some_families_are_evaluated_in_several_ways(tmp_path: Path) -> None:
    mdm, it = experiment_of(tmp_path, "mdm"), experiment_of(tmp_path, "it", split="validation")
    assert [mdm.evaluation(way)[-2:] for way in mdm.ways] == [
        ["--decode.order", order] for order in ("random", "certainty", "margin")
    ]
    assert [it.evaluation(way)[-1] for way in it.ways] == ["1", "0", "0.5"]
    outs = [Path(experiment.evaluation(way)[5]).name for experiment in (mdm, it) for way in experiment.ways]
    assert outs[0] == "evaluation-test-order-random.json"
    assert outs[-2] == "evaluation-validation-parallel-0.json"
    assert len(set(outs)) == 6


def test_of_several_ways_those_that_are_missing_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiment, "_trained", lambda _: True)
    experiment = experiment_of(tmp_path, "mdm")
    random, certainty, margin = experiment.ways
    file = Path(experiment.evaluation(certainty)[5])
    file.parent.mkdir()
    file.write_text(json.dumps({"step": experiment.recipe.train.steps}))
    assert experiment.missing() == [experiment.evaluation(random), experiment.evaluation(margin)]


@pytest.mark.parametrize("family", WAYS)
def test_one_way_of_each_family_is_compared_with_the_paper(tmp_path: Path, family: str) -> None:
    experiment, scores = experiment_of(tmp_path, family), defaultdict[str, Any](int)
    told = [experiment._evaluated(way, scores)["decoding"] for way in experiment.ways]
    assert sum(decoding in PUBLISHED_WAYS for decoding in told) == 1


def test_seeds_splits_and_tasks_are_those_asked_for() -> None:
    """The first seed of everything comes before the second of anything."""
    words = ["--seeds", "4", "2", "--tasks", "easy", "hard", "--families", "ilm", "armo", "--split", "validation"]
    experiments = star_table._experiments(star_table._arguments(words))
    rows = [("easy", "ilm"), ("easy", "armo"), ("hard", "ilm")]
    assert [(experiment.seed, experiment.task, experiment.family) for experiment in experiments] == [
        (seed, *row) for seed in (4, 2) for row in rows
    ]
    assert {experiment.split for experiment in experiments} == {"validation"}


def test_a_recipe_that_is_wrong_is_known_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InsertlmError, match=r"--train\.steps: expected int, got 'many'"):
        experiment_of(tmp_path, changes=(("train.steps", "many"),)).missing()


# --- The table, from end to end

TINY = {
    "model.layers": "1",
    "model.width": "16",
    "model.heads": "2",
    "model.hidden": "16",
    "task.train": "64",
    "task.test": "8",
    "task.validation": "4",
    "train.steps": "4",
    "train.validate_every": "2",
    "decode.max_steps": "3",
}


def table(folder: Path, *arguments: str) -> int:
    changes = [word for key, value in TINY.items() for word in ("--set", key, value)]
    return star_table.main(
        ["--folder", str(folder), "--preset", "mini", "--tasks", "easy", "--device", "cpu", *changes, *arguments]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of one good experiment and one that fails."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "easy-ilm-mini-seed1-rate2e-3").write_text("in the way")
    assert table(folder, "--families", "ilm", "--rates", "1e-3", "2e-3", "--side-by-side", "2") == 1
    return folder


def records_in(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    return found


def test_a_failed_experiment_does_not_stop_the_others(folder: Path) -> None:
    [record] = records_in(folder / "table.json")
    assert (record["task"], record["family"], record["preset"], record["seed"]) == ("star-easy", "ilm", "mini", 1)
    assert (record["rate"], record["graphs"], record["steps"], record["batch_size"]) == (1e-3, 64, 4, 64)
    assert (record["split"], record["count"], record["decoding"]) == ("test", 8, "")
    assert record["decode"]["max_steps"] == 3
    assert 0 <= record["sequence_accuracy"] <= record["token_accuracy"] <= 100
    assert list(record["validation"]) == ["2", "4"]
    assert record["parameters"] > 1000
    assert record["training_minutes"] >= 0
    assert [line.split()[:2] for line in record["commands"]] == [["insertlm", "train"], ["insertlm", "evaluate"]]
    assert {"device", "torch", "insertlm", "commit"} <= record.keys()


def test_what_is_done_is_not_done_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(jobs: Sequence[Job], *_: object, **__: object) -> bool:
        assert not jobs
        return True

    monkeypatch.setattr(side_by_side, "run", run)
    out = tmp_path / "again.json"
    assert table(folder, "--families", "ilm", "--rates", "1e-3", "--out", str(out)) == 0
    assert records_in(out) == records_in(folder / "table.json")
    printed = capsys.readouterr().out
    assert "1 of 1  easy-ilm-mini-seed1-rate1e-3: " in printed
    assert f"wrote {out}" in printed


def test_only_what_is_missing_is_done(folder: Path) -> None:
    def missing(**others: Any) -> list[str]:
        experiment = experiment_of(folder, **{"seed": 1, "rate": "1e-3", "changes": tuple(TINY.items()), **others})
        return [words[0] for words in experiment.missing()]

    assert missing() == []
    assert missing(split="validation") == ["evaluate"]
    assert missing(seed=2) == ["train", "evaluate"]
    assert missing(changes=(*TINY.items(), ("train.batch_size", "32"))) == ["train", "evaluate"]


def test_what_was_cut_off_is_missing(folder: Path, tmp_path: Path) -> None:
    """A training whose last checkpoint is not the last step, and an evaluation of an earlier one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    experiment = experiment_of(tmp_path, seed=1, rate="1e-3", changes=tuple(TINY.items()))
    file = experiment.run / "evaluation-test.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "step": 2}))
    assert experiment.missing() == [experiment.evaluation({})]
    checkpoints = experiment.run / "checkpoints"
    (checkpoints / "step-00000004").rename(checkpoints / "step-00000002")
    assert experiment.missing() == [experiment.training(), experiment.evaluation({})]


def test_a_training_is_warm_when_it_has_logged_steps_since_its_last_checkpoint(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path)
    log = experiment.run / "metrics.jsonl"
    assert not experiment.warm()
    experiment.run.mkdir()
    log.write_text('{"step": 200}\n')
    assert experiment.warm()
    checkpoints.save(experiment.run / "checkpoints", 400, {"weights": {"x": torch.zeros(1)}}, 1)
    log.write_text('{"step": 200}\n{"step": 400}\n')  # what a resumed run begins with
    assert not experiment.warm()
    log.write_text('{"step": 400}\n{"step": 600}\n')
    assert experiment.warm()


def test_experiments_may_begin_before_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool]] = []

    def run(jobs: Sequence[Job], at_once: int, ended: object, until: float, *, ahead: int) -> None:
        asked.extend((at_once, ahead, job.warm()) for job in jobs)

    monkeypatch.setattr(side_by_side, "run", run)
    monkeypatch.setattr(Experiment, "warm", lambda experiment: experiment.family == "it")
    table(tmp_path, "--families", "ilm", "it", "--side-by-side", "3", "--ahead", "2")
    assert asked == [(3, 2, False), (3, 2, True)]


def test_training_is_told_in_minutes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(star_experiments, "training_seconds", lambda log, steps: [90.0 for _ in steps])
    [found] = experiment_of(folder, seed=1, rate="1e-3", changes=tuple(TINY.items())).records()
    assert found["training_minutes"] == 1.5


def test_a_record_tells_the_seed_of_its_experiment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Experiment, "_trained", lambda _: True)
    experiment = experiment_of(tmp_path, seed=3, changes=tuple(TINY.items()))
    shutil.copytree(folder / "easy-ilm-mini-seed1-rate1e-3", experiment.run)
    assert [found["seed"] for found in experiment.records()] == [3]


def test_what_is_there_of_a_experiment_that_was_cut_off_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(Experiment, "missing", lambda _: [["evaluate"]])
    monkeypatch.setattr(side_by_side, "run", lambda jobs, at_once, ended, until, ahead: limits.append(until))
    start, out = time.monotonic(), tmp_path / "table.json"
    assert table(folder, "--families", "ilm", "--rates", "1e-3", "--deadline", "1000", "--out", str(out)) == 1
    assert len(records_in(out)) == 1
    margin = star_table.MARGIN
    assert start + 1000 - margin <= limits[0] <= time.monotonic() + 1000 - margin


def test_a_deadline_that_is_over_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table(tmp_path, "--families", "ilm", "--deadline", "0") == 1
    assert "stopped with 1 to go; the same command goes on" in capsys.readouterr().out
    assert records_in(tmp_path / "table.json") == []


def test_a_experiment_without_results_has_failed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experiment, "records", lambda _: [])
    assert table(folder, "--families", "ilm", "--rates", "1e-3", "--out", str(folder / "empty.json")) == 1
    assert "1 of 1  easy-ilm-mini-seed1-rate1e-3: FAILED: it left no results (log: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "rates"), [("ilm", ["3e-3", "1e-2"]), ("arm", ["1e-4"]), ("it", ["1e-4"]), ("mdm", ["1e-3"])]
)
def test_a_family_has_rates_of_its_own_or_those_of_all(family: str, rates: list[str]) -> None:
    words = ["ilm=3e-3", "1e-4", "mdm=1e-3", "ilm=1e-2"]
    assert star_table._rates(words, family) == rates
    assert star_table._rates([], family) == [None]


def test_a_rate_of_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        star_table.main(["--rates", "gpt=1e-3"])
    assert end.value.code == 2
    assert "unknown family 'gpt'; expected one of ilm, arm, mdm, it, armo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--side-by-side", "0"], "expected --side-by-side 1 or more, --ahead 0 or more"),
        (["--ahead", "-1"], "expected --side-by-side 1 or more, --ahead 0 or more"),
        (["--tasks", "hard", "--families", "armo"], "no recipe for this task and family"),
    ],
)
def test_a_table_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as end:
        star_table.main(["--folder", str(tmp_path / "none"), *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"star_table: {why}\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--out", "none/x.json"], "cannot write none/x.json: No such file or directory"),
        (["--folder", "file"], "file: File exists"),
        (["--set", "train.stepz", "4"], "--train.stepz: unknown key"),
        (["--rates", "abc"], "--optim.learning_rate: "),
        (["--families", "gpt"], "argument --families: invalid choice: 'gpt'"),
        (["--render", "none.json"], "none.json: No such file or directory"),
        (["--render", "file"], "file: expected a table that this script wrote (JSONDecodeError: "),
        (["--render", "scores.json"], "scores.json: expected a table that this script wrote (TypeError: "),
    ],
)
def test_a_mistake_is_known_at_once_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(side_by_side, "run", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("text")
    Path("scores.json").write_text('{"count": 1}')
    Path("table.json").write_text("old")
    with pytest.raises(SystemExit) as end:
        star_table.main(["--preset", "mini", "--tasks", "easy", "--folder", ".", "--families", "ilm", *arguments])
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"star_table: {why}")
    assert (Path("table.json").read_text(), Path("file").read_text()) == ("old", "text")


# --- Markdown


def record(family: str, exact: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "task": "star-hard",
        "family": family,
        "preset": "paper",
        "seed": 1,
        "rate": 1e-4,
        "graphs": 50000,
        "steps": 50000,
        "batch_size": 64,
        "split": "test",
        "decoding": "",
        "parameters": 87_400_000,
        "sequence_accuracy": exact,
        "token_accuracy": 99.5,
        "training_minutes": 10.0,
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "commit": "abc",
    }
    return {**usual, **changes}


def test_the_markdown_table() -> None:
    records = [
        record("ilm", 98.0, training_minutes=11.0),
        record("ilm", 100.0, seed=2, token_accuracy=99.7),
        record("mdm", 20.0, decoding="order random"),
        record("mdm", 60.0, decoding="order margin"),
        record("armo", 99.98, task="star-easy", token_accuracy=100.0),
    ]
    assert markdown(records).splitlines() == [
        "The `paper` preset, 50,000 training graphs, 50,000 steps of 64, test split"
        " (NVIDIA H200, torch 2.11.0, commit abc):",
        "",
        "| task | model | weights | decoding | rate | exact match | paper | token accuracy | paper | seeds | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| star-easy | ARM, oracle order | 87.4M | – | 0.0001 | 99.98 | 100.0 | 100.00 | 100.0 | 1 | 10.0 |",
        "| star-hard | MDM | 87.4M | order random | 0.0001 | 20.00 | 21.0 | 99.50 | 54.9 | 1 | 10.0 |",
        "| star-hard | MDM | 87.4M | order margin | 0.0001 | 60.00 | – | 99.50 | – | 1 | 10.0 |",
        "| star-hard | ILM | 87.4M | – | 0.0001 | 99.00 ± 1.41 | 99.1 | 99.60 ± 0.14 | 99.7 | 1, 2 | 10.5 |",
    ]


@pytest.mark.parametrize(
    ("commit", "told"),
    [(None, ""), ("0123456789ab", ", commit 0123456789"), ("0123456789ab-dirty", ", commit 0123456789-dirty")],
)
def test_the_table_says_what_it_was_made_with(commit: str | None, told: str) -> None:
    assert f"(NVIDIA H200, torch 2.11.0{told}):" in markdown([record("ilm", 1.0, commit=commit)])


def test_every_setting_has_its_own_table() -> None:
    text = markdown([record("ilm", 1.0), record("ilm", 2.0, preset="mini"), record("ilm", 3.0, rate=1e-3)])
    assert text.count("| task |") == 2
    paper, mini = text.split("\n\nThe `mini` preset")
    assert paper.count("star-hard") == 2  # one row for each rate
    assert mini.count("star-hard") == 1


def test_a_row_is_the_mean_of_its_seeds() -> None:
    text = markdown([record("ilm", exact, seed=seed) for seed, exact in enumerate((1.0, 2.0, 6.0), start=1)])
    assert "| 3.00 ± 2.65 |" in text
    assert "| 1, 2, 3 |" in text


def test_several_files_are_rendered_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for seed, file in enumerate(files, start=1):
        file.write_text(json.dumps([record("it", 10.0 * seed, seed=seed, decoding="stop_threshold 0.5")]))
    assert star_table.main(["--render", *map(str, files)]) == 0
    assert "| star-hard | IT | 87.4M | stop_threshold 0.5 | 0.0001 | 15.00 ± 7.07 | 17.5 |" in capsys.readouterr().out


def test_all_families_have_published_numbers() -> None:
    assert PAPER.keys() == set(star_table.FAMILIES)
    assert WAYS.keys() < PAPER.keys()
