"""Fixtures that every folder of tests may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from storage.moto_bucket import running_moto

from distributed.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of processes for tests with several ranks. Costs nothing until a test runs something on it."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def moto_options() -> Iterator[dict[str, Any]]:
    """The storage options of an S3 on this machine. Costs nothing until a test asks for it."""
    with running_moto() as options:
        yield options
