"""How fast bytes went, in words."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import TransferProgress, describe_progress


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        (
            TransferProgress(64_000_000, 1_500_000_000, 310.0),
            "64.0 of 1,500.0 MB were there after 310.0 s, 0.206 MB/s, at which the rest takes 6,955.6 s",
        ),
        (TransferProgress(0, 1_500_000_000, 310.0), "none of 1,500.0 MB was there after 310.0 s"),
        (TransferProgress(1_500_000_000, 1_500_000_000, 310.0), ""),
        (TransferProgress(1000, 5000, 0.3), ""),
        (
            TransferProgress(3_000_000_000, 6_000_000_000, 1.0),
            "3,000.0 of 6,000.0 MB were there after 1.0 s, 3,000 MB/s, at which the rest takes 1.0 s",
        ),
    ],
)
def test_what_was_given_up_on_half_way_has_a_rate_and_a_time_that_is_left(
    moved: TransferProgress, expected: str
) -> None:
    assert describe_progress(moved) == expected
