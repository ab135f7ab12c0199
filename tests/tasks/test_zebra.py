"""Zebra puzzles: what an example says, how it is scored, kept and solved, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

from insertlm.core.errors import InsertlmError
from insertlm.tasks.base import SPLITS, Example, Task
from insertlm.tasks.stored import stored
from insertlm.tasks.zebra import puzzles as zebra_puzzles
from insertlm.tasks.zebra import task as zebra
from insertlm.tasks.zebra.clues import HOUSE, NONE, SIDE, Clue, read
from insertlm.tasks.zebra.solver import solve
from insertlm.tasks.zebra.task import Zebra, in_threes

ZEBRA: Task = Zebra()
SOLVER = Zebra(order="solver")
DIGITS, OWN = Zebra(), Zebra(own_words=True)
# The example of the paper's appendix.
PAPER = (
    "left-of LHS c 2 2 RHS c 2 1 CLUE_END = LHS c 2 1 RHS c 1 2 CLUE_END ends LHS c 1 2 RHS CLUE_END "
    "= LHS c 1 1 RHS c 2 2 CLUE_END nbr LHS c 2 1 RHS c 0 2 CLUE_END inbetween LHS c 0 1 RHS c 1 1 c 2 1 CLUE_END"
)
PAPER_TARGET = "0 0 1 1 0 0 2 0 0 0 1 2 1 1 1 2 1 2 0 2 0 1 2 2 2 2 1"


def ids(text: str) -> list[int]:
    return ZEBRA.tokenizer.encode(text)


# --- Examples


def test_the_vocabulary_is_the_published_one() -> None:
    assert ZEBRA.tokenizer.size == 25
    assert [ZEBRA.tokenizer.decode([i]) for i in range(6)] == list("012345")


def test_the_papers_example_is_read_written_and_solved_alike() -> None:
    street = read(PAPER)
    assert (street.size, street.attributes, len(street.clues)) == (3, 3, 6)
    assert ZEBRA.tokenizer.decode(ZEBRA.parse_prompt(PAPER)) == PAPER
    triples = {(cell // SIDE, house, cell % SIDE) for cell, house in solve(street)}
    numbers = iter(map(int, PAPER_TARGET.split()))
    assert triples == set(zip(numbers, numbers, numbers, strict=True))


def test_examples_are_the_clues_and_the_solution_in_either_order() -> None:
    by_house, by_solver = ZEBRA.examples("train", 200, 3), SOLVER.examples("train", 200, 3)
    for one, other in zip(by_house, by_solver, strict=True):
        street = read(ZEBRA.tokenizer.decode(one.prefix))
        assert one.prefix == other.prefix == ids(" ".join(map(str, street.clues)))
        assert len(one.prefix) <= ZEBRA.longest_prefix
        assert len(one.target) == 3 * street.size * street.attributes <= ZEBRA.longest_target
        found = [(cell // SIDE, house, cell % SIDE) for cell, house in solve(street)]
        assert other.target == [number for triple in found for number in triple]
        in_order = sorted(found, key=lambda triple: (triple[1], triple[0]))
        assert one.target == [number for triple in in_order for number in triple]


def test_examples_know_when_each_of_their_tokens_is_found() -> None:
    by_house, by_solver = ZEBRA.examples("train", 200, 3), SOLVER.examples("train", 200, 3)
    assert by_house.solving_order is not None
    assert by_solver.solving_order is not None
    for row in range(200):
        length = by_house.target_length[row]
        found = by_house.solving_order[row, :length]
        as_solved = by_house.target[row, np.argsort(found, kind="stable")]
        assert as_solved.tolist() == by_solver[row].target
        assert by_solver.solving_order[row, :length].tolist() == np.arange(length // 3).repeat(3).tolist()
    last = by_house.take(np.array([199]))
    assert last.solving_order is not None
    assert (last.solving_order[0] == by_house.solving_order[199]).all()


def test_attributes_and_houses_can_have_words_of_their_own() -> None:
    """The same puzzles, and the same triples: only the words differ."""
    with_digits, with_words = (list(task.examples("train", 50, 3)) for task in (DIGITS, OWN))
    for one, other in zip(with_digits, with_words, strict=True):
        assert one.prefix == other.prefix
        assert DIGITS.tokenizer.decode(one.prefix) == OWN.tokenizer.decode(other.prefix)
        assert DIGITS.triples(one.target) == OWN.triples(other.target) == in_threes(one.target)
        spelt = [f"a{a} h{h} {v}" for a, h, v in in_threes(one.target)]
        assert OWN.tokenizer.decode(other.target) == " ".join(spelt)
        assert OWN.scores(other, other.target)["sequence_accuracy"] == 1
        assert not any(OWN.scores(other, one.target).values())
    assert OWN.render(with_words[0]).endswith(OWN.tokenizer.decode(with_words[0].target))
    assert OWN.tokenizer.size == DIGITS.tokenizer.size + 2 * SIDE


def test_a_word_in_the_place_of_another_is_no_number() -> None:
    ids = OWN.tokenizer.encode("a1 h2 3 h1 h2 3 a1 a2 3 a1 h2 a3 a1 h2 left-of a5 h5")
    assert OWN.triples(ids) == [(1, 2, 3), (NONE, 2, 3), (1, NONE, 3), (1, 2, NONE), (1, 2, NONE), (5, 5)]
    assert DIGITS.triples(DIGITS.tokenizer.encode("1 2 left-of 5")) == [(1, 2, NONE), (5,)]


def test_sizes_are_equally_likely_and_those_asked_for() -> None:
    heads = Zebra().puzzles("train", 1600, 1).heads
    _, counts = np.unique(heads[:, :2], axis=0, return_counts=True)
    assert len(counts) == 16
    assert 60 < counts.min() <= counts.max() < 145  # 100 ± 4 standard deviations
    narrow = Zebra(min_houses=4, max_houses=5, max_attributes=3)
    assert np.unique(narrow.puzzles("test", 50, 1).heads[:, :2], axis=0).tolist() == [[4, 3], [5, 3]]
    assert narrow.longest_target == 45


def test_a_larger_count_extends_a_smaller_one_and_seeds_differ() -> None:
    few, many = ZEBRA.examples("test", 5, 1), ZEBRA.examples("test", 300, 1)
    assert list(few) == list(many)[:5]
    assert list(few) != list(ZEBRA.examples("test", 5, 2))


def test_blocks_of_puzzles_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(ZEBRA.examples("test", 20, 1))
    monkeypatch.setattr(zebra_puzzles, "_AT_ONCE", 7)
    assert list(ZEBRA.examples("test", 20, 1)) == whole


def test_data_never_change_unnoticed() -> None:
    """If this fails on purpose, raise VERSION in puzzles.py: kept files hold the old puzzles."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for array in Zebra().puzzles(split, 20, 1).arrays().values():
            digest.update(array.tobytes())
    assert (zebra_puzzles.VERSION, digest.hexdigest()[:16]) == (1, "f1d14ee2563ecc42")


