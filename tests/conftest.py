"""Fixtures that every folder of tests may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of processes for tests with several ranks. Costs nothing until a test runs something on it."""
    pool = WorkerPool()
    yield pool
    pool.close()
