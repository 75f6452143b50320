"""The blocks of docs/integrations/megatron.md run, one after the other, in one program."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.megatron.test_megatron_calls import Counting, training
from frameworks.real_megatron import differences, fill

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]

PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "megatron.md"


def run_blocks(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    with training(folder) as (_, built, _, _):
        fill(built)
        names: dict[str, Any] = {
            "bcp": bcp,
            "save_dir": folder,
            "iteration": 100,
            "model": built.chunks,
            "optimizer": built.optimizer,
            "opt_param_scheduler": Counting(),
            "num_floating_point_operations_so_far": 7e3,
        }
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
        return names["iteration"], names["num_operations"], names["args"]["hidden_size"], differences(built)


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    pool = WorkerPool()  # of its own, because it replaces functions of a module
    try:
        assert pool.run(run_blocks, str(tmp_path), world_size=2, timeout_s=250) == [(100, 7e3, 16, [])] * 2
    finally:
        pool.close()