def test_a_text_for_people() -> None:
    text = ZEBRA.render(Example(ids(PAPER), ids(PAPER_TARGET)))
    assert text.splitlines() == [
        "3 houses, 3 attributes",
        "  1. Fish is left of dog.",
        "  2. Dog and Clara share a house.",
        "  3. Clara is at an end of the street.",
        "  4. Ben and fish share a house.",
        "  5. Dog is next to green.",
        "  6. Ben is between blue and dog.",
        "",
        "house  0     1      2",
        "       blue  green  red",
        "       Anna  Ben    Clara",
        "       cat   fish   dog",
        "",
        f"clues  {PAPER}",
        f"target {PAPER_TARGET}",
    ]
    broken = ZEBRA.render(Example(ids(PAPER), [0, 0, 1, 0, 0, 2, 1, 1]))
    assert "blue/green  –  –" in broken
    assert Clue(1, (0, HOUSE + 2)).in_english() == "Red is not in house 2."


# --- Scores


@pytest.mark.parametrize(
    ("written", "sequence", "token", "clue"),
    [
        (PAPER_TARGET, 1, 1, 1),
        ("2 2 1 1 0 0 2 0 0 0 1 2 1 1 1 2 1 2 0 2 0 1 2 2 0 0 1", 1, 1, 1),  # in another order
        (f"{PAPER_TARGET} 0 0 1", 1, 1, 1),  # said twice
        (f"{PAPER_TARGET} 0 1", 0, 1, 1),  # breaks off
        (PAPER_TARGET[:-6], 0, 8 / 9, 0),  # a value that clues name is missing
        (f"{PAPER_TARGET} 2 0 1", 0, 1, 0),  # and has two houses
        (PAPER_TARGET.replace("2 0 0", "2 0 3"), 0, 8 / 9, 1),  # no clue names the wrong one
        ("", 0, 0, 0),
        ("c = LHS RHS n n", 0, 0, 0),
    ],
)
def test_scores(written: str, sequence: float, token: float, clue: float) -> None:
    example = Example(ids(PAPER), ids(PAPER_TARGET))
    assert ZEBRA.scores(example, ids(written)) == {
        "sequence_accuracy": sequence,
        "token_accuracy": pytest.approx(token),
        "clue_accuracy": clue,
        "sequence_accuracy_3x3": sequence,
    }


