"""NLL, entropy and length: against a plain loop, whatever the batch, and never computed twice."""

from __future__ import annotations

import math
import os
import socket
import string
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from insertlm.core.errors import InsertlmError
from insertlm.evaluation import evaluator as module
from insertlm.evaluation.evaluator import Evaluator, TextScore
from insertlm.evaluation.journal import Journal
from insertlm.evaluation.nll import Summary, score_texts, summarise

pytest.importorskip("transformers")

LETTERS = string.printable  # the vocabulary of the tiny model, behind three special tokens
Save = Callable[..., Path]
CPU = torch.device("cpu")
TEXTS = ["Once upon a time.", "a", "No! No! No! Yes, he said to the dog.", "aaaa", "x" * 200, "éé ok"]


def plain_loop(folder: Path, text: str, bos: int = 1, context: int = 64) -> TextScore:
    """One text, one token at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = [LETTERS.index(letter) + 3 if letter in LETTERS else 0 for letter in text]
    scored = ids[: context - 1]
    losses = []
    for place, token in enumerate(scored):
        with torch.no_grad():
            logits = model(torch.tensor([[bos, *scored[:place]]])).logits[0, -1]
        losses.append(-float(logits.log_softmax(-1)[token]))
    entropy = -sum(share * math.log(share) for share in (ids.count(token) / len(ids) for token in {*ids}))
    return TextScore(sum(losses) / len(losses), entropy, len(ids), len(losses))


def same(score: TextScore | None, expected: TextScore) -> None:
    assert score is not None
    assert score.nll == pytest.approx(expected.nll, abs=1e-5)
    assert score.entropy == pytest.approx(expected.entropy, abs=1e-9)
    assert (score.tokens, score.scored) == (expected.tokens, expected.scored)


@pytest.mark.parametrize("cells", [1, 3000, 1 << 28])
def test_scores_are_those_of_a_plain_loop(causal_model: Path, monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Whatever shares a batch with a text, and longer than the context or not."""
    monkeypatch.setattr(module, "_MOST_LOGITS", {"cpu": cells})
    scores = score_texts(TEXTS, Evaluator(str(causal_model), CPU), Journal())
    for text, score in zip(TEXTS, scores, strict=True):
        same(score, plain_loop(causal_model, text))


