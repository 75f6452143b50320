"""The benchmark of saves within Ray Train runs at its least size."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.benchmark_run import rows_of_benchmark

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


def test_each_way_to_save_has_a_row(tmp_path: Path) -> None:
    assert len(rows_of_benchmark("ray", tmp_path, timeout_s=800)) == 4
