"""The judge: what it is asked, how its answers are read, and an endpoint with a real server behind it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.evaluation import judge as module
from insertlm.evaluation.endpoint import Endpoint
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.judge import LocalJudge, judge_texts, summarise_verdicts
from insertlm.evaluation.rubrics import RUBRICS, SYSTEM, parse_score, prompt

# --- Rubrics and answers


def test_there_are_the_six_rubrics_of_the_paper() -> None:
    names = ["coherence", "consistency", "fluency", "spelling accuracy", "grammaticality", "non-redundancy"]
    assert list(RUBRICS) == names
    assert all(len({*rubric.levels}) == 5 for rubric in RUBRICS.values())


def test_a_question_has_all_parts_in_order() -> None:
    question = prompt("A {strange} text.", RUBRICS["fluency"])
    parts = ["###Task Description:", "###The instruction to evaluate:", "###Response to evaluate:\nA {strange} text.\n"]
    parts += ["###Score Rubrics:\n[Does", *(f"\nScore {score}: " for score in range(1, 6)), "###Feedback: "]
    places = [question.index(part) for part in parts]
    assert places == sorted(places)
    assert question.endswith("###Feedback: ")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good. [RESULT] 4", 4),
        ("Good. [RESULT] (4)", 4),
        ("[RESULT]5", 5),
        ("[RESULT]: **2**.", 2),
        ("As [RESULT] 1 says … [RESULT] 3\n", 3),
        ("[RESULT] 4/5", 4),
        ("[RESULT] 4. It is good.", 4),
        ("[RESULT] 3.5", None),
        ("[RESULT] 45", None),
        ("[RESULT] 0", None),
        ("[RESULT] 6", None),
        ("[RESULT] four", None),
        ("[RESULT]", None),
        ("4", None),
        ("", None),
    ],
)
def test_scores_in_answers(answer: str, score: int | None) -> None:
    assert parse_score(answer) == score


class Parrot:
    """Answers from a list, in turn."""

    identity = "parrot"

    def __init__(self, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = answers

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        for number, question in enumerate(questions):
            self.asked.append(question)
            yield number, self._answers[number % len(self._answers)]


def test_unparsable_answers_are_counted_and_kept(tmp_path: Path) -> None:
    texts = ["One.", " ", "Two.", "Three."]
    judge = Parrot("[RESULT] 2", "No idea.", "[RESULT] 4")
    with Journal(tmp_path / "j.jsonl") as journal:
        scores = judge_texts(texts, judge, ["fluency"], journal)
    assert scores == {"fluency": [2, None, None, 4]}
    verdict = summarise_verdicts(texts, scores)["fluency"]
    assert (verdict.score, verdict.error, verdict.unparsable) == (3.0, 1.0, [3])
    assert verdict.shares == [0, 50, 0, 50, 0]
    lines = [json.loads(line) for line in (tmp_path / "j.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["answer"] for line in lines] == ["[RESULT] 2", "No idea.", "[RESULT] 4"]
    with Journal(tmp_path / "j.jsonl") as journal:  # nothing is asked twice, another rubric is
        seen: list[int] = []
        judge_texts(texts, judge, ["fluency", "coherence"], journal, seen.append)
    assert len(judge.asked) == 6
    assert seen == [5, 6, 7, 8]


def test_no_score_at_all() -> None:
    verdict = summarise_verdicts(["a"], judge_texts(["a"], Parrot("?"), ["fluency"], Journal()))["fluency"]
    assert (verdict.score, verdict.unparsable) == (None, [1])


# --- A local model


def test_a_local_judge_answers_greedily_whatever_is_asked_beside(
    causal_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(module, "MOST_TOKENS", 5)
    questions = ["Is it good?", "Why?", "Yes or no, my dear?"]
    found = dict(LocalJudge(str(causal_model), torch.device("cpu")).answers(questions))
    model = AutoModelForCausalLM.from_pretrained(causal_model)
    tokenizer = AutoTokenizer.from_pretrained(causal_model)
    for number, question in enumerate(questions):
        ids = tokenizer(f"{SYSTEM}\n\n{question}")["input_ids"]
        written: list[int] = []
        while len(written) < 5 and 2 not in written:
            with torch.no_grad():
                written.append(int(model(torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
        assert found[number] == tokenizer.decode(written, skip_special_tokens=True)


# --- An endpoint

Reply = tuple[int, bytes]


class Server:
    """Answers as OpenAI's chat completions do, or with what `replies` holds for the first requests."""

    def __init__(self) -> None:
        self.replies: list[Reply | None] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.delay = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **body})
                outer.keys.append(self.headers["Authorization"])
                time.sleep(outer.delay)
                reply = outer.replies.pop(0) if outer.replies else answer("Fine. [RESULT] 4")
                if reply is None:  # hangs up
                    self.close_connection = True
                    return
                with suppress(BrokenPipeError):  # who asked has lost patience
                    self.send_response(reply[0])
                    self.end_headers()
                    self.wfile.write(reply[1])

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def answer(content: str | None) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


@pytest.fixture
def endpoint(server: Server) -> Callable[..., Endpoint]:
    def build(**options: Any) -> Endpoint:
        return Endpoint(server.url, "a-judge", **{"pause": 0.001, "tries": 3, "together": 1, **options})

    return build


