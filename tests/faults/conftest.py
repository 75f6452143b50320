"""Fixtures for tests that break things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.launcher import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts programs that have torch at once."""
    started = Launcher(tmp_path_factory.mktemp("programs"))
    yield started
    started.close()
