"""The benchmark of saves and resumes within Megatron-LM's loop runs at its least size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from frameworks.benchmark_run import run_benchmark

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def test_each_way_saves_and_this_library_resumes_on_other_ranks(tmp_path: Path) -> None:
    printed = run_benchmark("megatron", tmp_path)
    assert len(printed.saves) == len(printed.resumes) == 5
    assert printed.of_library() == [("yes", "yes")] * 3
    assert printed.of_framework() == [("yes", "yes")] * 2
