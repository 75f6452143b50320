"""The blocks of docs/integrations/deepspeed.md run, one after the other, in one program."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_deepspeed import SETUPS, Net, engine_of, join_deepspeed, train

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(300),
]

PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "deepspeed.md"


def run_blocks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    join_deepspeed(rank)
    engine = engine_of(SETUPS["zero_2"], seed=1)
    train(engine, 10)
    names: dict[str, Any] = {"bcp": bcp, "engine": engine, "save_dir": folder, "rank": rank, "world_size": world_size}
    names["loader"] = DataLoader(bcp.data.Streams({"a": list(range(9))}, rank=rank, size=world_size), batch_size=2)
    names["model"] = Net(2)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return {"path": names["path"], "client_state": names["client_state"], "batch": names["batch"].tolist()}


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    pool = WorkerPool()
    try:
        (found,) = pool.run(run_blocks, str(tmp_path), world_size=1, timeout_s=250)
    finally:
        pool.close()
    assert found == {"path": f"{tmp_path}/global_step10", "client_state": {"epoch": 2}, "batch": [0, 1]}
