"""`insertlm evaluate nll | …`: from the command line to the JSON file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insertlm import plots
from insertlm.cli import commands
from insertlm.cli import main as cli
from insertlm.cli.main import main
from insertlm.cli.measuring import is_run
from insertlm.evaluation import evaluator as module
from insertlm.evaluation import generation
from insertlm.evaluation.generation import TextGenerator

Run = Callable[..., str]
TEXTS = ["Once upon a time.", "The dog ran.", "", "He said: no!"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of texts."""
    monkeypatch.chdir(tmp_path)
    Path("stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    Path("real.txt").write_text("A cat.\nA dog and a cat.\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str], causal_model: Path) -> Run:
    """What a command prints that succeeds and complains of nothing; EVALUATOR stands for the tiny model."""

    def run(*arguments: str) -> str:
        code = main([str(causal_model) if argument == "EVALUATOR" else argument for argument in arguments])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str], causal_model: Path) -> Run:
    """The one line that a command says when it refuses."""

    def run(*arguments: str) -> str:
        code = main([str(causal_model) if argument == "EVALUATOR" else argument for argument in arguments])
        assert code == 2
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("insertlm: ")

    return run


def read(path: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return record


# --- nll


def test_nll_prints_a_table_and_writes_json(output: Run, causal_model: Path) -> None:
    out = output("evaluate", "nll", "stories.jsonl", "--evaluator", "EVALUATOR", "--data", "real.txt")
    for line in (
        r"stories +data",
        r"NLL +[\d.]+ ± [\d.]+ +[\d.]+ ± ",
        r"texts +4 +2",
        r"  50 % +12 +11",
        "lengths against",
    ):
        assert re.search(line, out)
    assert "stories: 1 empty, in no mean: number 3\n" in out
    assert out.endswith("wrote stories-nll-tiny-lm.json\n")
    record = read("stories-nll-tiny-lm.json")
    assert record["command"] == f"insertlm evaluate nll stories.jsonl --evaluator {causal_model} --data real.txt"
    assert (record["label"], record["count"], record["empty"]) == ("stories", 4, [3])
    assert record["data"]["count"] == 2
    assert {"nll", "nll_by_token", "entropy", "length", "length_difference", "commit"} <= record.keys()


def test_texts_may_be_called_data(output: Run) -> None:
    call = ["evaluate", "nll", "stories.jsonl", "--evaluator", "EVALUATOR", "--data", "real.txt", "--label", "data"]
    assert re.search(r"data +data\s+NLL .*texts +4 +2", output(*call), re.DOTALL)
    record = read("stories-nll-tiny-lm.json")
    assert (record["count"], record["data"]["count"]) == (4, 2)


def test_a_second_call_needs_no_evaluator(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["evaluate", "nll", "stories.jsonl", "--evaluator", "EVALUATOR", "--out", "x.json"]
    first = output(*call)
    assert len(Path("x.journal.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    monkeypatch.setattr(module, "load_pretrained", None)
    assert output(*call) == first


def test_a_result_named_like_the_texts_leaves_them_alone(output: Run) -> None:
    before = Path("stories.jsonl").read_bytes()
    output("evaluate", "nll", "stories.jsonl", "--evaluator", "EVALUATOR", "--out", "stories.json")
    assert Path("stories.jsonl").read_bytes() == before


def test_an_evaluator_that_fails_keeps_what_was_done(output: Run, complaint: Run, place: Path) -> None:
    output("evaluate", "nll", "real.txt", "--evaluator", "EVALUATOR", "--out", "x.json")
    before = {path: path.read_bytes() for path in place.iterdir()}
    message = complaint("evaluate", "nll", "real.txt", "--evaluator", "./none", "--out", "x.json")
    assert message == "./none: no model there; expected a folder, a .gguf file or a name on the hub"
    assert {path: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stories.jsonl", "--field", "output"], "stories.jsonl, line 1: expected a text under 'output'"),
        (["none.txt"], "none.txt: no such file"),
        (["none"], "none: no model there"),
        (["stories.jsonl", "--out", "x.txt"], "--out x.txt: expected a .json file"),
        (["stories.jsonl", "--out", "no/x.json"], "cannot write no/x.json: there is no folder no"),
        (["stories.jsonl", "--decode.temperature", "1"], "--decode.temperature: expected a run, which can decode"),
        (["stories.jsonl", "--data", "none.txt"], "none.txt: no such file"),
        (["stories.jsonl", "--count", "0"], "argument --count: expected a whole number of at least 1"),
        ([], "the following arguments are required: FILE|RUN"),
        (["star-hard-mini"], "its task starts from a prompt; expected a model that writes texts freely"),
    ],
)
def test_bad_arguments(complaint: Run, arguments: list[str], message: str) -> None:
    assert message in complaint("evaluate", "nll", *arguments, "--evaluator", "EVALUATOR")


def test_a_run_writes_the_texts_once(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a writer in place of a model of texts."""
    calls: list[tuple[float, int]] = []

    def write(settings: Any, count: int) -> list[str]:
        calls.append((settings.temperature, count))
        return [f"Text {number}." for number in range(count)]

    monkeypatch.setattr(generation, "unconditional", lambda model, seed: TextGenerator(f"stub {seed}", write))
    call = ["evaluate", "nll", "star-hard-mini", "--evaluator", "EVALUATOR", "--decode.temperature", "0.5"]
    first = output(*call, "--count", "3")
    assert output(*call, "--count", "3") == first
    output(*call)
    assert calls == [(0.5, 3), (0.5, 100)]
    assert read("star-hard-mini-nll-tiny-lm.json")["count"] == 100


def test_a_run_writes_with_the_seed_asked_for(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def source(model: Any, seed: int) -> TextGenerator:
        seeds.append(seed)
        return TextGenerator("stub", lambda settings, count: ["A cat."] * count)

    monkeypatch.setattr(generation, "unconditional", source)
    for word in ("nll", "frontier"):
        output("evaluate", word, "star-hard-mini", "--evaluator", "EVALUATOR", "--count", "2", "--seed", "7")
    assert seeds == [7, 7]


def test_count_bos_and_data_are_those_asked_for(output: Run) -> None:
    call = ["evaluate", "nll", "stories.jsonl", "--evaluator", "EVALUATOR", "--data", "real.txt", "--out", "x.json"]
    output(*call, "--count", "2")
    plain = read("x.json")
    assert (plain["count"], plain["data"]["count"]) == (2, 2)
    difference = plain["length"]["mean"] - plain["data"]["length"]["mean"]
    assert plain["length_difference"]["shift"] == pytest.approx(difference)
    assert difference > 1
    output(*call, "--count", "2", "--bos", "</s>")
    assert (plain["bos"], read("x.json")["bos"]) == (None, "</s>")
    assert abs(read("x.json")["nll"] - plain["nll"]) > 1e-3


def test_a_run_folder_may_have_the_name_of_a_command(complaint: Run) -> None:
    Path("nll").mkdir()
    Path("nll/recipe.yaml").touch()
    message = complaint("evaluate", "nll")
    assert message.endswith("required: FILE|RUN; for the run folder of that name: insertlm evaluate ./nll")
    assert complaint("evaluate", "./nll").startswith("nll/recipe.yaml: is empty")


@pytest.mark.parametrize("word", ["nll", "infilling", "judge", "frontier"])
def test_help_of_a_command_of_two_words(capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["evaluate", word, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: insertlm evaluate {word} ")


def test_mistakes_in_files_are_answered_without_torch(place: Path) -> None:
    code = (
        "import sys; from insertlm.cli.main import main; main(['plot', 'judge', 'x']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# --- infilling


def test_infilling_against_the_truth_and_the_input(output: Run, causal_model: Path) -> None:
    lines = [
        {"pieces": ["A ", " ran."], "removed": ["dog"], "text": "A dog ran.", "output": "A cat ran."},
        {"pieces": ["He ", ""], "removed": ["sat."], "text": "He sat.", "output": "He sat."},
    ]
    Path("set.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    out = output("evaluate", "infilling", "set.jsonl", "--evaluator", "EVALUATOR")
    assert re.search(r"against the truth +[+-][\d.]+ ± [\d.]+ % +[+-]", out)
    record = read("set-infilling-tiny-lm.json")
    scores = {}
    for text in ("A dog ran.", "A cat ran.", "A ran.", "He sat.", "He"):
        Path("one.txt").write_text(text, encoding="utf-8")
        output("evaluate", "nll", "one.txt", "--evaluator", "EVALUATOR", "--out", "one.json")
        scores[text] = read("one.json")["nll"]
    changes = [scores["A cat ran."] / scores["A ran."] - 1, scores["He sat."] / scores["He"] - 1]
    assert record["against_the_input"]["change"]["nll"] == pytest.approx(50 * sum(changes), abs=1e-3)
    change = scores["A cat ran."] / scores["A dog ran."] - 1
    assert record["against_the_truth"]["change"]["nll"] == pytest.approx(50 * change, abs=1e-3)
    assert record["truth"]["nll"] == pytest.approx((scores["A dog ran."] + scores["He sat."]) / 2, abs=1e-5)
    assert record["against_the_truth"]["count"] == 2
    output("evaluate", "infilling", "set.jsonl", "--evaluator", "EVALUATOR", "--count", "1")
    assert read("set-infilling-tiny-lm.json")["against_the_truth"]["count"] == 1


# --- frontier


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, int]]:
    """A writer in place of a model of texts; what it was asked for."""
    calls: list[tuple[float, float, int]] = []

    def write(settings: Any, count: int) -> list[str]:
        calls.append((settings.temperature, settings.top_p, count))
        return ["abcdefghij"[: int(10 * settings.temperature)]] * count

    monkeypatch.setattr(generation, "unconditional", lambda model, seed: TextGenerator(f"stub {seed}", write))
    return calls


def test_frontier_writes_points_and_the_data(output: Run, stub: list[tuple[float, float, int]]) -> None:
    call = ["evaluate", "frontier", "star-hard-mini", "--evaluator", "EVALUATOR", "--count", "2", "--data", "real.txt"]
    call += ["--sweep", "temperature=0,0.5", "--sweep", "top_p=0.9", "--label", "ILM"]
    out = output(*call)
    assert re.search(r"temperature 0.5, top_p 0.9 +[\d.]+ +[\d.]+ +5.0 +0 +", out)
    assert re.search(r"temperature 0.0, top_p 0.9 +– +– +– +2 +", out)
    assert re.search(r"\n +data +[\d.]+ ", out)
    record = read("star-hard-mini-frontier-tiny-lm.json")
    assert [point["settings"]["temperature"] for point in record["points"]] == [0.0, 0.5]
    assert record["points"][0]["summary"] is None
    assert record["points"][1]["summary"]["length"]["mean"] == 5
    assert (record["label"], record["data"]["count"]) == ("ILM", 2)
    assert output(*call) == out
    assert stub == [(0.0, 0.9, 2), (0.5, 0.9, 2)]
    output(*call[:3], "--evaluator", "EVALUATOR", "--out", "y.json", "--decode.top_p", "0.5")
    assert stub[2:] == [(0.6, 0.5, 100), (0.8, 0.5, 100), (1.0, 0.5, 100)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "temperature"], "expected KEY=VALUE,VALUE,… such as temperature=0.6,0.8,1, got 'temperature'"),
        (["--sweep", "temperature=1,,2"], "expected KEY=VALUE,VALUE,…"),
        (["--sweep", "heat=1"], "heat: unknown key; expected one of"),
        (["--sweep", "temperature=warm"], "--decode.temperature: expected float, got 'warm'"),
    ],
)
def test_bad_sweeps(complaint: Run, stub: list[tuple[float, float, int]], arguments: list[str], message: str) -> None:
    assert message in complaint("evaluate", "frontier", "star-hard-mini", "--evaluator", "EVALUATOR", *arguments)
    assert not stub


# --- The page

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.parametrize("line", re.findall(r"^    (insertlm .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_commands_on_the_page_are_understood(line: str) -> None:
    plain, _ = cli._split_off_overrides(shlex.split(line, comments=True)[1:])
    parsed, rest = cli._parse(plain)
    assert not rest
    assert hasattr(commands, parsed.function)


# --- Pictures


SUMMARY = {"nll": 2.0, "entropy": 3.0}


def write_record(path: str, label: str, *, evaluator: str = "E", **more: Any) -> str:
    def point(temperature: float, top_p: float) -> dict[str, Any]:
        summary = {"nll": 1 + temperature, "entropy": 2 + temperature * top_p}
        return {"settings": {"temperature": temperature, "top_p": top_p}, "seconds_per_text": 0.5, "summary": summary}

    points = [point(t, p) for t in (0.5, 1.0) for p in (0.9, 1.0)]
    points.append({"settings": {"temperature": 0, "top_p": 1.0}, "seconds_per_text": 0.5, "summary": None})
    rubrics = {"fluency": {"score": 4.0, "error": 0.1}, "coherence": {"score": None, "error": 0.0}}
    record = {"label": label, "evaluator": evaluator, "judge": "J", "count": 128, "points": points, "rubrics": rubrics}
    record |= more
    Path(path).write_text(json.dumps(record), encoding="utf-8")
    return path


def test_pictures_are_drawn_from_results(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        write_record("a.json", "ILM", evaluator="e/E.gguf"),
        write_record("b.json", "ILM", evaluator="e/E.gguf", data={"nll": 2.0, "entropy": 3.0}, count=100),
    ]
    for picture in ("frontier", "time", "judge"):
        assert output("plot", picture, *files) == f"wrote {picture}.png\n"
        assert Path(f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    seen: list[Any] = []
    monkeypatch.setattr(plots, "frontier_figure", lambda *drawn: seen.append(drawn))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    output("plot", "frontier", *files)
    [(traces, title, data)] = seen
    assert title == "100 to 128 texts a point, written from nothing, scored by E"
    assert data == (3.0, 2.0)
    assert traces[0] == plots.Trace("ILM (a.json) (top_p 0.9)", "temperature", (2.45, 2.9), (1.5, 2.0), ("0.5", "1.0"))
    assert len(traces) == 4
    other = write_record(
        "c.json",
        "ILM",
        evaluator="e/E.gguf",
        points=[{"settings": {"top_k": 3}, "seconds_per_text": 1, "summary": SUMMARY}],
    )
    output("plot", "frontier", files[0], other)  # its line is called otherwise, so no file is named
    assert {trace.label for trace in seen[1][0]} == {f"ILM (top_p {p}), temperature" for p in (0.9, 1.0)} | {
        "ILM, top_k"
    }


def test_pictures_show_the_time_and_the_errors_of_judges(output: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plots, "timing_figure", lambda traces, title: seen.extend(traces))
    monkeypatch.setattr(plots, "judge_figure", lambda models, title: seen.extend([*models, title]))
    monkeypatch.setattr(plots, "save", lambda *_: None)
    file = write_record("a.json", "ILM")
    output("plot", "time", file)
    output("plot", "judge", file)
    *traces, judged, title = seen
    assert {trace.x for trace in traces} == {(0.5, 0.5)}
    assert judged == plots.Judged("ILM", {"fluency": (4.0, 0.1), "coherence": None})
    assert title == "128 texts of each model, judged by J"


def test_versions_in_names_of_models_are_no_endings_of_files() -> None:
    assert all(map(is_run, ("stories-mini", "owner/stories-1.5", "stories.2b")))
    assert not any(map(is_run, ("real.txt", "none.csv", "stories.jsonl.xz")))


def test_bad_results_for_pictures(complaint: Run) -> None:
    write_record("a.json", "ILM")
    write_record("b.json", "MDM", evaluator="F")
    message = "b.json was measured by F, a.json by E; expected results of one evaluator"
    assert complaint("plot", "frontier", "a.json", "b.json") == message
    assert "none.json: cannot be read: No such file" in complaint("plot", "time", "none.json")
    assert "real.txt: not JSON; expected a result of insertlm evaluate judge" in complaint("plot", "judge", "real.txt")
    Path("c.json").write_text('{"nll": 1}', encoding="utf-8")
    assert complaint("plot", "frontier", "c.json") == "c.json: expected a result of insertlm evaluate frontier"
    write_record("d.json", "ILM", points=[])
    assert "nothing to draw" in complaint("plot", "frontier", "d.json")


@pytest.mark.parametrize(
    ("picture", "record", "line"),
    [
        ("frontier", '{"points": []}', "Object missing required field `label`"),
        ("time", '{"points": 5, "label": "a", "evaluator": "e"}', "Expected `array`, got `int` - at `$.points`"),
        ("frontier", '{"points": [{}], "label": "a", "evaluator": "e"}', "Object missing required field `settings`"),
        ("judge", '{"rubrics": {}, "label": "a", "judge": "j"}', "Expected `object` of length >= 1"),
        ("judge", '{"rubrics": {"x": {}}, "label": "a", "judge": "j"}', "Object missing required field `score`"),
        ("judge", '{"rubrics": {"x": {"score": NaN, "error": 0}}, "label": "a", "judge": "j"}', "not JSON"),
    ],
)
def test_what_only_resembles_a_result_is_named(complaint: Run, picture: str, record: str, line: str) -> None:
    Path("x.json").write_text(record)
    told = complaint("plot", picture, "x.json")
    assert told.startswith(f"x.json: {line}")
    assert "expected a result of insertlm evaluate" in told
