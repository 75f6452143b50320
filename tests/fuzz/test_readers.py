"""Readers under hypothesis: kept inputs changed by what they mean, and where one fails, the fewest changes that do it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError
from fuzz.targets import TARGETS, draw
from fuzz.watch import documented_kinds

SLOW = {"command": 10, "deepspeed": 30, "distcp": 30}
"""Examples; of the others a hundred."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_whatever_is_read_the_error_is_a_documented_one(name: str) -> None:
    target, kinds = TARGETS[name], documented_kinds()

    @settings(max_examples=SLOW.get(name, 100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def read(rng: Random) -> None:
        try:
            target.read(draw(target, rng))
        except CheckpointError as error:
            assert error.kind in kinds[type(error).__name__]

    read()
