"""Star graphs: every example is what the task promises, and the splits never meet."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insertlm.core.errors import InsertlmError
from insertlm.tasks.base import SPLITS, Example, Examples, Split, Task
from insertlm.tasks.star import PRESETS, Star, edges_of, path_of, split_of

EASY, MEDIUM, HARD = (Star(**PRESETS[name]) for name in ("star-easy", "star-medium", "star-hard"))
# 132 graphs in all: independent draws of a few hundred would share most of them.
TINY = Star(degree=1, min_nodes=2, max_nodes=2, min_plan=1, nodes=12)

Graph = tuple[frozenset[tuple[int, int]], int, int]


@st.composite
def stars(draw: st.DrawFn) -> Star:
    """Any valid parameters, with names enough that no split is empty."""
    degree, min_nodes = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    max_nodes = draw(st.integers(min_nodes, min_nodes + 3))
    return Star(
        degree=degree,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        min_plan=draw(st.integers(1, min_nodes - 1)),
        nodes=max(12, degree * (max_nodes - 1) + 1) + draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**40)),
    )


splits = st.sampled_from(SPLITS)


def graph_of(example: Example) -> Graph:
    *flat, source, goal = example.prefix
    return frozenset(edges_of(flat)), source, goal


def graphs_of(examples: Examples) -> set[Graph]:
    return {graph_of(example) for example in examples}


def rows(examples: Examples) -> list[Example]:
    return list(examples)


def all_paths(edges: frozenset[tuple[int, int]], source: int, goal: int) -> list[list[int]]:
    """Every directed path, by search."""
    if source == goal:
        return [[goal]]
    return [[source, *rest] for tail, head in edges if tail == source for rest in all_paths(edges, head, goal)]


def chi_square(counts: Counter[int], cells: int) -> float:
    expected = counts.total() / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))


# --- What an example is


@settings(max_examples=40, deadline=None)
@given(stars(), splits)
def test_target_is_the_only_path_from_source_to_goal(task: Star, split: Split) -> None:
    for example in task.examples(split, 5):
        path = path_of(example.target)
        assert all_paths(*graph_of(example)) == [path]
        assert example.target == [node for step in pairwise(path) for node in step]
        assert task.min_nodes <= len(path) <= task.max_nodes


@settings(max_examples=40, deadline=None)
@given(stars(), splits)
def test_graph_is_paths_through_one_junction(task: Star, split: Split) -> None:
    for edges, *_ in map(graph_of, task.examples(split, 5)):
        leaving, entering = Counter(tail for tail, _ in edges), Counter(head for _, head in edges)
        nodes = leaving.keys() | entering.keys()
        assert len(edges) == len(nodes) - 1
        assert sorted(leaving.values(), reverse=True)[0] == task.degree
        assert sum(n - 1 for n in leaving.values()) == task.degree - 1  # no second fork
        assert sum(n - 1 for n in entering.values()) <= task.degree - 1
        assert task.degree * (task.min_nodes - 1) <= len(edges) <= task.degree * (task.max_nodes - 1)
        if task.degree > 1:
            junction = leaving.most_common(1)[0][0]
            ends = nodes - leaving.keys()
            assert len(ends) == task.degree
            assert all(len(path) > task.min_plan for end in ends for path in all_paths(edges, junction, end))
            assert all(n == 1 for node, n in entering.items() if node != junction)


@settings(max_examples=30, deadline=None)
@given(stars(), splits)
def test_ids_and_lengths_stay_within_what_the_task_states(task: Star, split: Split) -> None:
    examples = task.examples(split, 50)
    assert examples.prefix.shape == (50, task.longest_prefix)
    assert examples.target.shape == (50, task.longest_target)
    for ids, lengths in ((examples.prefix, examples.prefix_length), (examples.target, examples.target_length)):
        assert ids.dtype == lengths.dtype == np.int32
        real = np.arange(ids.shape[1]) < lengths[:, None]
        assert set(ids[real].tolist()) <= set(task.tokenizer.writable)
        assert set(ids[~real].tolist()) <= {task.tokenizer.specials.pad}


def test_longest_rows_occur() -> None:
    examples = MEDIUM.examples("train", 5000)
    assert examples.prefix_length.max() == MEDIUM.longest_prefix == 32
    assert examples.target_length.max() == MEDIUM.longest_target == 10


@pytest.mark.parametrize(("task", "size"), [(EASY, 28), (MEDIUM, 28), (HARD, 64)])
def test_vocabulary_has_the_published_size(task: Star, size: int) -> None:
    assert task.tokenizer.size == size
    assert task.tokenizer.decode([0, task.nodes - 1, task.nodes]) == f"0 {task.nodes - 1} <stop>"


def test_star_is_a_task() -> None:
    task: Task = EASY
    assert len(task.examples("validation", 3)) == 3


# --- The published distribution


@pytest.mark.parametrize(
    ("task", "prefix", "target", "at_junction"),
    [(EASY, 26.0, 8.0, 1.0), (MEDIUM, 23.0, 7.0, 0.5208), (HARD, 82.0, 16.0, 0.3704)],
)
def test_statistics(task: Star, prefix: float, target: float, at_junction: float) -> None:
    examples = task.examples("train", 20_000)
    assert examples.prefix_length.mean() == pytest.approx(prefix, abs=0.25)
    assert examples.target_length.mean() == pytest.approx(target, abs=0.12)
    source = examples.prefix[np.arange(len(examples)), examples.prefix_length - 2]
    leaving = (examples.prefix[:, ::2] == source[:, None]).sum(axis=1) - 1  # the query itself is one of the matches
    assert (leaving == task.degree).mean() == pytest.approx(at_junction, abs=0.02)


@pytest.mark.parametrize("task", [MEDIUM, HARD])
def test_query_lengths_are_uniform(task: Star) -> None:
    lengths = task.examples("train", 10_000).target_length // 2 + 1 - task.min_nodes
    cells = task.max_nodes - task.min_nodes + 1
    assert chi_square(Counter(lengths.tolist()), cells) < 35


def test_edge_order_and_names_are_uniform() -> None:
    examples = rows(EASY.examples("train", 12_000))
    first = Counter(edges_of(prefix).index((target[0], target[1])) for prefix, target in examples)
    last = Counter(edges_of(prefix).index((target[-2], target[-1])) for prefix, target in examples)
    sources, goals = Counter(row.prefix[-2] for row in examples), Counter(row.prefix[-1] for row in examples)
    # 11 and 19 degrees of freedom: a fair generator exceeds these once in more than 10,000 data sets.
    assert chi_square(first, 12) < 40
    assert chi_square(last, 12) < 40
    assert chi_square(sources, 20) < 55
    assert chi_square(goals, 20) < 55


def test_hard_graphs_are_made_fast() -> None:
    start = time.perf_counter()
    assert len(HARD.examples("train")) == 50_000
    assert time.perf_counter() - start < 8  # takes 0.3 s on two idle cores


# --- The same data every time


@settings(max_examples=25, deadline=None)
@given(stars(), splits, st.integers(0, 60), st.integers(0, 60))
def test_a_larger_count_extends_a_smaller_one(task: Star, split: Split, a: int, b: int) -> None:
    small, large = sorted((a, b))
    assert rows(task.examples(split, small)) == rows(task.examples(split, large))[:small]


def test_counts_extend_across_chunks() -> None:
    many = rows(MEDIUM.examples("test", 1500))
    assert len(many) == 1500
    for count in (0, 1, 150, 1000):
        assert rows(MEDIUM.examples("test", count)) == many[:count]


def test_count_and_seed_default_to_the_recipe() -> None:
    task = Star(**PRESETS["star-easy"], train=7, validation=5, test=3, seed=9)
    assert [len(task.examples(split)) for split in SPLITS] == [7, 5, 3]
    assert rows(task.examples("train")) == rows(EASY.examples("train", 7, seed=9))
    assert rows(task.examples("train")) != rows(EASY.examples("train", 7))


def test_chunks_and_seeds_give_fresh_graphs() -> None:
    assert len(graphs_of(HARD.examples("train", 5000))) == 5000
    assert graphs_of(HARD.examples("train", 1000)).isdisjoint(graphs_of(HARD.examples("train", 1000, seed=2)))


@pytest.mark.parametrize(
    ("name", "digest"),
    [("star-easy", "20df413fa3f2e4bf"), ("star-medium", "030395b0feb2d4f9"), ("star-hard", "9d3769c730f47e32")],
)
def test_published_data_do_not_change(name: str, digest: str) -> None:
    """Results are tied to these examples: a change of the generator must be meant."""
    text = "".join(
        f"{prefix}{target}" for split in SPLITS for prefix, target in Star(**PRESETS[name]).examples(split, 200)
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


# --- Splits


@settings(max_examples=30, deadline=None)
@given(stars(), st.integers(0, 2**40))
def test_splits_share_no_graph_under_any_seeds(task: Star, other: int) -> None:
    found = {
        split: graphs_of(task.examples(split, 100)) | graphs_of(task.examples(split, 100, other)) for split in SPLITS
    }
    assert found["train"].isdisjoint(found["validation"])
    assert found["train"].isdisjoint(found["test"])
    assert found["validation"].isdisjoint(found["test"])


def test_splits_of_a_tiny_task_divide_all_its_graphs() -> None:
    parts = [graphs_of(TINY.examples(split, 2000)) for split in SPLITS]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 12 * 11


@settings(max_examples=30, deadline=None)
@given(stars(), splits, st.randoms())
def test_split_does_not_depend_on_the_order_of_edges(task: Star, split: Split, random: Random) -> None:
    examples = task.examples(split, 20)
    assert split_of(examples) == [split] * 20
    for prefix, length in zip(examples.prefix, examples.prefix_length, strict=True):
        edges = prefix[: length - 2].reshape(-1, 2)
        edges[:] = edges[random.sample(range(len(edges)), len(edges))]
    assert split_of(examples) == [split] * 20


@pytest.mark.parametrize("change", ["reverse an edge", "exchange source and goal", "another goal"])
def test_split_depends_on_edges_source_and_goal(change: str) -> None:
    """Each change makes it another graph, which two times in ten belongs to another split than train."""
    examples = MEDIUM.examples("train", 3000)
    row, length = np.arange(len(examples)), examples.prefix_length
    if change == "reverse an edge":
        examples.prefix[:, :2] = examples.prefix[:, 1::-1].copy()
    elif change == "exchange source and goal":
        goal = examples.prefix[row, length - 1]
        examples.prefix[row, length - 1] = examples.prefix[row, length - 2]
        examples.prefix[row, length - 2] = goal
    else:
        examples.prefix[row, length - 1] = examples.target[:, 1]
    assert 0.17 < sum(split != "train" for split in split_of(examples)) / 3000 < 0.23


def test_shares_of_the_splits() -> None:
    pairs = np.array([(a, b) for a in range(100) for b in range(100) if a != b], dtype=np.int32)
    length = np.full(len(pairs), 4, dtype=np.int32)
    counts = Counter(split_of(Examples(np.tile(pairs, 2), length, pairs, length // 2)))
    assert [counts[split] / len(pairs) for split in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.015)


@pytest.mark.parametrize("name", PRESETS)
def test_the_order_of_the_target_changes_nothing_else(name: str) -> None:
    forward, reverse = Star(**PRESETS[name]), Star(**PRESETS[name], order="reversed")
    for split in SPLITS:
        here, there = forward.examples(split, 50), reverse.examples(split, 50)
        assert split_of(there) == [split] * 50
        assert here.target.shape == there.target.shape
        for a, b in zip(here, there, strict=True):
            assert b == Example(a.prefix, a.target[::-1])


def test_a_task_too_small_for_a_split_says_so() -> None:
    task = Star(degree=1, min_nodes=2, max_nodes=2, min_plan=1, nodes=2)
    with pytest.raises(InsertlmError) as caught:
        task.examples("validation", 1)
    assert str(caught.value) == "the task is too small for three splits: no graph belongs to validation"
    assert len(task.examples("validation", 0)) == 0
    assert graphs_of(task.examples("train", 9)).isdisjoint(graphs_of(task.examples("test", 9)))


def test_chunks_without_a_graph_of_the_split_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insertlm.tasks.star.CHUNK", 3)
    assert split_of(EASY.examples("test", 20)) == ["test"] * 20
    assert split_of(EASY.examples("test", 0)) == []


@settings(max_examples=20, deadline=None)
@given(stars(), splits)
def test_a_rendered_graph_can_be_typed_in_again(task: Star, split: Split) -> None:
    for example in task.examples(split, 5):
        assert task.parse_prompt(task.render(example).rpartition("\n")[0]) == example.prefix
