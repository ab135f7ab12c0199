"""Star graphs: given the shuffled edges of a graph, a source and a goal, write the path between them.

A graph is `degree` directed paths that cross in one shared node, the junction. Path lengths and the junction's place in
each path are drawn independently; path 0 is the one that is asked for. At the junction every arm looks the same, so
the right one can only be found by looking back from the goal, and a model that writes from left to right has to guess.
In the easy variant all paths are equally long and start in the junction.

    prefix   a b  c d  …  source goal      (the edges, in random order)
    target   p0 p1  p1 p2  …  p(k-1) pk    (the edges of the path, so inner nodes appear twice)

With `order: reversed` the target is that string back to front, so the path is written from the goal to the source. In
the easy variant there is nothing to guess then, since only one edge leads to each node: it is the order an oracle would
choose for a model that writes from left to right. In the others several paths may run into the junction.

The splits are disjoint by construction. A hash of a graph's content (the set of its edges, the source and the goal, but
not the order of the edges) assigns the graph to train, validation or test. A split draws candidates and keeps those
that belong to it. So no two splits share a graph: not with its edges in another order, not under another seed, and not
in the smallest tasks, where independent draws would collide all the time. Candidates come in chunks, each with a random
stream of its own, so a larger count extends a smaller one, and any chunk can be made without those before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count as count_from
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from insertlm.core.checks import shown
from insertlm.core.errors import InsertlmError
from insertlm.core.hashing import mix64
from insertlm.core.section import Count, Index
from insertlm.tasks.base import SPLITS, TENTHS, Example, Examples, Kind, Split, Task
from insertlm.text.tokenizers import WordTokenizer

__all__ = ["PRESETS", "Star", "edges_of", "path_of", "split_of"]

PRESETS: dict[str, dict[str, Any]] = {
    "star-easy": {"degree": 3, "min_nodes": 5, "max_nodes": 5, "min_plan": 4, "nodes": 20},
    # The paper's table says degree 2; the published data have 3.
    "star-medium": {"degree": 3, "min_nodes": 3, "max_nodes": 6, "min_plan": 2, "nodes": 20},
    "star-hard": {"degree": 5, "min_nodes": 6, "max_nodes": 12, "min_plan": 5, "nodes": 56},
}

CHUNK = 1024  # candidates per random stream; another value gives other data
PATIENCE = 100  # chunks without any graph of a split before it counts as empty

Scalar = TypeVar("Scalar", bound=np.generic)

# What may stand between the nodes of a typed prompt, including the words that `render` writes.
SEPARATORS = re.compile(r"->|[→>:|,;]|\bsource\b|\bgoal\b")


class Star(Task, frozen=True, kw_only=True, tag="star"):
    """Find the path through a star graph."""

    kind: ClassVar[Kind] = "graph"
    things: ClassVar[str] = "graphs"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    degree: Count  # paths through the junction
    min_nodes: Count  # nodes per path, junction included
    max_nodes: Count  # each path has its own number of nodes, between the two
    min_plan: Count  # least number of edges from the junction to the end of a path
    nodes: Count  # how many node names there are
    order: Literal["forward", "reversed"] = "forward"  # of the target: from source to goal, or back to front
    train: Count = 50_000  # examples of the training split
    validation: Count = 1_000  # examples
    test: Count = 5_000  # examples
    seed: Index = 1  # of the graphs

    def __post_init__(self) -> None:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}")
        if self.min_plan >= self.min_nodes:
            raise ValueError(
                f"min_plan {self.min_plan} does not fit into min_nodes {self.min_nodes}; "
                f"expected at most {self.min_nodes - 1}"
            )
        if self.nodes < self.most_nodes:
            raise ValueError(
                f"nodes {self.nodes} are too few for {self.degree} paths of {self.max_nodes} nodes; "
                f"expected at least {self.most_nodes}"
            )

    @property
    def most_nodes(self) -> int:
        """The most nodes a graph can have."""
        return self.degree * (self.max_nodes - 1) + 1

    @property
    def longest_prefix(self) -> int:
        return 2 * self.degree * (self.max_nodes - 1) + 2

    @property
    def longest_target(self) -> int:
        return 2 * (self.max_nodes - 1)

    @property
    def tokenizer(self) -> WordTokenizer:
        return WordTokenizer(tuple(map(str, range(self.nodes))), reserved=2)  # the published size

    def examples(self, split: Split, count: int | None = None, seed: int | None = None) -> Examples:
        wanted = getattr(self, split) if count is None else count
        parts: list[Examples] = []
        found = 0
        for part in self._chunks(split, self.seed if seed is None else seed):
            parts.append(part)
            found += len(part)
            if found >= wanted:
                break
            if not found and len(parts) == PATIENCE:
                raise InsertlmError(f"the task is too small for three splits: no graph belongs to {split}")
        return _joined(parts, wanted)

    def path(self, target: Sequence[int]) -> list[int]:
        """The nodes of a target's path from source to goal, whatever `order` the target is written in."""
        path = path_of(target)
        return path if self.order == "forward" else path[::-1]

    def render(self, example: Example) -> str:
        *flat, source, goal = example.prefix
        edges = " ".join(f"{tail}→{head}" for tail, head in edges_of(flat))
        # A predicted target may hold any id, so its nodes get their names from the tokenizer.
        path = " → ".join(self.tokenizer.decode(self.path(example.target)).split())
        return f"{edges}\nsource {source}  goal {goal}\npath {path}"

    def parse_prompt(self, text: str) -> list[int]:
        """Edges as `a>b`, `a→b` or `a b`, then source and goal, set off with `:` or `|` or not at all."""
        # Separators mean nothing: edges come in pairs, and the last pair is source and goal.
        words = SEPARATORS.sub(" ", text).split()
        known = {str(node): node for node in range(self.nodes)}
        for place, word in enumerate(words, start=1):
            if word not in known:
                raise InsertlmError(f"unknown node {shown(word)} at word {place}; expected 0 … {self.nodes - 1}")
        prefix = [known[word] for word in words]
        self._check_prefix(prefix)
        return prefix

    def _check_prefix(self, prefix: list[int]) -> None:
        if len(prefix) < 4 or len(prefix) % 2:
            raise InsertlmError(f"expected one or more edges, then source and goal; got {len(prefix)} nodes")
        if len(prefix) > self.longest_prefix:
            raise InsertlmError(
                f"prefix of {len(prefix)} tokens is longer than the {self.longest_prefix} this task allows"
            )
        for role, node in zip(("source", "goal"), prefix[-2:], strict=True):
            if node not in prefix[:-2]:
                raise InsertlmError(f"{role} {node} is in none of the edges")

    def _chunks(self, split: Split, seed: int) -> Iterator[Examples]:
        """The split's endless stream of examples."""
        for chunk in count_from():
            rng = np.random.default_rng((seed, SPLITS.index(split), chunk))
            graphs = self._draw(rng, CHUNK)
            mine = _split_index(graphs.edges, graphs.valid, graphs.query) == SPLITS.index(split)
            # Select before shuffling edges: nine in ten candidates of the small splits are dropped.
            written = _written(graphs.where(mine), rng, pad=self.tokenizer.specials.pad)
            yield written if self.order == "forward" else _back_to_front(written)

    def _draw(self, rng: np.random.Generator, count: int) -> _Graphs:
        """Candidates of any split."""
        lengths = rng.integers(self.min_nodes, self.max_nodes + 1, (count, self.degree))
        junction = rng.integers(0, lengths - self.min_plan)[..., None]  # [N, D, 1], a place in each path
        names = rng.random((count, self.nodes)).argsort(axis=1).astype(np.int32)
        # Name 0 of a graph goes to the junction; each path owns a run of max_nodes - 1 others and skips the junction.
        place = np.arange(self.max_nodes)
        first = 1 + np.arange(self.degree)[:, None] * (self.max_nodes - 1)
        slots = np.where(place == junction, 0, first + place - (place > junction))
        paths = np.take_along_axis(names, _flat(slots), axis=1)
        return _Graphs(paths.reshape(slots.shape), lengths)


