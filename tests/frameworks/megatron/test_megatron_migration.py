"""The calls of docs/migrate/from-megatron.md run. megatron.training is the stand-in of the other tests here, which
notes the calls. tests/frameworks/test_megatron_checkpoints.py runs the load of what Megatron wrote.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from migration_pages import blocks_of, run

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]


def run_calls(rank: int, world_size: int, folder: str) -> None:
    from frameworks.megatron.test_megatron_calls import Counting, training

    before, after, _ = blocks_of("from-megatron.md")
    with training(folder) as (_, built, _, _):
        from megatron.training import checkpointing

        names: dict[str, Any] = {"model": built.chunks, "optimizer": built.optimizer, "scheduler": Counting()}
        run(before, names)
        assert [call.split()[0] for call in checkpointing.CALLED[-2:]] == ["save_checkpoint", "load_checkpoint"]
        run(after, names)
        assert bcp.open(f"{folder}/iter_0000010").info.format == "bytecheckpoint"


@pytest.fixture
def workers() -> Any:
    pool = WorkerPool()
    yield pool
    pool.close()


def test_both_functions_are_called_as_before(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(run_calls, str(tmp_path), world_size=2)
