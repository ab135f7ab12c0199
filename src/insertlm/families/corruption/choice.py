"""Which corruption the keys of a recipe mean."""

from __future__ import annotations

from torch import Tensor

from insertlm.families.corruption.base import Corruption, Order, at_random
from insertlm.families.corruption.blanks import BlanksConfig
from insertlm.families.corruption.groups import Groups
from insertlm.families.corruption.partly_filled import PartlyFilled
from insertlm.families.corruption.solver import SolverStates
from insertlm.families.corruption.stretch import Stretch
from insertlm.families.corruption.uniform import Uniform

__all__ = ["check_choice", "choose_corruption"]


def check_choice(blanks: float, stretch: float, group: int, solver: float, leftmost: bool) -> None:
    """Raises ValueError for keys that contradict each other."""
    if group > 1 and leftmost:
        raise ValueError("group says itself which tokens are asked for; expected targets any")
    if group > 1 and stretch:
        raise ValueError("stretch and group are two ways to choose what is deleted; expected stretch 0 or group 1")
    for name, given, usual in (("stretch", stretch, 0), ("group", group, 1), ("solver", solver, 0)):
        if blanks and given != usual:
            raise ValueError(f"blanks and {name} are two ways to choose what is deleted; expected {name} {usual}")


def choose_corruption(
    blanks: float, stretch: float, group: int, frame: float, solver: float, traits: Tensor
) -> Corruption:
    """The paper's, unless a key says otherwise. traits: see PartlyFilled; read with blanks alone"""
    if blanks:
        return PartlyFilled(blanks, traits, BlanksConfig())
    order: Order = SolverStates(solver) if solver else at_random
    if group > 1:
        return Groups(group, frame, order)
    return Stretch(stretch, order) if stretch else Uniform(order)
