"""lm-evaluation-harness runs our models: its own code, on tasks of a few lines that need no connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from harness_tasks import TASKS, save_run, save_tasks

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'insertlm[lm-eval]'")

import lm_eval
from lm_eval.tasks import TaskManager

from insertlm.core.errors import InsertlmError
from insertlm.evaluation import lm_eval_model
from insertlm.evaluation.lm_eval_model import InsertlmLM
from insertlm.families.base import Family
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods
from insertlm.inference.score import Completion


def log_likelihood(family: Family, given: list[int], target: list[int], effort: Effort) -> Estimate:
    [estimate] = log_likelihoods(family, [Completion.behind(given, target)], effort)
    return estimate


class Asked(NamedTuple):
    """What the harness hands over."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Of models by family."""

    def make(name: str = "ilm") -> Path:
        return save_run(tmp_path_factory.mktemp(name), name)

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path]) -> Path:
    return make_run()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def own_data_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


# --- The harness itself


def test_the_harness_evaluates_an_ilm(run: Path, tasks: Path) -> None:
    found = lm_eval.simple_evaluate(
        model="insertlm",
        model_args=f"pretrained={run},orders=4,states=5",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    results, config = found["results"], found["config"]
    assert 0 <= results["choices"]["acc,none"] <= 1
    assert results["perplexity"]["word_perplexity,none"] > 1
    assert results["writing"]["exact_match,none"] == 0
    assert config["insertlm_likelihood"] == "partly exact, partly a lower bound"
    assert (config["insertlm_exact"], config["insertlm_bounds"]) == (6, 3)  # choices are short, whole texts long
    assert 0 < config["insertlm_bound_error_mean"] <= config["insertlm_bound_error_max"]
    lm = InsertlmLM(str(run), orders=4, states=5)
    [text] = (sample["arguments"][0][0] for sample in found["samples"]["perplexity"][:1])
    expected = log_likelihood(lm.model.family, [], lm.text_tokenizer.encode(text), lm.effort)
    [answer] = found["samples"]["perplexity"][0]["resps"][0]
    assert answer == pytest.approx(expected.value, abs=1e-4)


def test_the_models_of_the_harness_are_still_there() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("insertlm") is InsertlmLM
    assert get_model("dummy").__name__ == "DummyLM"


# --- Likelihoods


def test_a_likelihood_is_exact_or_the_bound_with_its_error(run: Path) -> None:
    for exact in (12, 0):
        lm = InsertlmLM(str(run), seed=3, exact=exact)
        pairs = [("The cat sat", " on the mat."), ("", "The dog"), ("The cat ", "sat on")]
        answers = lm.loglikelihood([Asked(pair) for pair in pairs])
        encode = lm.text_tokenizer.encode
        for (context, continuation), (value, greedy), estimate in zip(pairs, answers, lm.estimates, strict=True):
            given = encode(context.rstrip())
            target = encode(context + continuation)[len(given) :]
            assert 1 < len(target) <= 12
            assert estimate == log_likelihood(lm.model.family, given, target, Effort(exact, seed=3))
            assert value == estimate.value and estimate.exact == (exact > 0)
            assert greedy in (True, False)
        info = lm.get_model_info()
        assert info["insertlm_likelihood"] == ("exact" if exact else "lower bound")
        assert info.get("insertlm_effort") == (None if exact else Effort(0, seed=3)._asdict())


def test_an_interrupted_run_finds_what_is_done(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = InsertlmLM(str(run), exact=3)
    kept = list[tuple[Any, ...]]()
    monkeypatch.setattr(lm, "cache_hook", SimpleNamespace(add_partial=lambda *parts: kept.append(parts)))
    long = "The cat sat on the mat. " * 12
    asked = [Asked(("The dog",)), Asked((long,)), Asked(("",))]
    values = lm.loglikelihood_rolling(asked)
    pairs = lm.loglikelihood([Asked(("The", " cat"))])
    expected = [("loglikelihood_rolling", each.args, value) for each, value in zip(asked, values, strict=True)]
    assert kept == [*expected, ("loglikelihood", ("The", " cat"), pairs[0])]


def test_an_answer_does_not_depend_on_the_others(run: Path) -> None:
    asked = [Asked(("The cat", " sat")), Asked(("The cat", " on the mat, all of it.")), Asked(("dog", " dog"))]
    together = InsertlmLM(str(run)).loglikelihood(asked)
    assert together == [InsertlmLM(str(run)).loglikelihood([each])[0] for each in asked]
    few = InsertlmLM(str(run), batch_size="7").loglikelihood(asked)
    assert [value for value, _ in few] == pytest.approx([value for value, _ in together], abs=1e-5)


def test_what_the_model_would_write_is_greedy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = InsertlmLM(str(run), stop_threshold=0.0)
    given = lm.text_tokenizer.encode("The cat")
    assert lm._greedy([given, given], 5) == [[], []]
    assert InsertlmLM(str(run), stop_threshold=1.0)._greedy([given], 5) == [None]
    target = lm.text_tokenizer.encode("The cat sat on")[len(given) :]
    monkeypatch.setattr(lm, "_greedy", lambda contexts, most: [target for _ in contexts])
    answers = lm.loglikelihood([Asked(("The cat", " sat on")), Asked(("The cat", " sat"))])
    assert [greedy for _, greedy in answers] == [True, False]


def test_long_texts_are_cut_or_scored_in_pieces(run: Path) -> None:
    lm = InsertlmLM(str(run))
    assert lm.max_length == 40
    text = "The cat sat on the mat. " * 12
    ids = lm.text_tokenizer.encode(text)
    assert len(ids) > 80
    [whole] = lm.loglikelihood_rolling([Asked((text,))])
    parts = [log_likelihood(lm.model.family, [], ids[k : k + 40], lm.effort).value for k in range(0, len(ids), 40)]
    assert whole == pytest.approx(math.fsum(parts), abs=1e-9)
    given, target = lm._pair(text, "the dog")
    assert len(given) + len(target) == 40
    assert [*given, *target] == lm.text_tokenizer.encode(text + "the dog")[-40:]
    with pytest.raises(InsertlmError, match=r"a continuation has .* tokens; the model takes 40"):
        lm.loglikelihood([Asked(("The", text))])


def test_nothing_has_a_likelihood_too(run: Path) -> None:
    [value] = InsertlmLM(str(run)).loglikelihood_rolling([Asked(("",))])
    assert -100 < value < 0


@pytest.mark.parametrize("name", ["arm", "fill"])
def test_what_writes_from_the_left_is_exact(make_run: Callable[..., Path], name: str) -> None:
    lm = InsertlmLM(str(make_run(name)))
    pairs = [
        ("The cat", " sat"),
        ("", "The dog sat on the mat with the cat and the other dog."),
        ("The dog sat", " on"),
    ]
    answers = lm.loglikelihood([Asked(pair) for pair in pairs])
    [whole] = lm.loglikelihood_rolling([Asked((pairs[1][1],))])
    assert answers[1][0] == pytest.approx(whole, abs=1e-4)
    for pair, (value, _) in zip(pairs, answers, strict=True):
        completion = Completion.behind(*lm._pair(*pair))
        [[fill]] = lm.model.family.decisions([completion])  # type: ignore[operator]
        assert value == pytest.approx(fill.value, abs=1e-4)
    assert lm.get_model_info() == {"insertlm_likelihood": "exact"}
    assert isinstance(lm.generate_until([Asked(("The cat", {"until": ["."], "max_gen_toks": 3}))])[0], str)


@pytest.mark.parametrize("name", ["arm", "fill"])
def test_the_harness_evaluates_what_is_exact(make_run: Callable[..., Path], tasks: Path, name: str) -> None:
    found = lm_eval.simple_evaluate(
        model="insertlm",
        model_args=f"pretrained={make_run(name)}",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["config"]["insertlm_likelihood"] == "exact"
    assert found["results"]["perplexity"]["word_perplexity,none"] > 1


def test_an_mdm_has_a_bound_but_cannot_go_on(make_run: Callable[..., Path]) -> None:
    lm = InsertlmLM(str(make_run("mdm")))
    [(value, greedy)] = lm.loglikelihood([Asked(("The cat", " sat"))])
    assert value < 0 and not greedy
    with pytest.raises(InsertlmError, match="an mdm infills a known number of tokens"):
        lm.generate_until([Asked(("The cat", {"until": []}))])


def test_the_insertion_transformer_is_refused(make_run: Callable[..., Path]) -> None:
    with pytest.raises(InsertlmError, match="likelihoods: expected a model of the family ilm, arm, fill or mdm"):
        InsertlmLM(str(make_run("it"))).loglikelihood([Asked(("The cat", " sat"))])


def test_models_of_tasks_are_refused() -> None:
    with pytest.raises(InsertlmError, match="expected a model of text"):
        InsertlmLM("star-hard-mini")


# --- Writing


def test_writing_is_infilling_at_the_end(run: Path) -> None:
    lm = InsertlmLM(str(run), temperature=1.0, stop_threshold=0.7)
    contexts = ["The cat", "", "The dog sat "]
    asked = {"until": [], "max_gen_toks": 6}
    written = lm.generate_until([Asked((context, asked)) for context in contexts])
    for number, (context, text) in enumerate(zip(contexts, written, strict=True)):
        [expected] = lm.model.infill(f"{context}___", seed=number, temperature=1.0, stop_threshold=0.7, max_steps=6)
        assert text == expected.fills[0]


@pytest.mark.parametrize(
    ("until", "text", "kept"),
    [
        ([], "a. b\n", "a. b\n"),
        (["."], "a. b", "a"),
        (["\n", "."], "a. b\n", "a"),
        ([""], "ab", "ab"),
        (["c"], "ab", "ab"),
    ],
)
def test_texts_are_cut_at_the_first_end(until: list[str], text: str, kept: str) -> None:
    assert lm_eval_model._cut(text, until) == kept


def test_long_contexts_lose_their_beginning(run: Path) -> None:
    lm = InsertlmLM(str(run))
    text = "The cat sat on the mat. " * 9
    request = lm._blank(text, 10)
    assert text.endswith(request.text)
    assert len(lm.text_tokenizer.encode(request.text)) <= 30
    assert isinstance(lm.generate_until([Asked((text, {"until": ["."], "max_gen_toks": 10}))])[0], str)


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, 0.3),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
    ],
)
def test_the_task_says_whether_to_sample(run: Path, asked: dict[str, Any], temperature: float) -> None:
    settings, most, until = InsertlmLM(str(run), temperature=0.3)._settings({**asked, "until": "x"})
    assert (settings.temperature, settings.max_tokens, most, until) == (temperature, 256, 256, ["x"])


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_tasks_have_several_names_for_the_most_tokens(run: Path, name: str) -> None:
    settings, most, _ = InsertlmLM(str(run))._settings({name: 7, "num_beams": 1})
    assert (settings.max_tokens, most) == (7, 7)


def test_a_context_may_hold_anything(run: Path) -> None:
    lm = InsertlmLM(str(run))
    assert lm._blank("The\x0ccat\x85\tsat\n", 3).text == "The cat \tsat\n"
    text = "\U0001f389\u65e5" * 50  # it is cut inside of a character
    assert lm._blank(text, 1).text in text
    assert all(isinstance(text, str) for text in lm.generate_until([Asked((text, {"max_gen_toks": 1}))]))


def test_unknown_settings_are_refused(run: Path) -> None:
    with pytest.raises(InsertlmError, match="generation_kwargs: unknown num_beams; expected until"):
        InsertlmLM(str(run)).generate_until([Asked(("The", {"num_beams": 4}))])
    with pytest.raises(InsertlmError, match="temprature: unknown key"):
        InsertlmLM(str(run), temprature=1.0)
