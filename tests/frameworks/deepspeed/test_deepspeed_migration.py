"""The blocks of docs/migrate/from-deepspeed.md run: DeepSpeed writes, and the new lines load what it wrote."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from migration_pages import assert_doctor_prints, blocks_of, run

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_deepspeed import (
    SETUPS,
    Net,
    engine_of,
    join_deepspeed,
    train,
    unequal,
    weights_of,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(300),
]


def run_blocks(rank: int, world_size: int, folder: str) -> list[str]:
    join_deepspeed(rank)
    os.chdir(folder)
    before, after, go_on, load = blocks_of("from-deepspeed.md")
    engine = engine_of(SETUPS["zero_2"], seed=1)
    train(engine, 3)
    unbroken = engine_of(SETUPS["zero_2"], seed=1)
    losses = train(unbroken, 5)[3:]
    names: dict[str, Any] = {"bcp": bcp, "engine": engine}
    run(before, names)
    run(after, names)
    assert names["client_state"]["epoch"] == 2
    assert bcp.open("run/global_step3").info.format == "bytecheckpoint"
    names["engine"] = engine_of(SETUPS["zero_2"], seed=2)
    run(go_on, names)
    weights = weights_of(engine)
    wrong = unequal(weights_of(names["engine"]), weights)
    wrong += [] if train(names["engine"], 2) == losses else ["losses"]
    names["model"] = model = Net(3)
    names["optimizer"] = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    run(load, names)
    found = dict(model.named_parameters())
    wrong += [name for name, each in weights.items() if not torch.equal(found[name], each)]
    assert_doctor_prints("old", load)
    return wrong


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    pool = WorkerPool()
    try:
        assert pool.run(run_blocks, str(tmp_path), world_size=1, timeout_s=250) == [[]]
    finally:
        pool.close()
