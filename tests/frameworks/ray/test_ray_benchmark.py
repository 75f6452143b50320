"""The benchmark of saves and resumes within Ray Train runs at its least size."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.benchmark_run import run_benchmark

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


def test_each_way_saves_and_this_library_resumes_on_other_ranks(tmp_path: Path) -> None:
    printed = run_benchmark("ray", tmp_path, timeout_s=800)
    assert len(printed.saves) == len(printed.resumes) == 5
    assert printed.of_library() == [("yes", "yes")] * 3