def split_of(examples: Examples) -> list[Split]:
    """The split that each example's graph belongs to, whatever the order of its edges."""
    pairs = np.stack((examples.prefix[:, ::2], examples.prefix[:, 1::2]), axis=-1)
    query = examples.prefix_length // 2 - 1  # the last pair is the query, all before it are edges
    valid = np.arange(pairs.shape[1]) < query[:, None]
    return [SPLITS[i] for i in _split_index(pairs, valid, pairs[np.arange(len(pairs)), query])]


def edges_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Edges from a flat list of their ends, as in a target or in a prefix without its source and goal."""
    return list(zip(flat[::2], flat[1::2], strict=False))


def path_of(target: Sequence[int]) -> list[int]:
    """The nodes of a target's path, each once, in the order they are written.

    Where the edges of a (predicted) target do not join, both ends are kept, so the gap shows as a step of the path.
    """
    return [node for i, node in enumerate(target) if i == 0 or i % 2 or node != target[i - 1]]


class _Graphs(NamedTuple):
    """Graphs as paths: N graphs of D paths, each with room for M nodes."""

    paths: NDArray[np.int32]  # [N, D, M]
    lengths: NDArray[np.int64]  # [N, D], how many nodes of a path are real

    @property
    def edges(self) -> NDArray[np.int32]:
        """Tails and heads, [N, E, 2] with E = D * (M - 1), of which `valid`, [N, E], are real."""
        tails, heads = self.paths[..., :-1], self.paths[..., 1:]
        return np.stack((_flat(tails), _flat(heads)), axis=-1)

    @property
    def valid(self) -> NDArray[np.bool_]:
        return _flat(np.arange(1, self.paths.shape[2]) < self.lengths[..., None])

    @property
    def query(self) -> NDArray[np.int32]:
        """Source and goal, the ends of path 0: [N, 2]."""
        ends = np.stack((np.zeros_like(self.lengths[:, 0]), self.lengths[:, 0] - 1), axis=1)
        return np.take_along_axis(self.paths[:, 0], ends, axis=1)

    def where(self, keep: NDArray[np.bool_]) -> _Graphs:
        return _Graphs(self.paths[keep], self.lengths[keep])


def _written(graphs: _Graphs, rng: np.random.Generator, pad: int) -> Examples:
    """Graphs as examples, the edges of each in random order."""
    count, edges, target_length = graphs.valid.sum(axis=1), graphs.edges, 2 * (graphs.lengths[:, 0] - 1)
    rows = np.arange(len(count))
    # Random keys below 1 shuffle the real edges; 1 sends the others to the end.
    order = np.where(graphs.valid, rng.random(graphs.valid.shape), 1.0).argsort(axis=1)
    pairs = np.full((len(rows), edges.shape[1] + 1, 2), pad, dtype=np.int32)
    pairs[:, :-1] = np.take_along_axis(edges, order[..., None], axis=1)
    pairs[rows, count] = graphs.query
    pairs[np.arange(pairs.shape[1]) > count[:, None]] = pad
    target = _flat(edges[:, : graphs.paths.shape[2] - 1])
    target = np.where(np.arange(target.shape[1]) < target_length[:, None], target, np.int32(pad))
    return Examples(
        prefix=_flat(pairs),
        prefix_length=(2 * count + 2).astype(np.int32),
        target=target,
        target_length=target_length.astype(np.int32),
    )


def _back_to_front(examples: Examples) -> Examples:
    """Every target reversed; its padding stays behind it."""
    column = np.arange(examples.target.shape[1])
    length = examples.target_length[:, None]
    mirrored = np.where(column < length, length - 1 - column, column)
    return replace(examples, target=np.take_along_axis(examples.target, mirrored, axis=1))


def _flat(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """[N, A, B] to [N, A * B]. A width of -1 would fail for N = 0, which a chunk without any graph of its split has."""
    count, rows, columns = array.shape
    return array.reshape(count, rows * columns)


def _joined(parts: list[Examples], count: int) -> Examples:
    """The first `count` examples of the parts."""
    return Examples(
        prefix=np.concatenate([part.prefix for part in parts])[:count],
        prefix_length=np.concatenate([part.prefix_length for part in parts])[:count],
        target=np.concatenate([part.target for part in parts])[:count],
        target_length=np.concatenate([part.target_length for part in parts])[:count],
    )


def _split_index(edges: NDArray[np.int32], valid: NDArray[np.bool_], query: NDArray[np.int32]) -> NDArray[np.int64]:
    """Indices into SPLITS, [N], from edges, [N, E, 2], of which `valid`, [N, E], are real, and the query, [N, 2].

    Hashes of single edges are added up, so their order does not count. The query gets a bit that no edge has.
    """
    content = np.where(valid, mix64(_packed(edges)), np.uint64(0)).sum(axis=1, dtype=np.uint64)
    content += mix64(_packed(query) | np.uint64(1 << 63))
    tenth = mix64(content) % np.uint64(len(TENTHS))
    return TENTHS.take(tenth.astype(np.int64))


def _packed(pairs: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Both ids of a pair in one number: [..., 2] to [...]."""
    ids = pairs.astype(np.uint64)
    return (ids[..., 0] << np.uint64(32)) | ids[..., 1]