# --- The store


def test_the_splits_of_a_recipe_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "new"))
    task = Zebra(max_houses=3, max_attributes=3, test=20, seed=7)
    first = list(task.examples("test"))
    [path] = (tmp_path / "new").iterdir()
    assert path.name == "zebra-1-3-3-3-3-seed7-test.npz"
    assert first == list(task.examples("test", seed=7))
    monkeypatch.setattr("insertlm.tasks.zebra.task.make", None)  # nothing is made any more
    assert list(task.examples("test")) == first
    other = Zebra(max_houses=3, max_attributes=3, order="solver", seed=7).examples("test", 5)
    assert [example.prefix for example in other] == [example.prefix for example in first[:5]]


def test_a_damaged_or_short_file_is_made_anew_and_other_seeds_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path))
    task = Zebra(max_houses=3, max_attributes=3, test=4)
    task.examples("test", seed=9)
    assert not list(tmp_path.iterdir())
    first = list(task.examples("test"))
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for damage in (whole[:-40], whole[:150] + bytes([whole[150] ^ 255]) + whole[151:], b""):
        path.write_bytes(damage)
        assert list(task.examples("test")) == first
    assert len(task.examples("test", 9)) == 9
    assert len(np.load(path)["heads"]) == 9


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "file" / "folder"))
    arrays = {"a": np.arange(3, dtype=np.uint8)}
    assert stored("name", lambda _: True, lambda: arrays) is arrays


# --- Solving, and what is refused


