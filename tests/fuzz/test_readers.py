"""Readers under hypothesis: kept inputs changed by what they mean, and the fewest changes that make one fail."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointError
from fuzz.targets import TARGETS, draw
from fuzz.watch import documented_kinds

SLOW = {
    "command": 10,
    "deepspeed": 30,
    "distcp": 30,
    "folder-groups": 20,
    "megatron": 30,
    "rank-files": 30,
    "trainer": 30,
}
"""Examples; of the others a hundred."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_whatever_is_read_the_error_is_a_documented_one(name: str) -> None:
    target, kinds = TARGETS[name], documented_kinds()

    @settings(max_examples=SLOW.get(name, 100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def read(rng: Random) -> None:
        refusal: CheckpointError | None = None
        try:
            target.read(draw(target, rng))
        except CheckpointError as error:
            refusal = error
        assert refusal is None or refusal.kind in kinds[type(refusal).__name__]

    read()
