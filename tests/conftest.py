"""Fixtures that every folder of tests may ask for."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import no_pickle
import no_sync
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from thorough import is_thorough

from distributed.workers import WorkerPool

if TYPE_CHECKING:
    from storage.s3_service import S3Service

# Images of containers switch bytecode off, and then each of the hundreds of processes that tests start compiles the
# library anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# torch asks the DNS for the names of each connection to a store. Where one question in fifty gets no answer, tests
# waited 5 s for it hundreds of times.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


TESTS = Path(__file__).parent

no_pickle.install()
no_sync.install()

LONGEST = [
    *("test_histories.py", "test_tracked_loader.py", "test_data_log.py", "test_matrix.py", "test_frameworks_matrix.py"),
    *("test_benchmarks.py", "test_store_values.py", "test_site.py", "test_campaigns.py", "test_notebook.py"),
    *("test_lost_ranks.py", "test_layouts.py", "test_fsdp1.py", "test_load_costs.py", "test_failures.py"),
    *("test_webhdfs_store.py", "test_store_faults.py", "test_object_store_faults.py", "test_exit.py"),
]
"""Files that take longest: they come first, so that no process is left with one at the end. The first ones fork, which
costs more the more memory a process has.
"""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_thorough(item):
            item.add_marker("thorough")
    turns = {name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path.name, len(turns)))


def _is_thorough(item: pytest.Item) -> bool:
    function, _, parameters = item.name.partition("[")
    return is_thorough(str(item.path.relative_to(TESTS)), function, parameters.removesuffix("]"))


def pytest_collection_finish() -> None:
    """Whatever was imported and collected stays to the end. Where no collection of garbage looks at it, a process that
    is forked copies none of its pages.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_in_the_library_pickles() -> Iterator[None]:
    """In the whole suite. Workers and programs that tests start look to it themselves."""
    yield
    uses, no_pickle.uses[:] = no_pickle.uses[:], []
    assert not uses


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of this process wait for the disk."""
    monkeypatch.setattr(os, "fsync", no_sync.real_fsync)


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


@pytest.fixture(scope="session")
def s3_of_session() -> Iterator[S3Service]:
    """Started by the first test that asks for it, because moto takes a second to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what moto imports
        from storage.s3_service import running_s3_service

        with running_s3_service() as service:
            yield service


@pytest.fixture
def s3(s3_of_session: S3Service) -> S3Service:
    """A service without faults: moto's, or the real one that BCP_TEST_S3_ENDPOINT names."""
    if s3_of_session.faults is not None:
        s3_of_session.faults.reset()
    return s3_of_session


@pytest.fixture
def s3_faults(s3: S3Service):
    """The faults of the service."""
    if s3.faults is None:
        pytest.skip("a real service has no faults on demand")
    return s3.faults


@pytest.fixture
def s3_prefix(s3: S3Service) -> Iterator[str]:
    """Below which a test may write."""
    with s3.new_prefix() as prefix:
        yield prefix
