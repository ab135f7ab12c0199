"""Which corruption the keys of a recipe mean."""

from __future__ import annotations

from insertlm.families.corruption.base import Corruption, Order, at_random
from insertlm.families.corruption.groups import Groups
from insertlm.families.corruption.solver import SolverStates
from insertlm.families.corruption.stretch import Stretch
from insertlm.families.corruption.uniform import Uniform

__all__ = ["choose_corruption"]


def choose_corruption(stretch: float, group: int, frame: float, solver: float) -> Corruption:
    """The paper's, unless a key says otherwise. Raises ValueError for keys that contradict each other."""
    if group > 1 and stretch:
        raise ValueError("stretch and group are two ways to choose what is deleted; expected stretch 0 or group 1")
    order: Order = SolverStates(solver) if solver else at_random
    if group > 1:
        return Groups(group, frame, order)
    return Stretch(stretch, order) if stretch else Uniform(order)
