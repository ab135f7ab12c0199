"""Changes in percent, with blanks removed cleanly and one rule for all sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.evaluator import TextScore
from insertlm.evaluation.infills import Infilled, compare, read_infilled


def score(nll: float, entropy: float = 1.0) -> TextScore:
    return TextScore(nll, entropy, 5, 5)


def test_changes_are_averaged_text_by_text() -> None:
    found = compare([score(3, 1), score(1, 2)], [score(2, 2), score(4, 1)])
    assert (found.count, found.left_out) == (2, [])
    assert found.change.nll == pytest.approx((50 - 75) / 2)
    assert found.change.entropy == pytest.approx((-50 + 100) / 2)
    assert found.change.nll_error == pytest.approx(62.5)


def test_what_cannot_be_compared_is_named() -> None:
    outputs = [score(3), None, score(1), score(2)]
    found = compare(outputs, [score(2), score(1), None, score(1, entropy=0)])
    assert (found.count, found.left_out) == (1, [2, 3, 4])
    with pytest.raises(InsertlmError, match="none of 2 texts can be compared"):
        compare([None, score(1)], [score(1), None])


@pytest.mark.parametrize(
    ("pieces", "given"),
    [
        (["The conference, ", " was postponed."], "The conference, was postponed."),
        (["", " was late."], "was late."),
        (["Tom sat", ""], "Tom sat"),
        (["One.\n", "\nThree."], "One.\nThree."),
        (["A ", " ", " B"], "A B"),
        (["A", " b", "c"], "A bc"),
        (["", ""], ""),
        ([], ""),
    ],
)
def test_blanks_are_removed(pieces: list[str], given: str) -> None:
    assert Infilled(pieces, [], "", "").input == given


def test_lines_that_lack_something_are_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    good = {"pieces": ["a", "b"], "removed": ["x"], "text": "axb", "output": "ayb", "id": 3}
    path.write_text(f"{json.dumps(good)}\n", encoding="utf-8")
    assert read_infilled(path) == [Infilled(["a", "b"], ["x"], "axb", "ayb")]
    for bad in ({**good, "output": None}, {key: good[key] for key in ("pieces", "removed", "text")}):
        path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n", encoding="utf-8")
        with pytest.raises(
            InsertlmError, match=r"set.jsonl, line 2: expected pieces, removed, text and output: .*output"
        ):
            read_infilled(path)
