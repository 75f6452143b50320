"""Fixtures that every folder of tests may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from distributed.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of processes for tests with several ranks. Costs nothing until a test runs something on it."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, for what frameworks do not build without one."""
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
