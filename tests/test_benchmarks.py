"""The scripts in benchmarks/ run, on tiny models; jobs go side by side and can be stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import filling
import generation
import mdm_lengths
import pretrained_step
import prompted_infilling
import pytest
import side_by_side
import tokenise
import torch
import train_step
import zebra_rate
from side_by_side import Job

import insertlm
from insertlm.cli import main as cli
from insertlm.nn import losses

# --- Speed


@pytest.fixture
def same_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"device", "torch", "insertlm", "commit"} <= found.keys()
    assert [found[key] for key in ("task", "family", "layers", "width")] == ["star-easy", "ilm", 1, 64]
    return found


TINY_MODEL = ["--task", "star-easy", "--layers", "1", "--width", "64", "--device", "cpu"]


@pytest.mark.usefixtures("same_precision")
def test_training_steps_are_timed_by_the_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *TINY_MODEL, "--batch-size", "4", "--steps", "1", "--warmup", "1"])
    train_step.main()
    found = figures(capsys)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--deterministic"])
    train_step.main()
    again = figures(capsys)  # on a CPU the same bits in any case
    assert again["deterministic"] and again["weights"] == found["weights"]
    # A row of star-easy has 28 tokens that are given and up to 8 others.
    assert 4 * 28 <= found["rows_per_step"] <= 4 * 36
    assert found["microseconds_per_row"] == pytest.approx(
        1000 * found["milliseconds"] / found["rows_per_step"], rel=0.01
    )


@pytest.mark.usefixtures("same_precision")
def test_a_pretrained_size_is_timed_in_variants(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", dict(losses._CHUNK_ELEMENTS))
    tiny = ["--layers", "1", "--vocabulary", "200", "--rows", "150", "--warmup", "1", "--steps", "1"]
    variants = ["--residual", "float32", "bfloat16", "--chunk", "13"]
    monkeypatch.setattr(sys, "argv", ["x", *tiny, *variants, "--no-compile", "--profile", "--device", "cpu"])
    pretrained_step.main()
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [figures["residual"] for figures in found] == ["float32", "bfloat16"]
    for figures in found:
        assert {"device", "torch", "insertlm", "commit", "rows_per_second", "peak_gigabytes"} <= figures.keys()
        assert 75 <= figures["rows_per_step"] <= 300
        assert 5 < figures["loss"] < 15
    assert "insertlm::slot_scores_backward" in printed.err


def test_puzzles_are_counted_by_the_second(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--count", "50"])
    zebra_rate.main()
    found = json.loads(capsys.readouterr().out)
    assert {"device", "torch", "insertlm", "commit"} <= found.keys()
    assert found["split"] == "train"
    assert 0 < found["per_second"] <= found["per_core_second"] * found["cores"] * 2
    assert found["prefix_tokens"] <= found["longest_prefix"] <= 350


def test_lengths_that_are_told_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"model.layers": 1, "task.train": 50, "task.validation": 20, "train.steps": 1, "train.validate_every": 0}
    changes = [word for key, value in tiny.items() for word in (f"--{key}", str(value))]
    run = str(tmp_path / "run")
    assert cli.main(["train", "recipes/star_medium/mdm.yaml", "--run", run, "--model.preset", "mini", *changes]) == 0
    capsys.readouterr()
    mdm_lengths.main([run, "--count", "20", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert {"device", "torch", "insertlm", "commit"} <= found.keys()
    assert found["graphs"] == 20
    assert 0 < found["shorter"] + found["longer"] <= 20 - found["exact"]  # who has learnt nothing knows no length
    model = insertlm.load(run, "cpu")
    examples = list(model.recipe.task.examples("validation", 20))
    told = mdm_lengths.written(model, examples, "margin", told=True)
    assert [len(text) for text in told] == [len(example.target) for example in examples]


def test_tokenising_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 50)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "a.txt"), "--size", "270", "--repetitions", "2"])
    tokenise.main()
    found = json.loads(capsys.readouterr().out)
    assert found["vocabulary"] == 270
    assert found["tokens"] >= 50
    assert found["megabytes_per_second"] > 0


@pytest.mark.parametrize(("cache", "steps"), [([], range(28, 57)), (["--prefix-lm"], [26, *range(2, 31)])])
def test_generation_is_timed_by_the_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: list[str], steps: Sequence[int]
) -> None:
    """All rows go through the network in every one of 29 steps; with a cache, those of the prefix once."""
    monkeypatch.setattr(sys, "argv", ["x", *TINY_MODEL, "--batch-size", "2", *cache])
    generation.main()
    found = figures(capsys)
    assert (found["insertions"], found["rows"]) == (2 * 28, 2 * sum(steps))
    assert found["microseconds_per_row"] > 0


@pytest.mark.parametrize("way", [[], ["--in-step", "--texts", "2"]])
def test_filling_is_timed_by_the_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: list[str]
) -> None:
    small = ["--preset", "mini", "--vocabulary", "50", "--tokens", "12", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["x", *small, *way])
    filling.main()
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == 6 * found["texts"]
    assert found["tokens_per_second"] > 0
    assert found["sentence_seconds"] > 0


# --- A prompted model


@pytest.mark.parametrize(
    ("answer", "pieces", "fills"),
    [
        ("Tom ran home and slept.", ["Tom ", " and slept."], ["ran home"]),
        ("Sure! Here it is: Tom ran home and slept. Good luck!", ["Tom ", " and slept."], ["ran home"]),
        ("My Tom ran and so he slept.", ["Old Tom ", " and so he slept."], ["ran"]),  # the nearest word is enough
        ("Tom went.", ["Tom ", " and slept."], [None]),
        ("Tom and slept.", ["Tom ", " and slept."], [None]),
        ("First a cat sat. Then it ran off.", ["First a ", " sat. Then it ", ""], ["cat", "ran off."]),
        ("All of it.", ["", " it."], ["All of"]),
        ("b c a d", ["a ", " b ", " c"], [None, None]),  # in another order
    ],
)
def test_what_a_prompted_model_wrote_between_the_pieces(
    answer: str, pieces: list[str], fills: list[str | None]
) -> None:
    assert prompted_infilling.between(answer, pieces) == fills


@pytest.mark.parametrize(
    ("answer", "blanks", "fills"),
    [
        ("1. the cat\n2) a dog", 2, ["the cat", "a dog"]),
        ("2. a dog", 2, [None, "a dog"]),
        ("the cat\nand more", 1, ["the cat"]),
        ("the cat", 2, [None, None]),
        ("", 1, [None]),
    ],
)
def test_what_a_prompted_model_wrote_on_numbered_lines(answer: str, blanks: int, fills: list[str | None]) -> None:
    assert prompted_infilling.numbered(answer, blanks) == fills


def test_a_prompted_model_writes_what_the_evaluation_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model that is not trained, answers have no fills."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "cat": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} </s> {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=3, eos_token_id=1, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "chat")
    file, out = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    lines = [{"pieces": ["A ", f" ran {n}."], "removed": ["dog"], "text": f"A dog ran {n}."} for n in range(3)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    prompted_infilling.main([str(file), "--model", str(tmp_path / "chat"), "--out", str(out), "--device", "cpu"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["text"] for record in records] == [line["text"] for line in lines]  # in the order of the set
    assert all(record["output"] == f"A {record['fills'][0]} ran {n}." for n, record in enumerate(records))
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["evaluate", "infilling", "out.jsonl", "--evaluator", "none", "--device", "cpu"]) == 0
    assert "ROUGE-L" in capsys.readouterr().out


# --- Side by side


class Ended(dict[str, str | None]):
    """What became of each job."""

    def __call__(self, job: Job, problem: str | None) -> None:
        assert job.name not in self
        self[job.name] = problem


def shell(folder: Path, name: str, *lines: str) -> Job:
    return Job(name, [["sh", "-c", line] for line in lines], folder / f"{name}.log")


def test_a_job_goes_on_until_a_command_fails(tmp_path: Path) -> None:
    ended = Ended()
    jobs = [
        shell(tmp_path, "good", "echo one", "echo two >&2"),
        shell(tmp_path, "bad", "echo one", "echo why; echo; exit 3", "echo never"),
        shell(tmp_path, "killed", "kill -KILL $$"),
        shell(tmp_path, "silent", "exit 1"),
    ]
    assert side_by_side.run(jobs, 2, ended)
    assert ended == {"good": None, "bad": "why", "killed": "killed by SIGKILL", "silent": "$ sh -c 'exit 1'"}
    assert (tmp_path / "good.log").read_text() == "$ sh -c 'echo one'\none\n$ sh -c 'echo two >&2'\ntwo\n"
    assert "never" not in (tmp_path / "bad.log").read_text()


def test_as_many_jobs_as_asked_run_at_once(tmp_path: Path) -> None:
    """Each waits for the other: alone, neither would end."""
    ended = Ended()
    a, b = tmp_path / "a", tmp_path / "b"
    wait = "touch {}; until [ -e {} ]; do sleep 0.01; done"
    jobs = [shell(tmp_path, "a", wait.format(a, b)), shell(tmp_path, "b", wait.format(b, a))]
    assert side_by_side.run(jobs, 2, ended)
    assert ended == {"a": None, "b": None}


def test_one_at_a_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    jobs = [shell(tmp_path, name, f"echo {name} >> {trace}; sleep 0.05; echo {name} >> {trace}") for name in "abc"]
    assert side_by_side.run(jobs, 1, Ended())
    assert trace.read_text().split() == list("aabbcc")


def test_what_follows_a_first_command_takes_no_place(tmp_path: Path) -> None:
    ended, there = Ended(), tmp_path / "there"
    wait = f"until [ -e {there} ]; do sleep 0.01; done"
    jobs = [shell(tmp_path, "a", "true", wait), shell(tmp_path, "b", f"touch {there}")]
    assert side_by_side.run(jobs, 1, ended, until=time.monotonic() + 20)
    assert ended == {"a": None, "b": None}


def test_a_job_that_is_warm_before_its_turn_is_held_until_then(tmp_path: Path) -> None:
    """b would be done long before a, and c has to wait until b no longer does."""
    ended, warm, trace = Ended(), tmp_path / "warm", tmp_path / "trace"
    a = shell(tmp_path, "a", f"until [ -e {warm} ]; do sleep 0.01; done; sleep 1.5; echo a >> {trace}")
    b = shell(tmp_path, "b", f"touch {warm}; for _ in 1 2 3 4 5 6 7 8; do sleep 0.1; done; echo b >> {trace}")
    c = shell(tmp_path, "c", f"echo c >> {trace}")
    assert side_by_side.run([a, replace(b, warm=warm.exists), c], 1, ended, until=time.monotonic() + 30, ahead=1)
    assert ended == {"a": None, "b": None, "c": None}
    assert trace.read_text().split() in (["a", "b", "c"], ["a", "c", "b"])


def test_jobs_get_warm_one_after_the_other(tmp_path: Path) -> None:
    """b is held, c never gets warm, so d is not even started while a runs."""
    ended, started = Ended(), [tmp_path / name for name in "bcd"]
    a = shell(tmp_path, "a", f"until [ -e {started[1]} ]; do sleep 0.01; done; sleep 0.5; [ ! -e {started[2]} ]")
    early = [shell(tmp_path, file.name, f"touch {file}; exec sleep 60") for file in started]
    warm = [replace(job, warm=file.exists) for job, file in zip(early, started, strict=True)]
    jobs = [a, warm[0], early[1], warm[2]]

    def stop(job: Job, problem: str | None) -> None:
        ended(job, problem)
        os.kill(os.getpid(), signal.SIGTERM)

    assert not side_by_side.run(jobs, 1, stop, ahead=3)
    assert ended == {"a": None}


def alive(file: Path) -> bool:
    """Whether the process is there whose number is in the file."""
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP"])
def test_a_signal_stops_the_children_and_nothing_else(tmp_path: Path, number: str) -> None:
    ended, pid = Ended(), tmp_path / "pid"
    before = signal.getsignal(signal.SIGTERM)
    jobs = [shell(tmp_path, "a", f"echo $$ > {pid}; kill -{number} $PPID; exec sleep 60"), shell(tmp_path, "b", "true")]
    assert not side_by_side.run(jobs, 1, ended)
    assert ended == {}
    assert not alive(pid)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP"])
def test_what_a_terminal_sends_asks_the_children_to_end_and_does_not_interrupt_them(
    tmp_path: Path, number: str
) -> None:
    """It goes to all processes of the terminal."""
    heard = tmp_path / "heard"
    script = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open({str(heard)!r}, "w").close(), sys.exit()))
os.kill(os.getpid(), signal.{number})
os.kill(os.getppid(), signal.{number})
time.sleep(60)
"""
    assert not side_by_side.run([Job("a", [[sys.executable, "-c", script]], tmp_path / "log")], 1, Ended())
    assert heard.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a process that is killed")
