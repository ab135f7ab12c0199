"""All families. A new one is a file of its own, its import and its place in the union here, and a recipe."""

from __future__ import annotations

from insertlm.families.arm import ArmConfig
from insertlm.families.both import BothConfig
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.mdm import MdmConfig

__all__ = ["DEFAULT", "AnyFamily"]

# The `name` in a recipe, which is the tag of each, decides which of these the section is read as.
AnyFamily = IlmConfig | ArmConfig | MdmConfig | ItConfig | FillConfig | BothConfig

DEFAULT = IlmConfig()  # of a recipe that has no section `family`
