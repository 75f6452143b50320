"""The blocks of docs/integrations/accelerate.md run, and so does the example, on other numbers of processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from rank_programs import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import bytecheckpoint as bcp

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "integrations" / "accelerate.md"
EXAMPLE = ROOT / "examples" / "accelerate_train.py"


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(4, 4))
    trained: list[Any] = []

    def train(batch: Any) -> None:
        trained.append(batch)
        if len(trained) == 2:
            signal.raise_signal(signal.SIGTERM)

    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), 2))
    names: dict[str, Any] = {"accelerator": accelerator, "root": tmp_path, "train": train, "loader": loader}
    names["signal"] = signal
    before = signal.getsignal(signal.SIGTERM)
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(trained) == 2
    assert all("model.weight" in bcp.open(tmp_path / name) for name in ("step_1000", "last"))


def test_the_example_trains_and_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    printed = run_ranks(EXAMPLE, ["--out", tmp_path, "--steps", 20], world_size=2)[0].output
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["10", "20"]
    printed = run_ranks(EXAMPLE, ["--out", tmp_path, "--steps", 40])[0].output
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["30", "40"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