def test_where_deduction_ends_a_value_is_looked_up() -> None:
    clues = (
        "inbetween LHS c 2 2 RHS c 2 0 c 1 1 CLUE_END immediate-left LHS c 0 0 RHS c 2 3 CLUE_END "
        "inbetween LHS c 1 0 RHS c 2 2 c 0 3 CLUE_END inbetween LHS c 0 3 RHS c 0 1 c 1 3 CLUE_END"
    )
    found = solve(read(clues))
    assert found[:4] == [(13, 0), (15, 3), (0, 2), (1, 1)]  # all that deduction finds
    assert found[4] == (2, 3)
    assert len(found) == 12
    assert all(clue.holds(dict(found), 4) for clue in read(clues).clues)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no clue"),
        ("2 houses, 3 attributes\n" + PAPER, "impossible size: 2 houses; expected 3 … 6"),
        ("3 houses, 7 attributes\n" + PAPER, "impossible size: 7 attributes; expected 3 … 6"),
        ("ends LHS c 0 6 RHS CLUE_END", r"clue 1 \(ends LHS c 0 6 RHS\): unknown value '6'; expected 0 … 5"),
        ("ends LHS c x 0 RHS CLUE_END", "unknown attribute 'x'; expected 0 … 5"),
        (f"{PAPER} = LHS c 0 0 RHS n 0 9 CLUE_END", r"clue 7 \(.*\): unknown house '9'; expected 0 … 5"),
        (f"{PAPER} = LHS c 0 0 RHS n 1 2 CLUE_END", "clue 7 .*expected n 0 and a house, got n 1 2"),
        ("3 houses, 3 attributes ends LHS c 0 3 RHS CLUE_END", "clue 1 .*: unknown value 3; this puzzle has 0 … 2"),
        ("3 houses, 3 attributes ends LHS c 4 1 RHS CLUE_END", "clue 1 .*: unknown attribute 4; this puzzle has 0 … 2"),
        ("3 houses, 3 attributes = LHS c 0 1 RHS n 0 3 CLUE_END", "clue 1 .*: unknown house 3; this puzzle has 0 … 2"),
        ("near LHS c 0 0 RHS c 0 1 CLUE_END", "clue 1 .*: unknown kind of clue; expected one of =, !=, .*, got 'near'"),
        ("CLUE_END", "clue 1 .*: unknown kind of clue.*got nothing"),
        ("ends LHS c 0 0 RHS", r"clue 1 \(ends LHS c 0 0 RHS\): expected CLUE_END at its end"),
        ("ends c 0 0 RHS CLUE_END", "clue 1 .*: expected ends LHS, an operand of three words, RHS"),
        ("= LHS c 0 0 RHS c 1 CLUE_END", "clue 1 .*: expected = LHS, an operand of three words, RHS"),
        ("= LHS c 0 0 RHS CLUE_END", "clue 1 .*: = has 2 operands, got 1"),
        ("= LHS c 0 0 RHS d 0 0 CLUE_END", "clue 1 .*: expected c, attribute and value, or n, 0 and a house; got 'd'"),
        (
            f"{PAPER} = LHS c 0 0 RHS n 0 1 CLUE_END",
            r"no solution: clue 7 \(= LHS c 0 0 RHS n 0 1 CLUE_END\) contradicts those before it",
        ),
        ("left-of LHS c 0 0 RHS c 0 0 CLUE_END", "no solution: clue 1 .* cannot be true"),
        (
            PAPER.replace("nbr LHS c 2 1 RHS c 0 2 CLUE_END", ""),
            r"several solutions: the 5 clues leave open whether value \d of attribute \d \(\w+\) is in house \d or \d",
        ),
    ],
)
def test_what_cannot_be_solved_is_named(text: str, message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        solve(read(text))


def test_prompts_must_fit_the_task() -> None:
    small = Zebra(max_houses=3)
    with pytest.raises(InsertlmError, match="puzzle of 5 houses and 3 attributes; this task has at most 3 and 6"):
        small.parse_prompt("ends LHS c 0 4 RHS CLUE_END")
    with pytest.raises(InsertlmError, match="clues of 357 words; this task has at most 350"):
        small.parse_prompt("ends LHS c 0 0 RHS CLUE_END " * 51)


def test_sizes_of_a_task_must_make_sense() -> None:
    with pytest.raises(ValueError, match="min_houses 5 is more than max_houses 4"):
        Zebra(min_houses=5, max_houses=4)
    with pytest.raises(ValueError, match="min_attributes 6 is more than max_attributes 3"):
        Zebra(min_attributes=6, max_attributes=3)


def test_without_numba_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "insertlm.tasks.zebra.kernels", None)
    monkeypatch.delattr("insertlm.tasks.zebra.kernels", raising=False)
    with pytest.raises(InsertlmError, match=r"made and solved with numba: pip install 'insertlm\[zebra\]'"):
        ZEBRA.examples("test", 1, 1)


def test_a_value_in_two_houses_lives_in_none() -> None:
    assert zebra.places([(0, 0, 1), (0, 1, 1), (1, 2, 0)]) == {6: 2}