def test_a_batch_holds_as_many_texts_as_fit(causal_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_LOGITS", {"cpu": 100 * (len(LETTERS) + 3)})
    evaluator = Evaluator(str(causal_model), CPU)
    rows = [[5] * length for length in (24, 10, 200, 24, 0, 9, 24, 24)]
    assert list(evaluator._batches(rows)) == [[2], [0, 3, 6, 7], [1, 5]]


def test_an_evaluator_without_bos_starts_texts_with_eos(tmp_path: Path, save_model: Save) -> None:
    folder = save_model(tmp_path / "m", bos=None)
    [score] = score_texts(["a b"], Evaluator(str(folder), CPU), Journal())
    same(score, plain_loop(folder, "a b", bos=2))


def test_another_token_may_stand_in_front(causal_model: Path) -> None:
    evaluator = Evaluator(str(causal_model), CPU, "</s>")
    [score] = score_texts(["a b"], evaluator, Journal())
    same(score, plain_loop(causal_model, "a b", bos=2))
    assert evaluator.identity != Evaluator(str(causal_model), CPU).identity
    with pytest.raises(InsertlmError, match="its vocabulary has no token 'BOS'"):
        score_texts(["a b"], Evaluator(str(causal_model), CPU, "BOS"), Journal())


def test_an_evaluator_with_neither_is_refused(tmp_path: Path, save_model: Save) -> None:
    folder = save_model(tmp_path / "m", bos=None, eos=None)
    with pytest.raises(InsertlmError, match="no BOS and no EOS"):
        score_texts(["a"], Evaluator(str(folder), CPU), Journal())


def test_empty_texts_are_named_and_in_no_mean(causal_model: Path) -> None:
    evaluator, journal = Evaluator(str(causal_model), CPU), Journal()
    summary = summarise(score_texts(["", "a b", " \n", "\ud800"], evaluator, journal))
    assert summary.empty == [1, 3]
    assert (summary.count, summary.length.mean) == (4, 2.0)
    with pytest.raises(InsertlmError, match="all of 2 texts are empty"):
        summarise(score_texts(["", " "], evaluator, journal))


def test_means_by_text_and_by_token() -> None:
    scores = [TextScore(1.0, 0.5, 10, 10), None, TextScore(3.0, 1.5, 40, 30)]
    found = summarise(scores)
    assert isinstance(found, Summary)
    assert (found.nll, found.nll_by_token, found.entropy) == (2.0, 2.5, 1.0)
    assert found.nll_error == pytest.approx(1.0)
    assert found.entropy_error == pytest.approx(0.5)
    assert (found.cut, found.empty, found.length.mean) == (1, [2], 25.0)
    assert summarise(scores[:1]).nll_error == 0


# --- Going on


class StoppedError(Exception):
    pass


def test_a_second_call_goes_on_where_the_first_was_stopped(
    causal_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, texts = tmp_path / "j.jsonl", [*TEXTS, "a", ""]
    seen: list[int] = []

    def stop(done: int) -> None:
        if done == 4:
            raise StoppedError

    with pytest.raises(StoppedError), Journal(path) as journal:
        score_texts(texts, Evaluator(str(causal_model), CPU), journal, stop)
    assert len(path.read_bytes().splitlines()) == 3  # 7 different texts, and one that is there twice
    with Journal(path) as journal:
        resumed = score_texts(texts, Evaluator(str(causal_model), CPU), journal, seen.append)
    assert seen == [4, 5, 6, 7, 8]
    whole = score_texts(texts, Evaluator(str(causal_model), CPU), Journal())
    for one, other in zip(resumed, whole, strict=True):
        if other is None:
            assert one is None
        else:
            same(one, other)
    monkeypatch.setattr(module, "load_pretrained", no_model)
    with Journal(path) as journal:  # all is there: no model is needed
        assert score_texts(texts, Evaluator(str(causal_model), CPU), journal) == resumed


def no_model(*_: Any) -> Iterator[Any]:
    raise AssertionError("the model was loaded")


def test_another_evaluator_in_the_same_place_scores_anew(tmp_path: Path, save_model: Save) -> None:
    folder = save_model(tmp_path / "m")
    first = Evaluator(str(folder), CPU).identity
    os.utime(folder / "model.safetensors", (time.time() + 9, time.time() + 9))
    assert Evaluator(str(folder), CPU).identity != first
    assert Evaluator("org/one", CPU).identity != Evaluator("org/two", CPU).identity


def test_a_model_that_has_lost_its_mind(tmp_path: Path, save_model: Save) -> None:
    from safetensors.torch import load_file, save_file

    weights = save_model(tmp_path / "m") / "model.safetensors"
    save_file({name: value * math.nan for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    assert "gives a text probability 0 or NaN; expected an evaluator with sound weights" in fails(str(tmp_path / "m"))


# --- Evaluators that cannot be loaded


def fails(name: str) -> str:
    with pytest.raises(InsertlmError) as error:
        score_texts(["a"], Evaluator(name, CPU), Journal())
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_no_such_folder(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "~/none-at-all", "a/b/c", "none.gguf", ""):
        assert "no model there; expected a folder, a .gguf file or a name on the hub" in fails(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "cannot be loaded: expected a causal language model with its tokenizer" in fails(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    assert "cannot be loaded: expected a causal language model with its tokenizer" in fails(str(tmp_path))
    (tmp_path / "n.gguf").write_bytes(b"")
    assert f"several models; expected the name of one, such as {tmp_path / 'm.gguf'}" in fails(str(tmp_path))


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once, not after the client's retries."""

    def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(module, "getproxies", dict)
    start = time.monotonic()
    message = fails("nobody/no-such-model")
    assert time.monotonic() - start < 5
    assert "hf download nobody/no-such-model; HF_TOKEN for gated ones" in message
    assert module._hub_is_away()
    monkeypatch.setattr(module, "getproxies", lambda: {"https": "proxy:3128"})
    assert not module._hub_is_away()
    monkeypatch.setattr(module, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert not module._hub_is_away()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, causal_model: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert fails(str(causal_model)) == "evaluating texts needs transformers: pip install 'insertlm[text]'"


@pytest.mark.slow
@pytest.mark.skipif("INSERTLM_EVALUATOR" not in os.environ, reason="INSERTLM_EVALUATOR: a folder or GGUF file")
def test_a_real_evaluator() -> None:
    """Padding, sorting and batching change nothing, and it prefers English to the same words in disorder."""
    english = "Once upon a time, there was a little girl named Lily. She loved to play with her red ball in the park."
    evaluator = Evaluator(os.environ["INSERTLM_EVALUATOR"], CPU)
    texts = [english, " ".join(sorted(english.split())), "The dog ran."]
    first, second, third = score_texts(texts, evaluator, Journal())
    [alone] = score_texts([texts[2]], evaluator, Journal())
    assert first and second and third and alone
    assert first.nll < 2.5
    assert second.nll > 4
    assert third.nll == pytest.approx(alone.nll, abs=1e-3)


def test_the_entropy_of_a_text_that_is_cut_is_that_of_all_of_it(causal_model: Path) -> None:
    [score] = score_texts(["x" * 100 + "y" * 100], Evaluator(str(causal_model), CPU), Journal())
    assert score is not None
    assert score.scored == 63
    assert score.entropy == pytest.approx(math.log(2))


def test_a_journal_keeps_evaluators_apart(causal_model: Path) -> None:
    journal = Journal()
    evaluators = [Evaluator(str(causal_model), CPU, bos) for bos in (None, "</s>")]
    plain, other = (score_texts(["a b"], evaluator, journal) for evaluator in evaluators)
    assert plain != other


def test_bfloat16_is_another_evaluator_that_is_nearly_the_same(causal_model: Path) -> None:
    exact, rounded = Evaluator(str(causal_model), CPU), Evaluator(str(causal_model), CPU, bf16=True)
    assert exact.identity != rounded.identity
    journal = Journal()
    [one], [other] = score_texts(["He said: no!"], exact, journal), score_texts(["He said: no!"], rounded, journal)
    assert one is not None and other is not None
    assert one.nll != other.nll
    assert one.nll == pytest.approx(other.nll, rel=0.05)
