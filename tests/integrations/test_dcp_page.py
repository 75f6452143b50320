"""The blocks of docs/integrations/dcp.md run, one after the other, in one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.dcp_programs import AppState, replicated, step
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import bytecheckpoint as bcp

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "dcp.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    model, optimizer = replicated(0)
    step(model, optimizer, torch.ones(3, 10))
    names: dict[str, Any] = {
        "AppState": AppState,
        "model": model,
        "optimizer": optimizer,
        "root": tmp_path,
        "stager": DefaultStager(StagingOptions(False, False, True, False)),
        "train_forward_and_backward": lambda: model(torch.ones(3, 10)).sum().backward(),
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["state"]["step"] == 1000
    assert names["info"].path == str(tmp_path / "step_2000")
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["step_1000", "step_2000", "step_3000", "step_4000"]
    assert all("app.model.0.weight" in bcp.open(path) for path in tmp_path.iterdir())
