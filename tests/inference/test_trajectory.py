"""A trajectory replays to the text that was written, and knows which event wrote which token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from insertlm.inference.trajectory import Insertion, Trajectory


def trajectory_of(start: list[int], *insertions: tuple[int, int]) -> Trajectory:
    events = [Insertion(step, rank, token, -0.5, 0.1) for step, (rank, token) in enumerate(insertions)]
    return Trajectory(prefix=[90, 91], start=start, events=events, stop_probability=0.9)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    start = draw(st.lists(st.integers(0, 9), max_size=5))
    tokens = draw(st.lists(st.integers(10, 99), max_size=12))
    return trajectory_of(start, *((draw(st.integers(0, len(start) + i)), token) for i, token in enumerate(tokens)))


@st.composite
def sequences_and_orders(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sequence = draw(st.lists(st.integers(0, 9), max_size=12))
    return sequence, draw(st.permutations(range(len(sequence))))


def test_a_small_one_by_hand() -> None:
    trajectory = trajectory_of([7], (1, 10), (0, 11), (2, 12))
    assert trajectory.ids == [11, 7, 12, 10]
    assert trajectory.order == [1, -1, 2, 0]


def test_nothing_written() -> None:
    assert trajectory_of([]).ids == trajectory_of([]).order == []
    assert trajectory_of([4, 5]).ids == [4, 5]
    assert trajectory_of([4, 5]).order == [-1, -1]
    assert (trajectory_of([4, 5]).turns, trajectory_of([4, 5]).steps) == ([0, 0], [])


def test_tokens_of_one_step_share_a_turn() -> None:
    """Turns count the steps that wrote something."""
    events = [Insertion(step, rank, token, -0.5, None) for step, rank, token in [(0, 0, 1), (0, 2, 2), (5, 1, 3)]]
    trajectory = Trajectory([], [7], events, stop_probability=None)
    assert trajectory.ids == [1, 3, 7, 2]
    assert trajectory.turns == [1, 2, 0, 1]
    assert trajectory.steps == [events[:2], events[2:]]


@given(trajectories())
def test_with_one_token_a_step_turns_are_the_order(trajectory: Trajectory) -> None:
    assert trajectory.turns == [event + 1 for event in trajectory.order]


@given(trajectories())
def test_ids_are_what_list_insert_makes(trajectory: Trajectory) -> None:
    text = list(trajectory.start)
    for event in trajectory.events:
        text.insert(event.rank, event.token)
    assert trajectory.ids == text


@given(trajectories())
def test_order_tells_who_wrote_what(trajectory: Trajectory) -> None:
    ids, order = trajectory.ids, trajectory.order
    assert sorted(n for n in order if n >= 0) == list(range(len(trajectory.events)))
    assert all(trajectory.events[n].token == token for token, n in zip(ids, order, strict=True) if n >= 0)
    assert [token for token, n in zip(ids, order, strict=True) if n < 0] == trajectory.start


@given(sequences_and_orders())
def test_any_order_of_writing_gives_the_sequence(case: tuple[list[int], list[int]]) -> None:
    """`order[i]` is when place i of the finished sequence was written."""
    sequence, when = case
    places = sorted(range(len(when)), key=when.__getitem__)
    ranks = [sum(other < place for other in places[:n]) for n, place in enumerate(places)]
    trajectory = trajectory_of([], *((rank, sequence[place]) for rank, place in zip(ranks, places, strict=True)))
    assert trajectory.ids == sequence
    assert trajectory.order == when


@given(trajectories())
def test_reading_changes_nothing(trajectory: Trajectory) -> None:
    start = list(trajectory.start)
    assert (trajectory.ids, trajectory.order) == (trajectory.ids, trajectory.order)
    assert trajectory.start == start
