"""Packing is concatenation: everything it says can be read back from plain Python lists."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from insertlm.core.packing import Packing, Segments, most_spare


@st.composite
def keeps(draw: st.DrawFn) -> list[list[bool]]:
    columns = draw(st.integers(1, 7))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns)
    return draw(st.lists(row, min_size=1, max_size=5))


def numbered(keep: list[list[bool]]) -> list[list[int]]:
    """A matrix in which every cell is different."""
    return [[100 * b + c + 1 for c in range(len(row))] for b, row in enumerate(keep)]


def concatenated(keep: list[list[bool]]) -> list[int]:
    rows = zip(keep, numbered(keep), strict=True)
    return [value for mask, row in rows for kept, value in zip(mask, row, strict=True) if kept]


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


def segments_of(sizes: list[int]) -> Segments:
    return Segments(torch.tensor([0, *sizes]).cumsum(0).int(), max(sizes))


# --- Packing


@given(keeps())
def test_pack_is_concatenation(keep: list[list[bool]]) -> None:
    packing = Packing(torch.tensor(keep))
    assert packing.pack(torch.tensor(numbered(keep))).tolist() == concatenated(keep)
    assert packing.total == len(concatenated(keep))


@given(keeps(), st.integers(0, 20), st.integers(-5, 5))
def test_with_a_capacity_the_tail_is_filled(keep: list[list[bool]], spare: int, fill: int) -> None:
    expected = concatenated(keep)
    packing = Packing(torch.tensor(keep), len(expected) + spare)
    assert packing.pack(torch.tensor(numbered(keep)), fill).tolist() == expected + [fill] * spare
    assert packing.total == len(expected) + spare


@given(keeps(), st.integers(0, 20))
def test_every_kept_cell_is_read_back(keep: list[list[bool]], spare: int) -> None:
    matrix = torch.tensor(numbered(keep))
    for capacity in (None, sum(map(sum, keep)) + spare):
        packing = Packing(torch.tensor(keep), capacity)
        kept = packing.keep
        assert torch.equal(packing.pack(matrix)[packing.where[kept]], matrix[kept])


@given(keeps())
def test_a_dropped_cell_points_to_the_nearest_kept_one_on_its_left(keep: list[list[bool]]) -> None:
    packing = Packing(torch.tensor(keep))
    matrix = numbered(keep)
    packed = packing.pack(torch.tensor(matrix)).tolist()
    for b, row in enumerate(keep):
        for c, kept in enumerate(row):
            left = [i for i in range(c) if row[i]]
            if not kept and left:
                assert packed[int(packing.where[b, c])] == matrix[b][left[-1]]


@given(keeps(), st.integers(0, 30))
def test_segments_are_the_rows_and_then_pieces_of_the_tail(keep: list[list[bool]], spare: int) -> None:
    sizes = [sum(row) for row in keep]
    for capacity in (None, sum(sizes) + spare):
        packing = Packing(torch.tensor(keep), capacity)
        segments = packing.segments
        assert packing.lengths.tolist() == segments.lengths[: len(keep)].tolist() == sizes
        assert packing.starts.tolist() == [sum(sizes[:b]) for b in range(len(keep))]
        assert segments.cu.dtype == torch.int32
        assert int(segments.cu[0]) == 0
        assert int(segments.cu[-1]) == packing.total
        assert bool((segments.lengths >= 0).all())
        assert int(segments.lengths.max()) <= segments.longest


@given(keeps(), st.integers(0, 9))
def test_with_a_capacity_shapes_do_not_depend_on_what_is_kept(keep: list[list[bool]], spare: int) -> None:
    capacity = len(keep) * len(keep[0]) + spare
    mask = torch.tensor(keep)
    packings = [Packing(m, capacity) for m in (mask, ~mask, torch.ones_like(mask))]
    assert len({(len(p.segments.cu), p.segments.longest, p.total, len(p.pack(mask))) for p in packings}) == 1


def test_the_longest_tail_is_in_pieces_too() -> None:
    keep = torch.ones(2, 7, dtype=torch.bool)
    segments = Packing(keep, 14 + most_spare(14)).segments
    assert int(segments.lengths.max()) <= segments.longest == 7


def test_other_types_of_matrix_are_packed_too() -> None:
    packing = Packing(torch.tensor([[True, False], [False, True]]), 3)
    assert packing.pack(torch.tensor([[True, False], [False, True]])).tolist() == [True, True, False]
    assert packing.pack(torch.tensor([[0.5, 1.5], [2.5, 3.5]])).tolist() == [0.5, 3.5, 0.0]


# --- Segments


@given(lengths)
def test_cells_place_rows_in_a_dense_matrix(sizes: list[int]) -> None:
    segments = segments_of(sizes)
    rows = torch.arange(sum(sizes)) + 1
    dense = torch.zeros(len(sizes) * segments.longest, dtype=torch.int64).index_copy(0, segments.cells, rows)
    for matrix_row, piece in zip(dense.view(len(sizes), -1).tolist(), torch.split(rows, sizes), strict=True):
        assert matrix_row == piece.tolist() + [0] * (segments.longest - len(piece))
    assert torch.equal(segments.valid.flatten().nonzero().squeeze(1), segments.cells)
