"""Figures over fills agree with what can be counted by hand; intervals and variation behave as they are described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.fills import BINS, _by_chance, _variation, measure_fills
from insertlm.evaluation.infills import Infilled
from insertlm.evaluation.intervals import estimate
from insertlm.evaluation.oracle import gaps, read_result


def line(removed: Sequence[str], fills: Sequence[str] | None, **more: object) -> Infilled:
    return Infilled([""] * (len(removed) + 1), [*removed], "", "", None if fills is None else [*fills], **more)  # type: ignore[arg-type]


# --- Lengths


def test_lengths_are_counted_in_words_of_blanks_and_of_texts() -> None:
    found = measure_fills([line(["a b", "c"], ["a b c d", ""]), line(["one two three"], ["one two"])])
    assert found is not None
    assert (found.texts, found.blanks, found.complete, found.speed) == (2, 3, None, None)
    assert (found.lengths.written, found.lengths.removed) == (6 / 3, 6 / 3)
    assert found.lengths.ratio.value == 1
    assert found.lengths.mean_ratio.value == pytest.approx((4 / 3 + 2 / 3) / 2)
    # Written 4, 0, 2 and removed 2, 1, 3 words: only 2 is in both.
    assert found.lengths.variation == pytest.approx(2 / 3)


lengths = st.lists(st.integers(0, 200), min_size=1, max_size=20)


@given(lengths, lengths)
def test_variation_is_a_distance(ours: list[int], theirs: list[int]) -> None:
    assert _variation(ours, ours) == 0
    assert _variation(ours, theirs) == pytest.approx(_variation(theirs, ours))
    assert 0 <= _variation(ours, theirs) <= 1 + 1e-9
    assert _variation(ours * 3, theirs) == pytest.approx(_variation(ours, theirs))


def test_bins_hold_what_their_names_say() -> None:
    for low, high in zip(BINS, [*BINS[1:], 1000], strict=True):
        assert _variation([low], [high - 1]) == 0
        assert low == 0 or _variation([low], [low - 1]) == 1


def test_chance_is_what_two_samples_of_one_distribution_have() -> None:
    rng = np.random.default_rng(0)
    pairs = [rng.geometric(0.1, (2, 200)).tolist() for _ in range(50)]
    real = np.mean([_variation(*pair) for pair in pairs])
    assert _by_chance(*pairs[0]) == pytest.approx(real, rel=0.15)


# --- Words in common


def test_rouge_and_bleu_by_hand() -> None:
    [same, other] = [line(["the cat sat on the mat"], [fill]) for fill in ("the cat sat on the mat", "a cat lay")]
    found = measure_fills([same])
    assert found is not None
    assert (found.overlap.rouge1.value, found.overlap.rouge2.value, found.overlap.rougeL.value) == (100, 100, 100)
    assert found.overlap.bleu == pytest.approx(100)
    found = measure_fills([same, other])
    assert found is not None
    # One word of three and of six: F1 is 2 · 1 / (3 + 6).
    assert found.overlap.rouge1.value == pytest.approx((100 + 200 / 9) / 2)
    assert found.overlap.rouge2.value == pytest.approx(50)
    # A fill in the wrong blank has nothing in common with what belongs there.
    crossed = measure_fills([line(["red", "blue"], ["blue", "red"])])
    assert crossed is not None
    assert crossed.overlap.rouge1.value == 0


# --- What lines tell


def test_ends_and_speed_are_given_where_all_lines_tell_them() -> None:
    told = {"complete": True, "tokens": 6, "steps": 3, "seconds": 0.5}
    found = measure_fills([line(["a"], ["b"], **told), line(["a"], ["b"], **{**told, "complete": False})])
    assert found is not None and found.speed is not None
    assert found.complete == 0.5
    assert (found.speed.tokens, found.speed.per_second, found.speed.per_step) == (12, 12, 2)
    found = measure_fills([line(["a"], ["b"], **told), line(["a"], ["b"])])
    assert found is not None
    assert (found.complete, found.speed) == (None, None)


def test_lines_without_fills_have_no_figures() -> None:
    assert measure_fills([line(["a"], None)]) is None
    with pytest.raises(InsertlmError, match=r"^1 of 2 lines have no fills; expected all or none$"):
        measure_fills([line(["a"], None), line(["a"], ["b"])])
    with pytest.raises(InsertlmError, match=r"^line 2: expected a fill for each of 2 removed segments$"):
        measure_fills([line(["a"], ["b"]), line(["a", "b"], ["b"])])
    with pytest.raises(InsertlmError, match=r"^line 1: no word was removed; expected at least one$"):
        measure_fills([line([" "], ["b"])])


# --- Intervals


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [estimate(rng.exponential(2, 200).tolist()) for _ in range(200)]
    assert 0.9 <= np.mean([each.low <= 2 <= each.high for each in found]) <= 0.99
    assert all(each.low <= each.value <= each.high for each in found)


def test_a_ratio_is_of_sums_and_the_same_in_every_call() -> None:
    found = estimate([1, 9], [2, 3])
    assert found == estimate([1, 9], [2, 3])
    assert (found.value, found.low, found.high) == (2, 0.5, 3)
    assert estimate([4]) == estimate([4, 4, 4])


# --- Beside told and guessed lengths


def result(nll: float, rouge: float | None = None) -> dict[str, object]:
    overlap = {} if rouge is None else {"fills": {"overlap": {"rouge1": {"value": rouge}}}}
    return {"against_the_truth": {"change": {"nll": nll}}, **overlap}


def test_the_share_of_the_gap_that_is_closed() -> None:
    found = {gap.figure: gap for gap in gaps(result(3, 10), result(2, 20), result(6, 0))}
    assert (found["ΔNLL"].gap, found["ΔNLL"].share_closed) == (1, 0.75)
    assert (found["ROUGE-1"].gap, found["ROUGE-1"].share_closed) == (-10, 0.5)
    [gap] = gaps(result(3, 10), result(2), None)  # figures that one lacks are left out
    assert (gap.figure, gap.gap, gap.share_closed) == ("ΔNLL", 1, None)
    assert gaps(result(3), result(2), result(2))[0].share_closed is None  # there is no way to go


@pytest.mark.parametrize("change", [{"texts": "other"}, {"evaluator": "other"}])
def test_results_of_other_texts_are_refused(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"texts": "key", "evaluator": None}))
    assert read_result(path, "key", None)["texts"] == "key"
    path.write_text(json.dumps({"texts": "key", "evaluator": None, **change}))
    with pytest.raises(InsertlmError, match=r"r.json: expected a result of insertlm evaluate infilling for the same"):
        read_result(path, "key", None)
    path.write_text("{")
    with pytest.raises(InsertlmError, match=r"r.json: expected a JSON file of insertlm evaluate infilling"):
        read_result(path, "key", None)
    with pytest.raises(InsertlmError, match=r"none.json: cannot be read"):
        read_result(tmp_path / "none.json", "key", None)
