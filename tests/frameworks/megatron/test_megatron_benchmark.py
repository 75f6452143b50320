"""The benchmark of saves within Megatron-LM's loop runs at its least size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from frameworks.benchmark_run import rows_of_benchmark

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def test_each_way_to_save_has_a_row(tmp_path: Path) -> None:
    assert len(rows_of_benchmark("megatron", tmp_path)) == 4
