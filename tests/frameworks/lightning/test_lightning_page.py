"""The blocks of docs/integrations/lightning.md and the example run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from frameworks.lightning.lightning_runs import Regression, train_loader

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "integrations" / "lightning.md"


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"root": tmp_path / "run", "module": Regression(), "loader": train_loader()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert bcp.open(tmp_path / "run" / "last.ckpt").metadata["global_step"] == 20
    assert names["fabric"].strategy.bcp_async_save


def test_the_example_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    example = ROOT / "examples" / "lightning_trainer.py"
    assert len(example.read_text().splitlines()) <= 80
    command = [sys.executable, str(example), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Killed a step after the save of step 28: last.ckpt is copied beside training, and may still be an earlier one.
    assert re.search(r"went on from step (7|14|21|28): same losses: True", done.stdout)