def test_children_that_are_held_end_when_we_are_killed(tmp_path: Path) -> None:
    pids = [tmp_path / "a.pid", tmp_path / "b.pid"]
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(side_by_side.__file__).parent)!r})
import side_by_side
pids = [Path(name) for name in {[str(pid) for pid in pids]!r}]
jobs = [
    side_by_side.Job(pid.name, [["sh", "-c", f"echo $$ > {{pid}}; exec sleep 60"]], pid.with_suffix(".log"), pid.exists)
    for pid in pids
]
side_by_side.run(jobs, 1, print, ahead=1)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: all(pid.is_file() and pid.read_text().strip() for pid in pids))
        wait_for(lambda: " T " in Path("/proc", pids[1].read_text().strip(), "stat").read_text())
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(alive, pids)))


def wait_for(what: Callable[[], bool], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_child_that_is_stopped_with_us_has_not_failed(tmp_path: Path) -> None:
    """As when a whole group of processes is killed."""
    ended = Ended()
    assert not side_by_side.run([shell(tmp_path, "a", "kill -TERM $PPID $$")], 1, ended)
    assert ended == {}


def test_the_deadline_stops_the_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not want to."""
    monkeypatch.setattr(side_by_side, "_PATIENCE", 0.1)
    ended, pids = Ended(), [tmp_path / "a.pid", tmp_path / "b.pid"]
    jobs = [
        shell(tmp_path, "a", f"echo $$ > {pids[0]}; exec sleep 60"),
        shell(tmp_path, "b", f"trap '' TERM; echo $$ > {pids[1]}; while :; do sleep 0.02; done"),
        shell(tmp_path, "c", "true"),
    ]
    assert not side_by_side.run(jobs, 2, ended, until=time.monotonic() + 0.5)
    assert ended == {}
    assert [alive(pid) for pid in pids] == [False, False]


def test_children_that_are_held_are_asked_to_end_too(tmp_path: Path) -> None:
    warm, heard = tmp_path / "warm", tmp_path / "heard"
    waits = shell(tmp_path, "b", f"trap 'touch {heard}; exit' TERM; touch {warm}; while :; do sleep 0.02; done")
    jobs = [shell(tmp_path, "a", "exec sleep 60"), replace(waits, warm=warm.exists)]
    assert not side_by_side.run(jobs, 1, Ended(), until=time.monotonic() + 1, ahead=1)
    assert heard.exists()


def test_children_are_stopped_if_we_fail(tmp_path: Path) -> None:
    def fail(job: Job, problem: str | None) -> None:
        raise OSError("disk full")

    pid = tmp_path / "pid"
    wait = f"until [ -e {pid} ]; do sleep 0.01; done"
    jobs = [shell(tmp_path, "a", f"echo $$ > {pid}; exec sleep 60"), shell(tmp_path, "b", wait)]
    with pytest.raises(OSError, match="disk full"):
        side_by_side.run(jobs, 2, fail)
    assert not alive(pid)
