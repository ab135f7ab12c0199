"""The base of every part of a recipe, and the value ranges that recur in them.

A section is a frozen, typed record that refuses unknown keys; msgspec checks types and ranges and names the place of
whatever does not fit (`Expected int >= 1 - at $.train.steps`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Count", "Factor", "Fraction", "Index", "NamedSection", "NonNegative", "Section", "Share"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a recipe: `task`, `model`, `family`, `optim`, `train`, `decode`."""


class NamedSection(Section, frozen=True, kw_only=True, tag_field="name"):
    """A section of which there are several kinds, which the key `name` tells apart."""

    @property
    def tag(self) -> str:
        """The kind as a recipe names it."""
        return str(self.__struct_config__.tag)


Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Factor = Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0.0)]
