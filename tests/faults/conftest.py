"""Fixtures for tests that break things."""

from __future__ import annotations

import pytest

from faults.launcher import Launcher, shared_launcher


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    """Starts programs that have torch at once."""
    return shared_launcher("faults.kill_times")
