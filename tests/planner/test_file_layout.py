from __future__ import annotations

import pytest

from bytecheckpoint.options import SaveOptions
from bytecheckpoint.planner.file_layout import codec_of


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("none", "none"),
        ("zstd", "zstd"),
        ({}, "none"),
        ({"model.*": "zstd"}, "zstd"),
        ({"model.*.bias": "zstd"}, "none"),
        ({"*.w": "none", "model.*": "zstd"}, "none"),
        ({"model.*": "zstd", "*.w": "none"}, "zstd"),
        ({"model.layers.[0-3].w": "zstd"}, "zstd"),
        ({"MODEL.*": "zstd"}, "none"),
        ({"model": "zstd"}, "none"),
    ],
)
def test_the_first_glob_that_matches_counts(codec, expected) -> None:
    assert codec_of("model.layers.0.w", codec) == expected
    assert codec_of("model.layers.0.w", SaveOptions(codec=codec).codec) == expected
