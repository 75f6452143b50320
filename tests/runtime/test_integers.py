"""Integers that a user passes, of numpy and torch too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bytecheckpoint.runtime.integers import integer_of


@pytest.mark.parametrize("value", [7, np.int64(7), np.array(7), torch.tensor(7), torch.tensor([7], dtype=torch.uint8)])
def test_one_integer_of_any_kind_is_a_plain_int(value: object) -> None:
    number = integer_of(value)
    assert (number, type(number)) == (7, int)


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), torch.tensor([False]), 7.0, torch.tensor(7.0), torch.tensor([7, 7])]
)
def test_a_bool_of_any_kind_and_other_values_are_no_integers(value: object) -> None:
    assert integer_of(value) is None