def test_what_is_sent(server: Server, endpoint: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert list(endpoint().answers(["Well?"])) == [(0, "Fine. [RESULT] 4")]
    [request] = server.requests
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "a-judge")
    assert (request["temperature"], request["max_tokens"]) == (0, 1000)
    assert request["messages"] == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Well?"}]
    assert server.keys == ["Bearer sesame"]


def test_without_a_key_none_is_sent(server: Server) -> None:
    list(Endpoint(f"{server.url}/chat/completions/", "m").answers(["Well?"]))
    assert server.keys == [None]
    assert server.requests[0]["path"] == "/v1/chat/completions"


def test_many_questions_are_asked_at_once(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.delay = 0.5
    start = time.monotonic()
    found = dict(endpoint(together=8).answers([f"{number}?" for number in range(16)]))
    assert time.monotonic() - start < 4  # one after the other: 8
    assert sorted(found) == list(range(16))


@pytest.mark.parametrize(
    "trouble",
    [(503, b"busy"), (429, b'{"error": {"message": "slow down"}}'), (200, b"<html>"), (200, b"{}"), (200, b"[]"), None],
)
def test_what_may_pass_is_tried_again(server: Server, endpoint: Callable[..., Endpoint], trouble: Reply | None) -> None:
    server.replies = [trouble, trouble]
    assert list(endpoint().answers(["Well?"])) == [(0, "Fine. [RESULT] 4")]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ((503, b"very\nbusy"), "no answer after 3 tries: 503 very busy; finished judgements are kept, run it again"),
        ((200, b"{}"), "no answer after 3 tries: its reply is not a chat completion"),
        ((200, b"<html>"), "no answer after 3 tries: Expecting value"),
        (None, "no answer after 3 tries: Server disconnected"),
    ],
)
def test_what_does_not_pass(
    server: Server, endpoint: Callable[..., Endpoint], trouble: Reply | None, message: str
) -> None:
    server.replies = [trouble] * 3
    with pytest.raises(InsertlmError, match=message):
        list(endpoint().answers(["Well?"]))


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ((401, b'{"error": {"message": "bad key"}}'), "401 bad key; expected the key .* variable OPENAI_API_KEY"),
        ((404, b""), "404 Not Found; expected a URL that ends before /chat/completions, and a --model"),
        ((400, b'{"error": "x"}'), '400 {"error": "x"}; expected a server that answers like OpenAI'),
    ],
)
def test_a_refusal_is_not_tried_again(
    server: Server, endpoint: Callable[..., Endpoint], trouble: Reply, message: str
) -> None:
    server.replies = [trouble]
    with pytest.raises(InsertlmError, match=message):
        list(endpoint().answers(["Well?"]))
    assert len(server.requests) == 1


def test_a_server_that_is_too_slow(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.delay = 0.5
    with pytest.raises(InsertlmError, match="no answer after 2 tries: timed out"):
        list(endpoint(timeout=0.05, tries=2).answers(["Well?"]))


def test_nobody_there() -> None:
    with pytest.raises(InsertlmError, match=r"127.0.0.1:9/chat/completions: no answer after 2 tries: .*refused"):
        list(Endpoint("http://127.0.0.1:9", "m", pause=0.001, tries=2).answers(["Well?"]))
    for url in ("localhost:8000", "ftp://x", "http://", "http://a:b"):
        with pytest.raises(InsertlmError, match="expected a URL such as http://localhost:8000/v1"):
            Endpoint(url, "m")


def test_a_redirect_is_a_refusal(server: Server, endpoint: Callable[..., Endpoint]) -> None:
    server.replies = [(302, b"")]
    with pytest.raises(InsertlmError, match="302 Found; expected a server"):
        list(endpoint().answers(["Well?"]))


# --- From the command line


def test_without_httpx_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("One.\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "insertlm.evaluation.endpoint")
    assert main(["evaluate", "judge", str(tmp_path / "texts.txt"), "--endpoint", "http://localhost:1/v1"]) == 2
    line = "insertlm: a judge behind an endpoint needs httpx: pip install 'insertlm[text]'\n"
    assert capsys.readouterr().err == line


def test_the_command_goes_on_where_a_failure_stopped_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("One.\n\nTwo.\n", encoding="utf-8")
    monkeypatch.setattr(Endpoint.__init__, "__kwdefaults__", {"timeout": 5.0, "tries": 1, "pause": 0.0, "together": 1})
    call = ["evaluate", "judge", "texts.txt", "--endpoint", server.url, "--model", "org/a-judge", "--rubric", "fluency"]
    call += ["--rubric", "coherence"]
    server.replies = [answer("[RESULT] 5"), answer("Nothing."), (500, b"boom")]
    assert main(call) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no answer after 1 tries: 500 boom; finished judgements are kept, run it again" in line
    assert main(call) == 0
    out = capsys.readouterr().out
    assert len(server.requests) == 5
    record = json.loads(Path("texts-judge-a-judge.json").read_text(encoding="utf-8"))
    assert (record["count"], record["empty"], record["judge"]) == (3, [2], "org/a-judge")
    assert record["rubrics"]["fluency"] == {"score": 5.0, "error": 0.0, "shares": [0, 0, 0, 0, 100], "unparsable": [3]}
    assert record["rubrics"]["coherence"]["score"] == 4.0
    assert "3 texts, 1 empty and not judged" in out
    assert main([*call[:-1], "beauty"]) == 2
    assert "expected one of coherence, consistency" in capsys.readouterr().err
