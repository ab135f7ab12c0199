"""What is in the journal is not lost and not done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.journal import Journal, key_of


def test_records_come_back_in_a_later_call(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        assert not path.exists()
        journal.add("a", {"x": 1.5, "text": "é\n"})
    with Journal(path) as journal:
        assert "a" in journal
        assert "b" not in journal
        journal.add("b", {"x": None})
    assert [Journal(path)[key] for key in "ab"] == [{"x": 1.5, "text": "é\n"}, {"x": None}]


def test_a_line_torn_by_a_kill_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.add("a", {"x": 1})
        journal.add("b", {"x": 2})
    path.write_bytes(path.read_bytes()[:-4])
    with Journal(path) as journal:
        assert "a" in journal
        assert "b" not in journal
        journal.add("b", {"x": 2})
    assert Journal(path)["b"] == {"x": 2}
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '"x"', "7"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(f'{{"key": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(InsertlmError, match=r"j.jsonl, line 2: expected a result of an earlier call"):
        Journal(path)
    assert path.read_text(encoding="utf-8").endswith(f"{line}\n")


def test_without_a_path_it_lives_in_memory() -> None:
    with Journal() as journal:
        journal.add("a", {"x": 1})
        assert journal["a"] == {"x": 1}


def test_keys_tell_apart_what_differs() -> None:
    assert key_of("a", {"x": 1, "y": 2}) == key_of("a", {"y": 2, "x": 1})
    assert len({key_of("a", "b"), key_of("ab"), key_of(["a", "b"]), key_of("b", "a"), key_of("a", None)}) == 5
    assert key_of("\ud800")  # half a surrogate pair can be hashed
