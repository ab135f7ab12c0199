"""What a whole number is, and how a wrong one is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from insertlm.core.checks import shown, whole_number
from insertlm.core.errors import InsertlmError


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3)])
def test_whole_numbers_of_any_type_are_ints(value: Any) -> None:
    number = whole_number("n", value, 0, 3)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.float64(3), np.bool_(True), [3], object(), 2, 6])
def test_nothing_else_is_one(value: Any) -> None:
    with pytest.raises(InsertlmError, match=r"^n: expected a whole number of at (least 3|most 5), got [^\n]*$"):
        whole_number("n", value, 3, 5)


def test_a_long_value_is_shown_short_and_in_one_line() -> None:
    assert shown("a" * 1000) == "'aaaaaaaaaaaa...aaaaaaaaaaaaa'"
    assert "\n" not in shown(np.eye(5))
