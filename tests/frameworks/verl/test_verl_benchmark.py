"""The benchmark of saves and resumes within verl runs at its least size."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.benchmark_run import run_benchmark

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_each_way_saves_and_this_library_resumes_on_other_ranks(tmp_path: Path) -> None:
    printed = run_benchmark("verl", tmp_path)
    assert len(printed.saves) == len(printed.resumes) == 3
    assert printed.of_library() == [("yes", "yes")] * 2
    assert all("yes" not in outcome for outcome in printed.of_framework())
